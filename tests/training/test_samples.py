"""Samples during a run: the prompts are continued greedily, and a run is not changed by them."""

from __future__ import annotations

import json

import pytest

from ligermodels import AutoLiger
from ligermodels.errors import CheckpointError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.config import OutputOptions
from ligermodels.training.reports import Sampler
from tests.training.tiny_run import forget, make_checkpoint, run, same, tensors


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_prompts_are_continued_greedily(checkpoint):
    model, tokenizer = AutoLiger.from_hf(checkpoint), Tokenizer.from_hf(checkpoint)
    prompted = OutputOptions(sample_prompts=["the cat"], sample_tokens=5)
    sampler = Sampler(prompted, tokenizer)
    sample = sampler(model)
    ids = tokenizer.encode("the cat")
    made = model.generate([ids], max_new_tokens=5)[0, len(ids) :]
    assert sample == {"the cat": tokenizer.decode(made)}
    chat = Sampler(OutputOptions(sample_prompts=["hi"], sample_chat=True), tokenizer)
    assert tokenizer.decode(chat.prompts["hi"]) == "<|user|>hi<|assistant|>"


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
