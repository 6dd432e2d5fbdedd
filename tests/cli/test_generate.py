"""`ligermodels generate`: prompts, sampling, chats, and refused input."""

from __future__ import annotations

import io
import json
import sys

from ligermodels.text.tokenizer import Tokenizer
from tests.cli.helpers import assert_one_line
from tests.training.tiny_run import make_checkpoint


def test_a_mistake_in_the_arguments_is_one_line(call, subtests):
    for arguments, words in (
        (["generate", "m", "p", "--temperature", "-1"], ["--temperature"]),
        (["generate", "m", "p", "--top-p", "1.5"], ["--top-p", "at most 1"]),
        (["generate", "m", "p", "--max-new-tokens", "0"], ["--max-new-tokens", "at least 1"]),
        (["generate", "m", "p", "--system", "s"], ["--system", "--chat"]),
    ):
        with subtests.test(" ".join(arguments)):
            assert_one_line(call(*arguments), *words)


def test_an_unknown_device_is_one_line(call, checkpoint):
    assert_one_line(call("generate", checkpoint, "a", "--device", "tpu"), "or cuda, not 'tpu'\n")


def test_generate_continues_a_prompt_streaming_or_not(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "8", "--device", "cpu"]
    code, streamed, err = call(*base)
    assert (code, err) == (0, "")
    assert streamed.endswith("\n")
    assert call(*base, "--no-stream") == (0, streamed, "")


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


def test_a_conversation_goes_on_until_the_end_of_input(call, checkpoint, monkeypatch):
    shown = []
    render = Tokenizer.apply_chat_template

    def watched(self, messages, **options):
        shown.append([message["role"] for message in messages])
        return render(self, messages, **options)

    turns = iter(["hello", "and you?"])

    def answer(_):
        for turn in turns:
            return turn
        raise EOFError

    monkeypatch.setattr(Tokenizer, "apply_chat_template", watched)
    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    chat = ["generate", checkpoint, "--chat", "--device", "cpu", "--max-new-tokens", "3"]
    code, _, err = call(*chat)
    assert (code, err) == (0, "")
    assert shown == [["user"], ["user", "assistant", "user"]]


def test_generate_refuses_what_it_cannot_continue(call, checkpoint, tmp_path):
    base = ["generate", checkpoint, "", "--device", "cpu"]
    assert_one_line(call(*base), "generate: PROMPT is empty")
    bare = make_checkpoint(tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_one_line(call("generate", bare, "hi", "--chat", "--device", "cpu"), "no chat template")
    code, _, err = call(*base[:2], "cat", "--device", "cpu", "--max-new-tokens", "300")
    assert code == 0 and "max_position_embeddings" in err
