"""`ligermodels generate`: prompts, sampling, chats, and refused input."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import sys
from importlib import import_module
from unittest.mock import Mock

import pytest

from ligermodels import AutoLiger
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.heads.medusa_file import save_heads
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.evaluate import write_answers
from tests.cli.helpers import assert_one_line
from tests.training.tiny_run import make_checkpoint

GENERATE = import_module("ligermodels.generation.generate")  # the module, not the function


def test_generate_continues_a_prompt(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "8", "--device", "cpu"]
    code, out, err = call(*base)
    assert (code, err) == (0, "")
    model, tokenizer = AutoLiger.from_hf(checkpoint), Tokenizer.from_hf(checkpoint)
    ids = tokenizer.encode("the cat")
    made = model.generate([ids], max_new_tokens=8)[0, len(ids) :]
    assert out == tokenizer.decode(made) + "\n"


def test_generate_uses_heads_that_the_folder_holds(call, checkpoint, monkeypatch, tmp_path):
    """The greedy text is the same, also with a penalty and a stop."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    model = AutoLiger.from_hf(folder)
    save_heads(MedusaHeads(model.head, 2), folder)
    used = []
    passes = GENERATE.drafted_passes
    monkeypatch.setattr(
        GENERATE, "drafted_passes", lambda *a, **b: used.append(a) or passes(*a, **b)
    )
    base = ["the cat", "--max-new-tokens", "8", "--device", "cpu"]
    for options in ((), ("--repetition-penalty", "1.2", "--stop", "xyz")):
        used.clear()
        plain = call("generate", checkpoint, *base, *options)
        assert not used and call("generate", folder, *base, *options) == plain and len(used) == 1
    assert call("generate", folder, *base, "--seed", "1")[0] == 0 and len(used) == 2


def test_generate_samples_with_a_seed(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "12", "--device", "cpu"]
    sampling = ["--temperature", "5", "--top-k", "100", "--top-p", "0.99", "--seed"]
    one, same, other = (call(*base, *sampling, seed)[1] for seed in (1, 1, 2))
    assert one == same != other


