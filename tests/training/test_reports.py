"""What a run tells while it trains. The loggers: tests/integrations/test_loggers.py."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub import RepoUrl

from ligermodels import AutoLiger
from ligermodels.errors import CheckpointError, ConfigError, SaveError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.config import OutputOptions
from ligermodels.training.reports import Sampler, logged, logger_openers, push
from ligermodels.training.run_dir import RunDir
from tests.training.tiny_run import forget, make_checkpoint, run, same, tensors


class Remembers:
    def __init__(self, folder: Path, settings: dict[str, Any], start: int) -> None:
        self.given = folder, settings, start
        self.entries: list[Any] = []
        self.closed = False
        opened.append(self)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.entries.append((step, values))

    def close(self) -> None:
        self.closed = True


opened: list[Remembers] = []


def test_samples_that_cannot_be_made_are_refused_before_a_run_begins(
    checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="sample_prompts: a prompt is empty"):
        run(checkpoint, text, tmp_path / "run", sample_prompts=[""])
    assert not (tmp_path / "run").exists()


def test_loggers_get_each_line_within_the_context(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with logged(run_dir, [Remembers, Remembers], {"a": 1}, 3):
        run_dir.log({"step": 4, "loss": 2.0})
    run_dir.log({"step": 5, "loss": 1.0})
    for logger in opened:
        assert logger.given == (tmp_path, {"a": 1}, 3) and logger.closed
        assert logger.entries == [(4, {"loss": 2.0})]
    assert len(opened) == 2 and logger_openers([]) == []


@pytest.fixture
def hub(monkeypatch):
    """A hub with the methods of the library, which takes everything."""
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.create_repo.return_value = RepoUrl("https://hub/me/tiny", endpoint="https://hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return api


def test_a_run_is_pushed_at_its_end(hub, checkpoint, text, tmp_path):
    given = {"max_steps": 1, "push_to_hub": "me/tiny", "hub_private_repo": True}
    done = run(checkpoint, text, tmp_path / "run", **given)
    hub.create_repo.assert_called_once_with("me/tiny", private=True, exist_ok=True)
    sent = hub.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["folder_path"]) == ("me/tiny", done.model_dir)
    assert "pushed to https://hub/me/tiny" in done.notes


def test_nobody_logged_in_is_found_before_the_run(hub, checkpoint, text, tmp_path):
    hub.whoami.side_effect = OSError("401 Unauthorized")
    with pytest.raises(ConfigError, match="the hub does not say who is logged in: 401"):
        run(checkpoint, text, tmp_path / "run", push_to_hub="me/tiny")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_pushed_stays(hub, tmp_path):
    hub.upload_folder.side_effect = OSError("403 Forbidden")
    with pytest.raises(SaveError, match=rf"me/tiny: 403 .*; the model is in {tmp_path}"):
        push(tmp_path, "me/tiny", private=False)


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_prompts_are_continued_greedily(checkpoint, tmp_path):
    model, tokenizer = AutoLiger.from_hf(checkpoint), Tokenizer.from_hf(checkpoint)
    prompted = OutputOptions(sample_prompts=["the cat"], sample_tokens=5)
    sampler = Sampler(prompted, tokenizer, RunDir(tmp_path))
    sampler(model, nullcontext, 3)
    ids = tokenizer.encode("the cat")
    made = model.generate([ids], max_new_tokens=5)[0, len(ids) :]
    text = tokenizer.decode(made)
    assert lines(tmp_path) == [{"step": 3, "prompt": "the cat", "text": text}]
    asked = OutputOptions(sample_prompts=["hi"], sample_chat=True)
    chat = Sampler(asked, tokenizer, RunDir(tmp_path))
    assert tokenizer.decode(chat.prompts["hi"]) == "<|user|>hi<|assistant|>"
    asked.sample_system = "be brief"
    told = Sampler(asked, tokenizer, RunDir(tmp_path)).prompts["hi"]
    assert tokenizer.decode(told) == "<|system|>be brief<|user|>hi<|assistant|>"


def test_samples_do_not_change_a_run_and_go_on_with_it(checkpoint, text, tmp_path):
    given = {"max_steps": 4, "save_steps": 2, "eval_steps": 2}
    plain = run(checkpoint, text, tmp_path / "a", **given)
    sampled = {**given, "sample_prompts": ["the", "a"], "sample_tokens": 3}
    done = run(checkpoint, text, tmp_path / "b", **sampled)
    assert same(tensors(plain.model_dir), tensors(done.model_dir))
    found = lines(done.output_dir)
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (0, 2, 4) for prompt in ("the", "a")
    ]
    forget(done.output_dir, 4)
    run(checkpoint, text, tmp_path / "b", **sampled, resume=True)
    assert lines(done.output_dir) == found


def test_a_chat_needs_a_template(text, tmp_path):
    bare = make_checkpoint(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(CheckpointError, match="no chat template"):
        run(bare, text, tmp_path / "run", sample_prompts=["a"], sample_chat=True, max_steps=1)


def test_each_checkpoint_is_pushed_as_an_export(hub, checkpoint, text, tmp_path):
    """A hub that fails does not end the run; the last push does."""
    pushed = []

    def upload(**sent):
        pushed.append((sent["commit_message"], tensors(sent["folder_path"])))
        if len(pushed) == 1:
            raise OSError("503")

    hub.upload_folder.side_effect = upload
    given = {"push_to_hub": "me/tiny", "hub_strategy": "every_save", "save_steps": 2}
    done = run(checkpoint, text, tmp_path / "run", max_steps=4, **given)
    steps = ["Upload step 2", "Upload step 4", "Upload the fine-tuned model"]
    assert [message for message, _ in pushed] == steps
    assert not same(pushed[0][1], pushed[1][1]) and same(pushed[1][1], pushed[2][1])
    assert any("step 2: push_to_hub: me/tiny: 503" in note for note in done.notes)


@pytest.mark.usefixtures("quick_lm_eval")
def test_tasks_of_lm_eval_run_at_evaluations(checkpoint, text, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"page": "the cat saw a dog and ran"}')
    (tmp_path / "pages.yaml").write_text(
        "task: pages\ndataset_path: json\noutput_type: loglikelihood_rolling\n"
        f"test_split: train\ndataset_kwargs: {{data_files: {tmp_path}/data.jsonl}}\n"
        "doc_to_text: ''\ndoc_to_target: '{{page}}'\n"
        "metric_list: [{metric: byte_perplexity}]\n"
    )
    given = {"max_steps": 4, "eval_steps": 2}
    tasks = {"eval_tasks": ["pages"], "eval_tasks_folder": tmp_path}
    plain = run(checkpoint, text, tmp_path / "plain", **given)
    done = run(checkpoint, text, tmp_path / "run", **given, **tasks)
    name = "eval_pages/byte_perplexity"
    found = [entry[name] for entry in done.metrics if name in entry]
    assert len(found) == 3 and found[2] < found[0]
    assert done.eval_after[name] == found[2] and "eval_loss" in done.eval_after
    assert same(tensors(plain.model_dir), tensors(done.model_dir))  # it changes no step
