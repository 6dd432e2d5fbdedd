"""`ligermodels generate`: prompts, sampling, chats, and refused input."""

from __future__ import annotations

import io
import json
import shutil
import sys
from importlib import import_module

import pytest

from ligermodels import AutoLiger
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.heads.medusa_file import save_heads
from ligermodels.text.tokenizer import Tokenizer
from tests.cli.helpers import assert_one_line
from tests.training.tiny_run import make_checkpoint

GENERATE = import_module("ligermodels.generation.generate")  # the module, not the function


def test_generate_continues_a_prompt_streaming_or_not(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "8", "--device", "cpu"]
    code, streamed, err = call(*base)
    assert (code, err) == (0, "")
    assert streamed.endswith("\n")
    assert call(*base, "--no-stream") == (0, streamed, "")


def test_generate_uses_heads_that_the_folder_holds(call, checkpoint, monkeypatch, tmp_path):
    """Only without a penalty; the greedy text is the same."""
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    model = AutoLiger.from_hf(folder)
    save_heads(MedusaHeads(model.head, 2), folder)
    used = []
    passes = GENERATE.drafted_passes
    monkeypatch.setattr(
        GENERATE, "drafted_passes", lambda *a, **b: used.append(a) or passes(*a, **b)
    )
    base = ["generate", folder, "the cat", "--max-new-tokens", "8", "--device", "cpu"]
    plain = call(*base, "--no-heads")
    assert not used and call(*base) == plain and len(used) == 1
    assert call(*base, "--repetition-penalty", "1.2")[0] == 0 and len(used) == 1
    assert call(*base, "--seed", "1")[0] == 0 and len(used) == 2


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
    code, _, err = call(*base[:2], "cat", "--device", "cpu", "--max-new-tokens", "300")
    assert code == 0 and "max_position_embeddings" in err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    assert_one_line(call(*base[:2], "--device", "cpu"), "the text on stdin is not UTF-8", "0xe9")
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: [10**6])
    assert_one_line(call(*base[:2], "cat", "--device", "cpu"), "generate: ", "token 1000000")
