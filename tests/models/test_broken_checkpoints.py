"""Checkpoints broken in every known way: each load names the error, the file and the key."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import AutoLiger, CheckpointError, ConfigError, LigerLlama, LlamaConfig
from ligermodels.converters import files
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.checkpoint_files import COPIED_FILES

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Q = "model.layers.1.self_attn.q_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make(folder: Path, shards: int = 1, **changes: Any) -> Path:
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig(**{**SIZES, **changes})).bfloat16()
    model.save_hf(folder, max_shard_size=5 * 10**9 if shards == 1 else 4000)
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("good") / "model")


def copies(good: Path, parent: Path, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield each name with a copy of the good checkpoint in a folder of its own."""
    for number, name in enumerate(names):
        yield name, Path(shutil.copytree(good, parent / str(number)))


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**raw, **changes}))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, {"format": "pt"})

    return edit


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = (folder / SINGLE).read_bytes()
        length = struct.unpack_from("<Q", content)[0]
        header = json.loads(content[8 : 8 + length])
        text = json.dumps(change(header) or header).encode()
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return edit


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return edit


def replaced(name: str, kind: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind != "nothing":
            path.symlink_to({"device": "/dev/zero", "loop": path, "dangling": "nowhere"}[kind])

    return edit


def set_value(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors[Q].view(-1)[7].fill_(value)


def payload(folder: Path) -> None:
    class Run:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "executed"),)

    (folder / SINGLE).write_bytes(pickle.dumps({"weights": Run(), "more": bytes(10_000)}))


def swap_offsets(header: dict[str, Any]) -> None:
    header[Q]["data_offsets"] = [n + 2 for n in header[Q]["data_offsets"]]