def test_generate_reads_stdin_and_chats(call, checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    piped = call("generate", checkpoint, "--max-new-tokens", "4", "--device", "cpu")
    assert piped[0] == 0 and piped[1]
    chat = ["generate", checkpoint, "hello", "--chat", "--system", "be brief", "--device", "cpu"]
    code, out, err = call(*chat, "--max-new-tokens", "4")
    assert (code, err) == (0, "") and out


@pytest.fixture
def converse(call, checkpoint, monkeypatch):
    """A function that holds a conversation of given lines: it returns the result, and all chats."""
    chats = []
    render = Tokenizer.apply_chat_template

    def watched(self, messages, **options):
        chats.append([message["role"] for message in messages])
        return render(self, messages, **options)

    def run(*lines):
        turns = iter(lines)

        def answer(_):
            for turn in turns:
                if turn is KeyboardInterrupt:
                    raise turn
                return turn
            raise EOFError

        monkeypatch.setattr(Tokenizer, "apply_chat_template", watched)
        monkeypatch.setattr("builtins.input", answer)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        chat = ["generate", checkpoint, "--chat", "--device", "cpu", "--max-new-tokens", "3"]
        return call(*chat), chats

    return run


def test_a_conversation_goes_on_until_the_end_of_input(converse):
    (code, _, err), chats = converse("hello", "", "  ", "and you?")
    assert code == 0
    assert err.count("\n") == 1 and "ends the chat" in err and "Ctrl-C stops an answer" in err
    assert chats == [["user"], ["user", "assistant", "user"]]


@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupt_ends_the_answer_and_not_the_conversation(converse, monkeypatch, after):
    def pieces(*_, **__):
        yield from ["a", "b"][:after]
        raise KeyboardInterrupt

    monkeypatch.setattr(GENERATE, "stream_text", pieces)
    (code, out, _), chats = converse("hello", "and you?")
    assert code == 0 and out.startswith("ab\nab\n" if after else "\n\n")
    assert chats == [["user"], ["user", "assistant", "user"] if after else ["user"]]


def test_an_interrupt_at_the_prompt_shows_the_way_out(converse):
    (code, _, err), chats = converse("hello", KeyboardInterrupt, "and you?")
    assert code == 0 and err.count("Ctrl-D ends the chat") == 2 and len(chats) == 2


def test_temperature_0_is_greedy_and_a_tiny_one_works(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "8", "--device", "cpu"]
    greedy = call(*base)
    assert greedy[0] == 0
    for temperature in ("0", "1e-40"):
        assert call(*base, "--temperature", temperature, "--seed", "3", "--top-k", "5") == greedy


def test_generate_refuses_what_it_cannot_continue(call, checkpoint, tmp_path, monkeypatch):
    base = ["generate", checkpoint, "", "--device", "cpu"]
    assert_one_line(call(*base), "generate: PROMPT is empty")
    bare = make_checkpoint(tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_one_line(call("generate", bare, "hi", "--chat", "--device", "cpu"), "no chat template")
    most = ["--device", "cpu", "--max-new-tokens", str(10**12)]
    assert_one_line(call(*base[:2], "cat", *most), "generate: 1 rows of", "GiB are free")
    code, _, err = call(*base[:2], "cat", "--device", "cpu", "--max-new-tokens", "300")
    assert code == 0 and "max_position_embeddings" in err
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: [10**6])
    assert_one_line(call(*base[:2], "cat", "--device", "cpu"), "generate: ", "token 1000000")


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts with further keys, of which one is null."""
    records = [
        {"prompt": "the cat", "id": 7},
        {"prompt": [{"role": "user", "content": "h\u00e9"}], "generated": "an old answer"},
        {"prompt": "a dog and the", "id": None},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_a_file_of_prompts_is_answered_and_goes_on_after_a_kill(
    call, checkpoint, prompts, tmp_path, monkeypatch
):
    """Each text is that of the prompt alone. A kill may leave any number of the file's bytes."""
    output = tmp_path / "answers.jsonl"
    base = ["generate", checkpoint, "--device", "cpu", "--max-new-tokens", "6"]
    command = [*base, "--input", prompts, "--output", output, "--max-batch", "2"]
    code, out, err = call(*command)
    assert (code, err) == (0, "") and out.startswith("3 prompts, 18 tokens, ")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    given = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert [{**line, "generated": 0} for line in lines] == [{**x, "generated": 0} for x in given]
    alone = [call(*base, "the cat"), call(*base, "h\u00e9", "--chat"), call(*base, "a dog and the")]
    assert [line["generated"] + "\n" for line in lines] == [result[1] for result in alone]
    whole = output.read_bytes()
    first = whole.index(b"\n") + 1
    for size, said in ((0, 0), (first - 9, 0), (first, 1), (len(whole) - 1, 2), (len(whole), 3)):
        output.write_bytes(whole[:size])
        code, _, err = call(*command)
        assert code == 0 and output.read_bytes() == whole
        assert err == (f"{output}: {said} of 3 prompts answered\n" if said else "")
    prompts.write_text(prompts.read_text().replace("a dog", "a cow"))
    assert_one_line(call(*command), f"{output}:3: this line is not an answer to prompt 3")
    with open(output) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert_one_line(call(*command), f"{output}: another process is writing to it")
    prompts.write_text(prompts.read_text().replace("a cow", "a dog"))
    output.write_bytes(whole[:first])
    with monkeypatch.context() as patch:  # What else cannot be read or written is named itself.
        full = OSError(28, "No space left on device", "a cache")
        patch.setattr(AutoLiger, "from_hf", Mock(side_effect=full))
        code, _, err = call(*command)
    assert code == 2 and err.endswith("ligermodels: a cache: No space left on device\n")
    output.write_bytes(whole)
    assert output.read_bytes() == whole
    for note in ("a note", "\n", '{"prompt"\n'):  # It is no line that was cut short.
        output.write_text(note)
        assert_one_line(call(*command), f"{output}:1: this line is not")
        assert output.read_text() == note


def test_what_may_not_be_the_file_of_answers(call, checkpoint, prompts, tmp_path):
    command = ["generate", checkpoint, "--device", "cpu", "--input", prompts]
    assert_one_line(call(*command, "--output", prompts), "is the file of --input; give another")
    assert_one_line(call(*command, "--output", "/dev/full"), "is a pipe or a device; give a file")
    assert_one_line(call(*command, "--output", tmp_path), "Is a directory")


def test_a_fault_of_the_generation_is_none_of_the_file_of_answers(tmp_path):
    def found():
        raise OSError("a library is missing")
        yield

    with pytest.raises(OSError, match=r"^a library is missing$"):
        next(write_answers(tmp_path / "answers.jsonl", [None], found()))


def test_draws_after_a_kill_are_other_ones(call, checkpoint, prompts, tmp_path):
    prompts.write_text('{"prompt": "the cat"}\n' * 2)
    output = tmp_path / "answers.jsonl"
    command = ["generate", checkpoint, "--device", "cpu", "--input", prompts, "--output", output]
    command += ["--seed", "1", "--max-new-tokens", "20", "--max-batch", "1"]
    assert call(*command)[0] == 0
    first = output.read_bytes().splitlines(keepends=True)[0]
    output.write_bytes(first)  # as a kill leaves it
    assert call(*command)[0] == 0
    assert output.read_bytes().splitlines(keepends=True)[1] != first


def test_options_of_a_file_of_prompts(call, checkpoint, prompts, tmp_path):
    """Several samples are a list, --stop cuts them, and --chat makes messages of texts."""

    def texts(*options):
        output = tmp_path / "answers.jsonl"
        output.unlink(missing_ok=True)
        base = ["generate", checkpoint, "--input", prompts, "--output", output, "--device", "cpu"]
        assert call(*base, "--max-new-tokens", "20", *options)[0] == 0
        return [json.loads(line)["generated"] for line in output.read_text().splitlines()]

    drawn = texts("--seed", "1", "--temperature", "3", "--num-samples", "2")
    assert all(a != b for a, b in drawn) and texts("--seed", "1", "--temperature", "3")[0] != drawn
    stop = drawn[0][1][5:7]
    cut = texts("--seed", "1", "--temperature", "3", "--num-samples", "2", "--stop", stop)
    assert cut[0][1] == drawn[0][1][: drawn[0][1].index(stop)]
    plain, chat = texts(), texts("--chat", "--system", "be brief")
    assert chat[0] != plain[0] and chat[1] == plain[1]


def test_a_text_ends_before_a_stop(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "20", "--device", "cpu"]
    sampled = [*base, "--seed", "1", "--temperature", "3"]
    whole = call(*sampled)[1]
    stop = whole[4:7]
    expected = whole[: whole.index(stop)] + "\n"
    assert call(*sampled, "--stop", "not there", stop) == (0, expected, "")
    assert call(*sampled, "--stop", "not there") == (0, whole, "")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": ""}', "prompts.jsonl:2: the prompt is empty"),
        ('{"prompt": "a"}\nthe cat', "prompts.jsonl:2: this is not JSON"),
        ('{"text": "a"}', 'prompts.jsonl:1: "prompt" is missing'),
    ],
)
def test_bad_lines_are_named_before_a_model_is_loaded(
    call, checkpoint, prompts, monkeypatch, lines, words
):
    monkeypatch.setattr(AutoLiger, "from_hf", None)
    prompts.write_text(lines)
    output = prompts.with_name("answers.jsonl")
    base = ["generate", checkpoint, "--input", prompts]
    assert_one_line(call(*base, "--output", output, "--device", "cpu"), words)
    assert not output.exists()
    assert_one_line(call(*base), "input: this needs output")
    assert_one_line(
        call("generate", checkpoint, "a", "--output", output), "output: this needs input"
    )
