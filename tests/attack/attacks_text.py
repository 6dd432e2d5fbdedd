"""Attacks on tokenizers, chat templates and generation settings."""

from __future__ import annotations

import base64
import contextlib
import copy
import ctypes
import json
import os
import random
import resource
import socket
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.attack.harness import Case, Fault, address_space, attack
from tests.training.tiny_run import TEMPLATE, make_checkpoint, make_text, make_tokenizer

TALK = [{"role": "user", "content": "hi"}]
LINES = ["the quick brown fox jumps over the lazy dog", "a town by the sea, with 1234 people"] * 9


def _refused(what: str, work: Callable[[], object], *words: str) -> None:
    """Require that `work` raises an error of ligermodels with these words in its first line."""
    import ligermodels

    try:
        found = work()
    except ligermodels.LigerError as error:
        first = str(error).partition("\n")[0]
        for word in words:
            if word not in first:
                raise Fault(f"{what}: {word!r} is not in the message: {first}") from None
    else:
        raise Fault(f"{what} was accepted: {found!r}")


def _refused_or_done(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or None if it raises an error of ligermodels."""
    import ligermodels

    try:
        return work()
    except ligermodels.LigerError:
        return None


def _use(folder: Path, text: str = "the dog é") -> list[int]:
    """Do with a tokenizer what training and generation do, and return the ids of the text."""
    import ligermodels

    tokenizer = ligermodels.Tokenizer.from_hf(folder)
    ids: list[int] = tokenizer.encode(text)
    tokenizer.decode([*ids, 3, 9999], skip_special_tokens=False)
    tokenizer.id_to_token(3)
    if tokenizer.chat_template is not None:
        tokenizer.apply_chat_template(TALK, add_generation_prompt=True)
    if not all(0 <= i < 2**31 for i in ids):
        raise Fault(f"ids that no tensor of int32 holds: {ids}")
    return ids


def _spm(folder: Path) -> None:
    """Save a small tokenizer.model."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _token(content: str, **flags: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **plain, **flags}


KINDS = ("dead link", "loop", "folder", "pipe", "socket", "device", "link to pipe")


def _replace_by(case: Case, path: Path) -> str:
    """Put something that is no regular file in the place of a path; return what it is."""
    draw, kind = case.draw, case.turn(KINDS)
    if path.is_dir():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    if kind == "dead link":
        path.symlink_to(draw.choice(["gone", "../gone/file", "/nowhere"]))
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to pipe":
        os.mkfifo(path.parent / "a-pipe")
        path.symlink_to("a-pipe")
    elif kind == "device":
        path.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/dev/urandom"]))
    else:
        os.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    return kind


def _tokenizer_with_every_file(draw: random.Random, folder: Path) -> str:
    """Save a tokenizer, and return the name of a file that is read of it."""
    make_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    names += ["additional_chat_templates/x.jinja", "special_tokens_map.json"]
    if draw.random() < 0.4:
        (folder / "tokenizer.json").unlink()
        _spm(folder)
        _write(folder / "added_tokens.json", {"<x>": 310})
        names = ["tokenizer.model", "added_tokens.json", *names[1:]]
    _write(folder / "special_tokens_map.json", {"pad_token": "</s>"})
    _write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").write_text("x")
    return draw.choice(names)


@attack("A", 7, weight=2)
def tokenizer_files_that_are_no_files(case: Case) -> None:
    """A link that leads nowhere, a folder, a pipe and the like never count as an absent file."""
    name = _tokenizer_with_every_file(case.draw, case.folder)
    _use(case.folder)
    kind = _replace_by(case, case.folder / name)
    _refused(f"{name} as {kind}", lambda: _use(case.folder), name)


@attack("A", 7)
def template_folders_that_are_no_folders(case: Case) -> None:
    make_tokenizer(case.folder)
    path = case.folder / "additional_chat_templates"
    path.mkdir()
    kind = _replace_by(case, path)
    if kind == "folder":
        path.rmdir()
        path.write_text("a file")
    _refused(f"{path.name} as {kind}", lambda: _use(case.folder), path.name)


@attack("A", 7)
def settings_that_are_no_files_for_the_commands(case: Case) -> None:
    """No command works without the end token because a file cannot be read."""
    model = make_checkpoint(case.folder / "model")
    _write(model / "generation_config.json", {"eos_token_id": 257})
    _write(model / "special_tokens_map.json", {"eos_token": "</s>"})
    names = ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"]
    command = case.draw.choice(["generate", "finetune"])
    name = case.draw.choice([*names, "generation_config.json"])
    kind = _replace_by(case, model / name)
    case.label(f"{command} without the file of its end token", f"{kind} of a checkpoint")
    if command == "generate":
        done = case.cli("generate", model, "hi", "--max-new-tokens", 1)
    else:
        text, out = make_text(case.folder / "text.txt", 9), case.folder / "out"
        options = ("--quiet", "--seq-len", 32, "--batch-size", 1, "--device", "cpu")
        names = ("--train-files", "--output-dir", "--max-steps")
        done = case.cli("finetune", model, names[0], text, names[1], out, names[2], 1, *options)
        if "unrecognized" in done.err:  # The options had other names.
            names = ("--train", "--output", "--steps")
            done = case.cli("finetune", model, names[0], text, names[1], out, names[2], 1, *options)
        if (out / "run.json").exists():
            raise Fault(f"{name} as {kind}: finetune began a run")
    done.one_line(name)


@attack("A", 7)
def generation_settings_that_are_no_file(case: Case) -> None:
    import ligermodels

    model = make_checkpoint(case.folder / "model")
    kind = _replace_by(case, model / "generation_config.json")

    def work() -> Any:
        loaded = ligermodels.LigerLlama.from_hf(model)
        return loaded.generate([[5, 6]], max_new_tokens=1)

    _refused(f"generation_config.json as {kind}", work, "generation_config.json")


@attack("A", 8, weight=2)
def added_tokens_of_tokenizer_models(case: Case) -> None:
    """An added token is found where the tokenizers package finds it, whatever it consists of."""
    import tokenizers

    import ligermodels

    draw = case.draw
    _spm(case.folder)
    letters = [" ", "\n", "\t", "x", "e", "the", "[X]", "▁", "\u3000", "é"]
    kind = case.turn(["a space, lstrip", "spaces", "a newline", "any"])
    given = {"a space, lstrip": [" x"], "spaces": ["  "], "a newline": ["\n"], "any": []}[kind]
    found: dict[str, dict[str, Any]] = {}
    for number in range(draw.randint(1, 3)):
        content = "".join(draw.choices(letters, k=draw.randint(1, 3)))
        flags = {name: draw.random() < 0.5 for name in ("lstrip", "rstrip", "single_word")}
        if number < len(given):
            content, flags["lstrip"] = given[number], kind == "a space, lstrip"
        # Piece 0 is no text, and a content that is a piece itself has its id already.
        found.setdefault(content, _token(content, special=draw.random() < 0.5, **flags))
    config = {"added_tokens_decoder": {str(310 + i): t for i, t in enumerate(found.values())}}
    _write(case.folder / "tokenizer_config.json", {**config, "add_bos_token": False})
    oracle = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    oracle.add_tokens([tokenizers.AddedToken(t.pop("content"), **t) for t in _copies(found)])
    known = {oracle.token_to_id(content): content for content in found}
    ours = _refused_or_done(lambda: ligermodels.Tokenizer.from_hf(case.folder))
    if ours is None:  # A piece of the model has this content.
        return
    for _ in range(9):
        text = "".join(draw.choices([*letters, *found, "a", "b"], k=draw.randint(1, 9)))
        try:
            expected = [known[i] for i in oracle.encode(text).ids if i in known]
        except BaseException as panic:
            if type(panic).__name__ != "PanicException":  # It cannot split some texts.
                raise
            continue
        ids = ours.encode(text, add_special_tokens=False)
        got = [ours.id_to_token(i) for i in ids if i >= 310]
        if got != expected:
            raise Fault(f"{text!r} with {found}: {got} instead of {expected}")


def _copies(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [copy.copy(token) for token in found.values()]


# The first seven are of a tokenizer.model, the others of a tokenizer.json.
CONTRADICTIONS = (
    *("one id, two tokens", "300 and 0300", "one token, two ids", "the id of a piece"),
    *("a piece, another id", "two files, one id", "two files, two ids"),
    *("one id, two tokens in tokenizer.json", "a key twice", "an added token, the id of another"),
    *("one token, two ids beside tokenizer.json", "another id beside tokenizer.json"),
)


@attack("A", 8, weight=3)
def contradictions_about_ids(case: Case) -> None:
    """A file that gives a token two ids, or an id two tokens, is refused."""
    draw, folder = case.draw, case.folder
    one, other = draw.sample(["<x>", "[Y]", "zz", "é", " w"], 2)
    kind = case.turn(CONTRADICTIONS)
    if kind in CONTRADICTIONS[:7]:
        _spm(folder)
        index, piece = 310 + draw.randrange(9), draw.randrange(260, 310)
        settings: dict[str, Any] = {}
        if kind == "one id, two tokens":
            _write(folder / "added_tokens.json", {one: index, other: index})
        elif kind == "300 and 0300":
            settings = {str(index): _token(one), "0" * draw.randint(1, 3) + str(index): _token(one)}
        elif kind == "one token, two ids":
            settings = {str(index): _token(one), str(index + 1): _token(one)}
        elif kind == "the id of a piece":
            settings = {str(piece): _token(one)}
        elif kind == "a piece, another id":
            settings = {str(index): _token("▁the")}
        elif kind == "two files, one id":
            settings = {str(index): _token(one)}
            _write(folder / "added_tokens.json", {other: index})
        else:
            settings = {str(index): _token(one)}
            _write(folder / "added_tokens.json", {one: index + 1})
        if settings:
            _write(folder / "tokenizer_config.json", {"added_tokens_decoder": settings})
        _refused(f"{kind}: {one!r} and {other!r}", lambda: _use(folder))
        return
    make_tokenizer(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    if kind == "one id, two tokens in tokenizer.json":
        vocab[one] = vocab[draw.choice(list(vocab))]
        _write(file, content)
    elif kind == "a key twice":
        again = json.dumps(draw.choice(list(vocab)))
        text = json.dumps(content)
        file.write_text(text.replace('"vocab": {', f'"vocab": {{{again}: 258, '))
    elif kind == "an added token, the id of another":
        content["added_tokens"].append({**_token(one, special=True), "id": draw.randrange(256)})
        _write(file, content)
    elif kind == "one token, two ids beside tokenizer.json":
        settings = {"259": _token(one), "258": _token(one)}
        _write(folder / "tokenizer_config.json", {"added_tokens_decoder": settings})
    else:
        settings = {str(draw.randrange(256)): _token("</s>")}
        _write(folder / "tokenizer_config.json", {"added_tokens_decoder": settings})
    _refused(kind, lambda: _use(folder))


@attack("A", 8)
def the_same_text_has_the_same_tokens(case: Case) -> None:
    """Dropout of a tokenizer.json would make a run impossible to resume."""
    import tokenizers

    import ligermodels

    vocab = {letter: i for i, letter in enumerate(string.ascii_lowercase)}
    merges = []
    for _ in range(40):
        left, right = case.draw.choice(list(vocab)), case.draw.choice(list(vocab))
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    dropout = case.draw.choice([0.1, 0.5, 0.9, 1.0])
    model = tokenizers.models.BPE(vocab, merges, dropout=dropout)
    tokenizers.Tokenizer(model).save(str(case.folder / "tokenizer.json"))
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    ours = ligermodels.Tokenizer.from_hf(case.folder)
    for _ in range(20):
        text = "".join(left + right for left, right in case.draw.choices(merges, k=9))
        if ours.encode(text) != plain.encode(text).ids:
            raise Fault(f"dropout of {dropout} is on")


@attack("A", 9)
def generation_settings_changed_after_the_load(case: Case) -> None:
    """A loaded model generates the same tokens, whatever becomes of its files."""
    import ligermodels

    folder = make_checkpoint(case.folder / "model")
    file = folder / "generation_config.json"
    given = [{"eos_token_id": []}, {"repetition_penalty": 1.3}, {"eos_token_id": 257}, None]
    before = case.draw.choice(given)
    if before is not None:
        _write(file, before)
    model = ligermodels.LigerLlama.from_hf(folder)
    prompt = [[case.draw.randrange(256) for _ in range(5)]]
    first = model.generate(prompt, max_new_tokens=8)
    stop = int(first[0, case.draw.randrange(5, 9)])
    after = case.draw.choice(
        [f'{{"eos_token_id": {stop}}}', '{"repetition_penalty": 5.0}', "{", '{"eos_token_id": "x"}']
    )
    file.write_text(after)
    if model.generate(prompt, max_new_tokens=8).tolist() != first.tolist():
        raise Fault(f"{before} became {after}, and the loaded model generates something else")


@attack("B", 11)
def ids_that_are_no_ids(case: Case) -> None:
    """Negative ids, ids of more than 31 bits and ids that are no integers are refused."""
    draw, folder = case.draw, case.folder
    kind = case.turn(["negative", "negative in added_tokens.json", "beyond int32", "no integer"])
    values = {
        "beyond int32": [2**31, 2**32 - 1, 2**32, 2**63, 10**30],
        "no integer": [1.5, "5", True],
    }
    wrong = draw.choice(values.get(kind, [-1, -5, -(2**40)]))
    if kind == "negative in added_tokens.json" or draw.random() < 0.5:
        _spm(folder)
        if kind == "negative in added_tokens.json" or draw.random() < 0.5:
            _write(folder / "added_tokens.json", {"<x>": wrong})
        else:
            key = "x" if isinstance(wrong, str | float) else str(wrong)
            settings = {"added_tokens_decoder": {key: _token("<x>")}}
            _write(folder / "tokenizer_config.json", settings)
    else:
        make_tokenizer(folder)
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"]["<x>"] = wrong
        if draw.random() < 0.5:
            content["model"]["vocab"].pop("<x>")
            content["added_tokens"].append({**_token("<x>"), "id": wrong})
        _write(folder / "tokenizer.json", content)
    _refused(f"id {wrong!r}", lambda: _use(folder, "<x> a"))


def _odd_value(draw: random.Random) -> Any:
    simple = [None, True, False, 0, -1, 1.5, 10**40, 1e308, "", "x", "\ud800", "\0", "<s>", [], {}]
    kind = draw.randrange(10)
    if kind == 0:
        return [_odd_value(draw) for _ in range(draw.randrange(4))]
    if kind == 1:
        keys = ("content", "name", "template", "id", "x", "5", "-1")
        return {draw.choice(keys): _odd_value(draw) for _ in range(draw.randrange(4))}
    if kind == 2:
        return "x" * draw.choice([100, 5000])
    return draw.choice(simple)


@attack("B", 12, weight=2)
def odd_values_in_tokenizer_settings(case: Case) -> None:
    """Settings of wrong types, or with text that is not Unicode, work or are refused."""
    draw, folder = case.draw, case.folder
    slow = draw.random() < 0.5
    case.label("tokenizer.model" if slow else "tokenizer.json")
    if slow:
        _spm(folder)
        _write(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    else:
        make_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
    switches = ["add_bos_token", "add_eos_token", "add_prefix_space", "legacy"]
    keys = [
        *tokens,
        *switches,
        "chat_template",
        "added_tokens_decoder",
        "clean_up",
        "tokenizer_class",
    ]
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            token = _token("<x>")
            token[draw.choice(list(token))] = _odd_value(draw)
            next_id, odd = "310" if slow else "258", ["5", "x", "-1", "٣", "1e3", "99999999999"]
            index = draw.choice([next_id] * 6 + odd)
            settings["added_tokens_decoder"] = {index: token}
        else:
            settings[draw.choice(keys)] = _odd_value(draw)
    name = draw.choice(["tokenizer_config.json", "special_tokens_map.json"])
    (folder / name).write_text(json.dumps(settings))
    _refused_or_done(lambda: _use(folder))


def _steps_that_fail(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Return parts of a tokenizer.json that make the tokenizers package panic or fail."""
    slow = draw.choice([r"(a+)+$", r"(a|a)*b", r"(a*)*c", r"^(([a-z])+.)+[A-Z]([a-z])+$"])
    split = {"type": "Split", "pattern": {"Regex": slow}, "behavior": "Isolated", "invert": False}
    replace = {"type": "Replace", "pattern": {"Regex": slow}, "content": draw.choice(["", "x"])}
    table = base64.b64encode(draw.randbytes(draw.randrange(40))).decode()
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    template["single"] = [{"SpecialToken": {"id": "<none>", "type_id": 0}}, _sequence()]
    models = {
        "WordLevel": {
            "type": "WordLevel",
            "vocab": {"zz": 0},
            "unk_token": draw.choice(["?", "zz"]),
        },
        "Unigram": {
            "type": "Unigram",
            "vocab": draw.choice([[], [["zz", -1.0]]]),
            "unk_id": draw.choice([None, 0, 7]),
        },
        "WordPiece": {
            "type": "WordPiece",
            "vocab": {"zz": 0},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": draw.choice([0, 100]),
        },
        "BPE": {"type": "BPE", "vocab": {"zz": 0}, "merges": [], "unk_token": "[UNK]"},
    }
    merges = {"type": "BPE", "vocab": {"z": 0, "zz": 1}, "merges": [["z", draw.choice("zy")]]}
    return {
        "regex of a pre-tokenizer": {"pre_tokenizer": split},
        "regex of a normalizer": {"normalizer": replace},
        "table of characters": {
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": table}
        },
        "template": {"post_processor": template},
        "decoder": {"decoder": {**replace}},
        "length": {"pre_tokenizer": {"type": "FixedLength", "length": draw.choice([0, 1, 2**40])}},
        **{
            f"no unknown token, {name}": {"model": model, "added_tokens": []}
            for name, model in models.items()
        },
        "merges": {"model": merges, "added_tokens": []},
    }


def _sequence() -> dict[str, Any]:
    return {"Sequence": {"id": "A", "type_id": 0}}


@attack("B", 12, weight=3)
def tokenizers_that_panic(case: Case) -> None:
    """Where the tokenizers package fails or panics, ligermodels raises its own error."""
    draw, folder = case.draw, case.folder
    text = "a" * draw.randint(20, 40) + draw.choice(["b", "!", "X"])
    steps = _steps_that_fail(draw)
    parts = steps[case.turn(sorted(steps))]
    if draw.random() < 0.2:
        model = make_checkpoint(folder / "model")
        content = json.loads((model / "tokenizer.json").read_text())
        _write(model / "tokenizer.json", {**content, **parts})
        case.cli("generate", model, text, "--max-new-tokens", 1).fine_or_one_line()
        return
    make_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    _write(folder / "tokenizer.json", {**content, **parts})
    _refused_or_done(lambda: _use(folder, text))


NOT_UNICODE = (
    *("prompt", "standard input", "system text", "chat", "template", "template in the settings"),
    *("settings", "text", "name"),
)


@attack("B", 12, weight=2)
def text_that_is_not_unicode(case: Case) -> None:
    """Half a surrogate pair, or bytes that are not UTF-8, end in one line wherever they come in."""
    draw = case.draw
    model = make_checkpoint(case.folder / "model")
    # A first half before them would make a valid pair in JSON.
    bad = "".join(draw.choices(["a", " ", "é", "\udc80", "\udcff"], k=5)) + "\udcff"
    raw = b"caf\xe9 " + draw.randbytes(3) + b"\xff"
    one = ("--max-new-tokens", 1)
    kind = case.turn(NOT_UNICODE)
    if kind == "prompt":
        case.cli("generate", model, bad, *one).one_line()
    elif kind == "name":
        # A folder may have any bytes as its name.
        folder = model.rename(
            case.folder / os.fsdecode(b"m" + draw.randbytes(2).hex().encode() + b"\xff")
        )
        _use(folder)
    elif kind == "standard input":
        case.cli("generate", model, *one, stdin=raw).one_line()
    elif kind == "system text":
        case.cli("generate", model, "hi", "--chat", "--system", bad, *one).one_line()
    elif kind == "chat":
        case.cli("generate", model, "--chat", *one, stdin=raw).one_line()
    elif kind == "template":
        (model / "chat_template.jinja").write_bytes(raw)
        case.cli("generate", model, "hi", "--chat", *one).one_line("chat_template.jinja")
    elif kind in ("settings", "template in the settings"):
        settings = json.loads((model / "tokenizer_config.json").read_text())
        settings["pad_token" if kind == "settings" else "chat_template"] = bad
        _write(model / "tokenizer_config.json", settings)
        case.cli("generate", model, "hi", "--chat", *one).one_line("tokenizer_config.json")
    else:
        import ligermodels

        tokenizer = ligermodels.Tokenizer.from_hf(model)
        talk = [{"role": draw.choice(["user", bad]), "content": bad}]
        work = draw.choice(
            [lambda: tokenizer.encode(bad), lambda: tokenizer.apply_chat_template(talk)]
        )
        _refused("text that is not Unicode", work)
        if tokenizer.token_to_id(bad) is not None or tokenizer.id_to_token(-1) is not None:
            raise Fault("there is a token for text that is not Unicode, or for -1")


def _mutated(draw: random.Random, raw: bytes) -> bytes:
    """Return a file with a few changes: of bytes, or of a value somewhere in its JSON."""
    if draw.random() < 0.5:
        try:
            value = json.loads(raw)
        except ValueError:
            pass
        else:
            for _ in range(draw.randint(1, 2)):
                _mutate_inside(draw, value)
            return json.dumps(value).encode()
    content = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 8, 40])):
        at = draw.randrange(len(content) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            content[at : at + 1] = draw.randbytes(1)
        elif kind == 1:
            del content[at : at + draw.randrange(1, 9)]
        elif kind == 2:
            content[at:at] = draw.choice([b"{", b"}", b'"', b",", b"\0", b"\xff", b"[[", b"9" * 9])
        else:
            start = draw.randrange(len(content) + 1)
            content[at:at] = content[start : start + draw.randrange(30)]
    return bytes(content)


def _mutate_inside(draw: random.Random, value: Any) -> None:
    while isinstance(value, (dict, list)) and value:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        if not isinstance(value[key], (dict, list)) or not value[key] or draw.random() < 0.25:
            kind = draw.randrange(4)
            if kind == 0:
                del value[key]
            elif kind == 1 and isinstance(value, dict):
                value[draw.choice(["type", "x", "id", "content"])] = value.pop(key)
            elif kind == 2 and isinstance(value[key], int):
                value[key] += draw.choice([-1, 1, 2**31, 2**33, -(2**31)])
            else:
                value[key] = _odd_value(draw)
            return
        value = value[key]


RICH = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "NFC"},
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, _sequence()],
        "pair": [_sequence(), {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    },
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
}


@attack("B", 12, weight=8)
def mutated_tokenizer_files(case: Case) -> None:
    """A changed file works or is refused; what works gives the tokens of the library below."""
    import tokenizers

    draw, folder = case.draw, case.folder
    name = _tokenizer_with_every_file(draw, folder)
    if (file := folder / "tokenizer.json").exists() and draw.random() < 0.5:
        _write(file, {**json.loads(file.read_text()), **RICH})
    if draw.random() < 0.5 and (folder / "tokenizer.json").exists():
        name = "tokenizer.json"
    case.label(Path(name).name)
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(_mutated(draw, raw))
    text = draw.choice(["the dog é", "</s> a<s>", " ", "", "東京 x\n"])
    ids = _refused_or_done(lambda: _use(folder, text))
    if ids is not None and name == "tokenizer.json":
        # The settings of this tokenizer add nothing to its own file.
        content = json.loads((folder / name).read_text())
        content.get("model", {}).pop("dropout", None)
        plain = tokenizers.Tokenizer.from_str(json.dumps(content))
        plain.no_truncation()
        plain.no_padding()
        plain.add_special_tokens(["<s>", "</s>"])
        if ids != plain.encode(text).ids:
            raise Fault(f"{text!r} gives {ids} instead of {plain.encode(text).ids}")


@attack("E", 18)
def tokenizers_that_are_there_but_no_file(case: Case) -> None:
    """The message does not say that a file is missing and that it is there in one line."""
    import ligermodels

    make_tokenizer(case.folder)
    kind = _replace_by(case, case.folder / "tokenizer.json")
    try:
        ligermodels.Tokenizer.from_hf(case.folder)
    except ligermodels.LigerError as error:
        said = str(error)
        if "no tokenizer.json and" in said or "tokenizer.json" not in said:
            raise Fault(f"tokenizer.json as {kind}: {said}") from None
    else:
        raise Fault(f"tokenizer.json as {kind} was accepted")


EVER = "{% for _ in range(100000) %}"
START = "{% set ns = namespace(s='x' * 100, l=[0], n=7) %}"
ENDLESS = [
    EVER * 3 + "BODY" + "{% endfor %}" * 3,
    EVER + "{% for _ in range(100000) if 'b' in 'ab' %}BODY{% endfor %}{% endfor %}",
    "{% macro m(n) %}BODY{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(DEPTH) }}",
    "{% macro m() %}"
    + EVER
    + "{{ caller() }}{% endfor %}{% endmacro %}{% call m() %}"
    + EVER
    # The body of a call is a loop, too.
    + "BODY{% endfor %}{% endcall %}",
    "{% block b %}" + EVER + "BODY{% endfor %}{% endblock %}" + EVER + "{{ self.b() }}{% endfor %}",
]
HUGE = [
    START + "{% for _ in range(DEPTH) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    START + "{% for _ in range(DEPTH) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    START + "{% for _ in range(DEPTH) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l }}",
    START + "{% for _ in range(DEPTH) %}{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
    "{{ 'x' * LARGE }}",
    "{{ [0] * LARGE }}",
    "{{ 'x'.ljust(LARGE) }}",
    "{{ 'x' | center(LARGE) }}",
    "{{ '%LARGEd' % 1 }}",
    "{{ '%*d' % (LARGE, 1) }}",
    "{{ '{:LARGE}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w='LARGE') }}",
    "{{ messages | tojson(indent=LARGE) }}",
    "{{ 'a\nb' | indent(LARGE) }}",
    "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "{{ ('\t' * 999999).expandtabs(999999) }}",
    "{{ (5).to_bytes(LARGE, 'big') }}",
    "{{ lipsum(LARGE) }}",
    "{{ [1] | batch(LARGE, 'x') | list }}",
]
ENDLESS_OPERATIONS = [
    "{{ 9 ** (9 ** 9) }}",
    START + EVER + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ ('<!--' * 999999) | striptags }}",
    "{{ 1.5 | round(LARGE, 'ceil') }}",
]
BODIES = ["", "x", "{{ messages }}", "{% set y = 'a' ~ 'b' %}", "{{ 'a' | upper }}", "{{ 1 + 1 }}"]


def _render(case: Case, template: str) -> None:
    """Render a template from one of the places where templates are; it must be refused."""
    import ligermodels

    for word, value in (
        ("BODY", case.draw.choice(BODIES)),
        ("DEPTH", case.draw.randint(40, 99)),
        ("LARGE", case.draw.choice([3 * 10**9, 10**10, 10**12])),
    ):
        template = template.replace(word, str(value))
    make_tokenizer(case.folder)
    place = case.draw.randrange(3)
    if place == 0:
        (case.folder / "chat_template.jinja").write_text(template)
    elif place == 1:
        settings = json.loads((case.folder / "tokenizer_config.json").read_text())
        _write(case.folder / "tokenizer_config.json", {**settings, "chat_template": template})
    given = template if place == 2 else None

    def work() -> Any:
        tokenizer = ligermodels.Tokenizer.from_hf(case.folder)
        return len(tokenizer.apply_chat_template(TALK, tokenize=False, chat_template=given))

    with _limited_memory():
        _refused(f"the template {template[:200]!r}", work)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Let no attack take the memory of the machine; raise Fault if one takes more than 1 GB."""
    limit = address_space() + 4 * 2**30  # torch with CUDA has mapped many gigabytes already.
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    ctypes.CDLL(None).malloc_trim(0)  # What this process holds and does not use would hide a part.
    Path("/proc/self/clear_refs").write_text("5")  # The peak is from now on.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if taken > 10**9:
        raise Fault(f"it took {taken / 1e9:.1f} GB of memory")


@attack("C", 16, weight=2)
def templates_that_never_end(case: Case) -> None:
    _render(case, case.draw.choice(ENDLESS))


@attack("C", 16, weight=3)
def templates_that_write_without_end(case: Case) -> None:
    """A text that would take all memory is refused before it takes any."""
    _render(case, case.draw.choice(HUGE))


@attack("C", 16, weight=2)
def templates_that_compute_without_end(case: Case) -> None:
    _render(case, case.draw.choice(ENDLESS_OPERATIONS))


@attack("C", 16, weight=2)
def templates_that_are_huge_or_deep(case: Case) -> None:
    """A source that is too long, or nested too deep, is refused at once."""
    draw = case.draw
    count = draw.choice([20_000, 100_000, 1_000_000])
    start, middle, end = draw.choice(
        [
            ("{{ " + "(" * count, "1", ")" * count + " }}"),
            ("{{ " + "[" * count, "", "]" * count + " }}"),
            ("{{ " + "1 + " * count, "1", " }}"),
            ("{{ x", ".a" * count, " }}"),
            ("{% if 1 %}" * count, "x", "{% endif %}" * count),
            ("{% macro m() %}{{ m() }}", "{% endmacro %}", "{{ m() }}"),
            ("{% for a in [1] recursive %}", "{{ loop([1, 1]) }}", "{% endfor %}"),
            ("{{ 'x' }}" * count * 3, "", ""),
            ("x" * count * 30, "", ""),
        ]
    )
    _render(case, start + middle + end)


@attack("C", 16, weight=2)
def files_that_never_end(case: Case) -> None:
    """A pipe that nobody writes, or a device, in the place of any file is refused at once."""
    name = _tokenizer_with_every_file(case.draw, case.folder)
    name = case.draw.choice([name, "chat_template.jinja", "additional_chat_templates/x.jinja"])
    path = case.folder / name
    path.unlink()
    kind = case.turn(["pipe", "written pipe", "device"])
    case.label(f"{kind} as template" if name.endswith(".jinja") else kind)
    if kind == "device":
        path.symlink_to(case.draw.choice(["/dev/zero", "/dev/urandom"]))
    else:
        os.mkfifo(path)
    if kind == "written pipe" and os.fork() == 0:
        with open(path, "wb") as pipe:
            while True:
                pipe.write(b"x" * 65536)
    with _limited_memory():
        _refused(f"{name} as {kind}", lambda: _use(case.folder), Path(name).name)