HUGE = "9" * 5000
WEIGHTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "empty file": (bytes_of(SINGLE, lambda b: b""), SINGLE, "is truncated or is not a safetensors"),
    "header longer than the file": (
        bytes_of(SINGLE, lambda b: struct.pack("<Q", len(b)) + b[8:]),
        SINGLE,
        "header of .* bytes, too many for a file",
    ),
    "header of 2^63": (
        bytes_of(SINGLE, lambda b: struct.pack("<Q", 2**63) + b[8:]),
        SINGLE,
        "too many for a file",
    ),
    "header not JSON": (bytes_of(SINGLE, lambda b: b[:8] + b"x" + b[9:]), SINGLE, "is not JSON"),
    "header not UTF-8": (bytes_of(SINGLE, lambda b: b[:9] + b"\xff" + b[10:]), SINGLE, "UTF-8"),
    "truncated data": (bytes_of(SINGLE, lambda b: b[:-1]), SINGLE, "is truncated: the header decl"),
    "bytes too many": (bytes_of(SINGLE, lambda b: b + b"\0"), SINGLE, "1 bytes follow the last"),
    "overlap": (edit_header(swap_offsets), SINGLE, "begins at byte"),
    "shape and offsets disagree": (
        edit_header(lambda h: h[Q].update(shape=[16, 17])),
        SINGLE,
        f"'{Q}' has 512 bytes, which is not the size of BF16",
    ),
    "shape that overflows": (
        edit_header(lambda h: h[Q].update(shape=[2**33, 2**33])),
        SINGLE,
        f"'{Q}' has 512 bytes",
    ),
    "another shape": (
        edit_header(lambda h: h[Q].update(shape=[8, 32])),
        SINGLE,
        rf"'{Q}' has shape \[8, 32\], expected \[16, 16\]",
    ),
    "unknown dtype": (
        edit_header(lambda h: h[Q].update(dtype="Q4_K")),
        SINGLE,
        f"'{Q}' has dtype 'Q4_K'",
    ),
    "metadata of the wrong type": (
        edit_header(lambda h: h.update(__metadata__=[1])),
        SINGLE,
        "'__metadata__' is not an object",
    ),
    "pickle under another name": (payload, SINGLE, "is truncated|holds pickled"),
    "torch file under another name": (
        lambda folder: torch.save({"a": torch.zeros(9)}, folder / SINGLE),
        SINGLE,
        "holds pickled weights under another name; they are never unpickled",
    ),
    "missing tensor": (edit_tensors(lambda t: t.pop(Q)), SINGLE, f"'{Q}' is missing"),
    "missing head": (edit_tensors(lambda t: t.pop(HEAD)), SINGLE, f"'{HEAD}' is missing"),
    "unknown tensor": (
        edit_tensors(lambda t: t.update({"x.y": torch.zeros(1)})),
        SINGLE,
        "'x.y' is unexpected",
    ),
    "tensor of an odd name": (
        edit_tensors(lambda t: t.update({"\x1b[2J\n": torch.zeros(1)})),
        SINGLE,
        r"'\\x1b\[2J\\n' is unexpected",
    ),
    "tensor of no size": (
        edit_tensors(lambda t: t.update({Q: torch.zeros(0, 16)})),
        SINGLE,
        rf"'{Q}' has shape \[0, 16\]",
    ),
    "int8": (
        edit_tensors(lambda t: t.update({Q: torch.zeros(16, 16, dtype=torch.int8)})),
        SINGLE,
        f"'{Q}' is stored as I8: quantised",
    ),
    "float8": (
        edit_tensors(lambda t: t.update({Q: torch.zeros(16, 16).to(torch.float8_e4m3fn)})),
        SINGLE,
        f"'{Q}' is stored as F8_E4M3: quantised",
    ),
    "GPTQ": (
        edit_tensors(lambda t: t.update({f"{Q[:-6]}qweight": t.pop(Q).view(torch.int32)})),
        SINGLE,
        "q_proj.qweight' is part of a quantised weight",
    ),
    "pipe": (replaced(SINGLE, "pipe"), SINGLE, "is not a regular file"),
    "folder": (replaced(SINGLE, "folder"), SINGLE, "is not a regular file"),
    "device": (replaced(SINGLE, "device"), SINGLE, "is not a regular file"),
    "loop": (replaced(SINGLE, "loop"), SINGLE, "cannot be read: Too many levels of symbolic"),
    "dangling link": (replaced(SINGLE, "dangling"), SINGLE, "is a link to nowhere, which does"),
    "no weights": (
        replaced(SINGLE, "nothing"),
        "",
        "holds no weights: neither model.safetensors nor",
    ),
    "stale index": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
        INDEX,
        "does not name model.safetensors, which is in the same folder; one of the two is stale",
    ),
    "index that is a pipe": (lambda f: os.mkfifo(f / INDEX), INDEX, "is not a regular file"),
    "index cut": (lambda f: (f / INDEX).write_text('{"weight_map": {"a"'), INDEX, "is not JSON"),
    "index of numbers": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": 1}}'),
        INDEX,
        "'weight_map' puts 'a' into 1, which is not a plain .safetensors file",
    ),
    "index leaving the folder": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        INDEX,
        "'weight_map' puts 'a' into '../x.safetensors', which is not a plain .safetensors file",
    ),
    "index with a tensor twice": (
        lambda f: (f / INDEX).write_text(f'{{"weight_map": {{"a": "{SINGLE}", "a": "{SINGLE}"}}}}'),
        INDEX,
        "key 'a' appears twice",
    ),
}
CONFIGS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (bytes_of(CONFIG, lambda b: b[: len(b) // 2]), "is not JSON"),
    "empty": (bytes_of(CONFIG, lambda b: b""), "is not JSON"),
    "list": (bytes_of(CONFIG, lambda b: b"[" + b + b"]"), "holds a list, expected an object"),
    "byte order mark": (bytes_of(CONFIG, lambda b: b"\xef\xbb\xbf" + b), "BOM"),
    "UTF-16": (bytes_of(CONFIG, lambda b: b.decode().encode("utf-16")), "is not UTF-8"),
    "key twice": (
        bytes_of(CONFIG, lambda b: b'{"vocab_size": 24,' + b[1:]),
        "key 'vocab_size' appears twice",
    ),
    "deep": (edit_config(deep=json.loads("[" * 300 + "]" * 300)), "nested too deep"),
    "digits": (bytes_of(CONFIG, lambda b: b.replace(b"24", HUGE.encode())), "too many digits"),
    "pipe": (replaced(CONFIG, "pipe"), "is not a regular file"),
    "folder": (replaced(CONFIG, "folder"), "is not a regular file"),
    "device": (replaced(CONFIG, "device"), "is not a regular file"),
    "hidden_size 2^62": (edit_config(hidden_size=2**62), f"hidden_size is {2**62}"),
    "integer beyond floats": (edit_config(rms_norm_eps=10**400), "'rms_norm_eps' is 1000"),
    "theta beyond 64 bits": (
        edit_config(rope_theta=10**30, rope_parameters=None),
        "rope_theta' is 1000",
    ),
    "no heads": (edit_config(num_attention_heads=0), "num_attention_heads is 0"),
    "minus one layer": (edit_config(num_hidden_layers=-1), "num_hidden_layers is -1"),
    "layers as a float": (edit_config(num_hidden_layers=2.0), "'num_hidden_layers' is 2.0"),
    "layers as a string": (edit_config(num_hidden_layers="2"), "'num_hidden_layers' is '2'"),
    "layers as a truth": (edit_config(num_hidden_layers=True), "'num_hidden_layers' is True"),
    "eps NaN": (edit_config(rms_norm_eps=float("nan")), "'rms_norm_eps' is nan"),
    "theta infinite": (
        edit_config(rope_theta=float("inf"), rope_parameters=None),
        "rope_theta' is inf",
    ),
    "token beyond 32 bits": (edit_config(eos_token_id=[1, 2**31]), "'eos_token_id' is"),
    "surrogate": (edit_config(hidden_act="\ud800"), r"hidden_act '\\ud800' is not implemented"),
    "long string": (edit_config(hidden_act="x" * 10**6), "hidden_act 'xxx"),
    "negative range": (edit_config(initializer_range=-1.0), "initializer_range is -1.0"),
    "unknown rope": (
        edit_config(rope_scaling={"rope_type": "spiral"}),
        "rope_scaling.rope_type' is 'spiral'",
    ),
    "rope as a number": (edit_config(rope_parameters=0), "'rope_parameters' is 0, expected an obj"),
    "yarn of base 1": (
        edit_config(
            rope_scaling={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, rope_parameters=None
        ),
        "needs a rope_theta other than 1",
    ),
    "attention factor as a string": (
        edit_config(rope_scaling={"rope_type": "yarn", "factor": 2.0, "attention_factor": "x"}),
        "rope_scaling.attention_factor' is 'x'",
    ),
    "longrope of one token": (
        edit_config(
            max_position_embeddings=1,
            rope_scaling={"rope_type": "longrope", "factor": 4.0}
            | {key: [1.0, 1.0] for key in ("short_factor", "long_factor")},
        ),
        "original_max_position_embeddings' is 1, expected more than 1",
    ),
    "quantised": (
        edit_config(quantization_config={"quant_method": "gptq"}),
        r"'quantization_config': quantised checkpoints \('gptq'\)",
    ),
    "unknown quantisation": (
        edit_config(quantization_config=[{"x": [1] * 10**5}]),
        "'quantization_config': quantised checkpoints",
    ),
    "another family": (edit_config(model_type="mamba"), "model_type 'mamba' is not supported"),
    "model_type a list": (edit_config(model_type=["llama"]), r"model_type \['llama'\]"),
}


def refused(folder: Path, error: type[Exception], file: str, key: str, **options: Any) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=key) as caught:
        AutoLiger.from_hf(folder, **options)
    first = str(caught.value).partition("\n")[0]
    assert caught.type is error and len(first) < 1000 and first.isprintable()
    assert first.startswith(str(folder / file) if file else f"{folder}: ")


def test_broken_weights(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """The load refuses all of these by names and shapes; it reads no weights."""
    monkeypatch.setattr(Checkpoint, "read", None)
    for name, folder in copies(good, tmp_path, WEIGHTS):
        with subtests.test(name):
            damage, file, key = WEIGHTS[name]
            damage(folder)
            refused(folder, CheckpointError, file, key)
            assert not (folder / "executed").exists()


def test_broken_configs(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """The load refuses these by the config; it opens no weights."""
    monkeypatch.setattr(Checkpoint, "__init__", None)
    for name, folder in copies(good, tmp_path, CONFIGS):
        with subtests.test(name):
            damage, key = CONFIGS[name]
            damage(folder)
            refused(folder, ConfigError, CONFIG, key)


def test_a_config_of_other_sizes_than_the_weights(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(Checkpoint, "read", None)
    for number, (sizes, key) in enumerate(
        (
            (
                {"hidden_size": 2**20, "num_attention_heads": 2**16, "head_dim": 2**16},
                "embed_tokens",
            ),
            ({"vocab_size": 2**24, "max_position_embeddings": 2**40}, "embed_tokens"),
            ({"num_hidden_layers": 2**10}, "layers.2.input_layernorm.weight' is missing"),
            ({"num_hidden_layers": 1}, "layers.1.*' is unexpected"),
            (
                {"num_key_value_heads": 4},
                r"k_proj.weight' has shape \[8, 16\], expected \[16, 16\]",
            ),
            ({"head_dim": 8}, r"q_proj.weight' has shape \[16, 16\], expected \[32, 16\]"),
            ({"attention_bias": True}, "q_proj.bias' is missing"),
            ({"tie_word_embeddings": True}, "'lm_head.weight' differs from 'model.embed_tokens"),
        )
    ):
        with subtests.test(str(sizes)):
            folder = Path(shutil.copytree(good, tmp_path / str(number)))
            edit_config(**sizes)(folder)
            refused(folder, CheckpointError, SINGLE, key)


def test_shards(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", shards=2)
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"][Q]
    other = next(name for name in index["weight_map"].values() if name != shard)

    moved = {"weight_map": {**index["weight_map"], Q: other}}
    (folder / INDEX).write_text(json.dumps(moved))
    with pytest.raises(CheckpointError, match=rf"{INDEX}|{other}: '{Q}' is"):
        AutoLiger.from_hf(folder)

    gone = {"weight_map": {n: f for n, f in index["weight_map"].items() if n != Q}}
    (folder / INDEX).write_text(json.dumps(gone))
    refused(folder, CheckpointError, INDEX, f"'{Q}' is not mapped to {shard}")

    more = {"weight_map": {**index["weight_map"], "x": shard}}
    (folder / INDEX).write_text(json.dumps(more))
    refused(folder, CheckpointError, shard, "'x' is missing, but .* puts it there")

    (folder / INDEX).write_text(json.dumps(index))
    twice = load_file(folder / other) | {Q: torch.zeros(16, 16).bfloat16()}
    content = (folder / other).read_bytes()
    save_file(twice, folder / other)
    refused(folder, CheckpointError, INDEX, f"'{Q}' is not mapped to {other}, which holds it")

    (folder / other).write_bytes(content)
    AutoLiger.from_hf(folder)
    (folder / INDEX).unlink()
    refused(folder, CheckpointError, INDEX, "is missing, but there are shards")
    (folder / INDEX).write_text(json.dumps(index))
    (folder / shard).unlink()
    refused(folder, CheckpointError, shard, "is missing, but model.safetensors.index.json names it")


def test_nonfinite_values(good: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for value, folder in copies(good, tmp_path, ("nan", "inf", "-inf")):
        with subtests.test(value):
            edit_tensors(set_value(float(value)))(folder)
            refused(folder, CheckpointError, SINGLE, f"'{Q}' holds NaN or infinite values")
            model = AutoLiger.from_hf(folder, allow_nonfinite=True)
            assert not model.layers[1].self_attn.qkv_proj.weight.isfinite().all()


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may open every file, so a patched os.open refuses in place of the system."""
    folder = make(tmp_path / "model", shards=2)
    original = os.open
    for name, error in (
        (CONFIG, ConfigError),
        (INDEX, CheckpointError),
        ("model-00002-of-00003.safetensors", CheckpointError),
    ):

        def closed(path: Any, *args: Any, name: str = name, **options: Any) -> int:
            if os.fspath(path).endswith(name):
                raise PermissionError(13, "Permission denied")
            return original(path, *args, **options)

        monkeypatch.setattr(files.os, "open", closed)
        refused(folder, error, name, "cannot be read: Permission denied")
        monkeypatch.undo()


def test_a_shard_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file that shrinks would end the process by SIGBUS."""
    folder = make(tmp_path / "model")
    original = Checkpoint.check_aliases

    def cut(self: Checkpoint, table: Any) -> None:
        original(self, table)
        os.truncate(folder / SINGLE, 3000)

    monkeypatch.setattr(Checkpoint, "check_aliases", cut)
    refused(folder, CheckpointError, SINGLE, "the file was changed after its header was read")


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", num_hidden_layers=12)
    expected = AutoLiger.from_hf(folder).state_dict()
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{number:05}-of-{len(tensors):05}.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert len(weight_map) > 64
    got = AutoLiger.from_hf(folder).state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    code = f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\nclass Model: pass\n"
    for name in ("modeling.py", "__init__.py", "sitecustomize.py", "configuration_llama.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "configuration_llama.Model"}
    edit_config(auto_map=auto_map, trust_remote_code=True)(folder)
    AutoLiger.from_hf(folder)
    assert not (tmp_path / "executed").exists()


BROKEN_JSON = [b"", b"{", b"[]", b"\xff", b"[" * 10**5]


def test_other_broken_files_do_not_stop_a_load(tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder = make(tmp_path / "model")
    for content in (*BROKEN_JSON, b'{"a": 1, "a": 2}'):
        with subtests.test(repr(content[:20])):
            names = set(COPIED_FILES) - {"generation_config.json"}
            for name in names:
                (folder / name).write_bytes(content)
            AutoLiger.from_hf(folder).save_hf(tmp_path / "out")
            for name in names:
                assert (tmp_path / "out" / name).read_bytes() == content


def test_a_tokenizer_file_that_cannot_be_read_stops_a_load(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """If it counted as absent, a save would drop it without a word."""
    for name in (*COPIED_FILES, "additional_chat_templates/rag.jinja"):
        folder = make(tmp_path / name.partition("/")[0])
        (folder / name).parent.mkdir(exist_ok=True)
        for kind, message in {
            "pipe": "not a regular file but a pipe",
            "folder": "not a regular file but a folder",
            "device": "not a regular file but a device",
            "loop": "Too many levels",
            "dangling": "is a link to nowhere, which does not exist; restore that file, or remove",
        }.items():
            with subtests.test(f"{name}, {kind}"):
                (folder / name).touch()
                replaced(name, kind)(folder)
                with pytest.raises(CheckpointError, match=message) as caught:
                    AutoLiger.from_hf(folder)
                assert str(caught.value).startswith(f"{folder / name}: ")
                (folder / name).rmdir() if kind == "folder" else (folder / name).unlink()


def test_a_broken_generation_config_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder = make(tmp_path / "model")
    for content in (*BROKEN_JSON, b'{"eos_token_id": "x"}', b'{"eos_token_id": 1e400}'):
        with subtests.test(repr(content[:20])):
            (folder / "generation_config.json").write_bytes(content)
            with pytest.raises((ConfigError, CheckpointError)) as caught:
                AutoLiger.from_hf(folder).generate(torch.tensor([[1, 2]]), max_new_tokens=2)
            assert str(caught.value).startswith(str(folder / "generation_config.json"))
