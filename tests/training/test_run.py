"""The stages of a run: the rows, the model, the memory plan and the export."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from unittest.mock import patch

import pytest
import torch

from ligermodels import AutoLiger, MemoryPlan
from ligermodels.errors import ConfigError, LigerError, SaveError
from ligermodels.models.base import DecoderModel
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import finetune, resumed_settings
from ligermodels.training.processes import Interrupted
from ligermodels.training.trainer import Trainer
from tests.training.tiny_run import forget, make_checkpoint, make_text, run, same, tensors


def test_rows_beyond_the_models_length_are_noted_once(text, tmp_path):
    short = make_checkpoint(tmp_path / "short", max_position_embeddings=32)
    notes = run(short, text, tmp_path / "run", max_steps=1, separator=None).notes
    assert sum("the model's max_position_embeddings (32)" in note for note in notes) == 1
    assert sum("data: 1 document, " in note for note in notes) == 2


def test_an_evaluation_file_takes_the_place_of_the_held_out_part(checkpoint, text, tmp_path):
    other = make_text(tmp_path / "eval.txt", paragraphs=5, seed=3)
    kept = run(checkpoint, text, tmp_path / "a", max_steps=1, eval_files=[other], save_steps=0)
    none = run(checkpoint, text, tmp_path / "b", max_steps=1, eval_fraction=0, save_steps=0)
    assert kept.eval_before and kept.metrics[0]["step"] == 0
    assert none.eval_before == none.eval_after == {}
    # Neither run keeps training data for evaluation.
    assert same(kept.model.state_dict(), none.model.state_dict())
    assert not (kept.output_dir / "checkpoints").exists()


def test_bf16_weights_and_an_export_in_another_dtype(checkpoint, text, tmp_path):
    pure = run(checkpoint, text, tmp_path / "a", precision="bf16", max_steps=2)
    assert {t.dtype for t in tensors(pure.model_dir).values()} == {torch.bfloat16}
    mixed = run(
        checkpoint,
        text,
        tmp_path / "b",
        precision="bf16-mixed",
        max_steps=2,
        export_dtype="fp16",
    )
    assert {t.dtype for t in tensors(mixed.model_dir).values()} == {torch.float16}
    full = run(checkpoint, text, tmp_path / "c", precision="bf16-mixed", max_steps=2)
    assert {t.dtype for t in tensors(full.model_dir).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "other"}, {}, "model_type 'other' is not supported"),
        ({"hidden_size": 72}, {}, "embed_tokens.weight' has shape"),
        (None, {}, "there is no safetensors file|model.safetensors"),
        ({}, {"freeze": ["no.such"]}, "freeze: 'no.such' matches no parameter"),
        ({}, {"lora_r": 2, "lora_targets": ["no"]}, "lora_targets: 'no' is no linear"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_data_are_read(
    checkpoint, text, tmp_path, monkeypatch, changes, options, message
):
    base = shutil.copytree(checkpoint, tmp_path / "base")
    if changes is None:
        (base / "model.safetensors").unlink()
    else:
        raw = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(raw | changes))
    monkeypatch.setattr("ligermodels.training.finetune.file_hashes", None)
    with pytest.raises(LigerError, match=message):
        run(base, text, tmp_path / "run", **options)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(text, tmp_path):
    small = make_checkpoint(
        tmp_path / "small", vocab_size=250, eos_token_id=None, bos_token_id=None
    )
    with pytest.raises(ConfigError, match="vocab_size: the tokenizer makes token 257"):
        run(small, text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("save_steps", [0, 1])
@pytest.mark.parametrize("fraction", [0, 0.1])
def test_a_last_update_that_is_not_finite_is_not_exported(
    checkpoint, text, tmp_path, save_steps, fraction
):
    with pytest.raises(LigerError, match=r"infinite or NaN.*no checkpoint was|loss is nan; no"):
        run(
            checkpoint,
            text,
            tmp_path / "run",
            max_steps=1,
            learning_rate=1e39,
            save_steps=save_steps,
            eval_fraction=fraction,
        )
    assert not (tmp_path / "run" / "model").exists()
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_checkpoint_that_the_disk_has_no_room_for_leaves_nothing(
    checkpoint, text, tmp_path, monkeypatch
):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ligermodels.training.checkpoints.sync_file", full)
    with pytest.raises(SaveError, match="step-00000001: cannot be written: No space left"):
        run(checkpoint, text, tmp_path / "run", max_steps=1)
    assert not os.listdir(tmp_path / "run" / "checkpoints")
    monkeypatch.undo()
    assert run(checkpoint, text, tmp_path / "run", max_steps=1, resume=True).steps == 1


def test_an_export_that_fails_keeps_the_trained_weights(checkpoint, text, tmp_path, monkeypatch):
    fails = patch.object(DecoderModel, "save_hf", side_effect=SaveError("full"))
    with fails, pytest.raises(SaveError, match="full"):
        run(checkpoint, text, tmp_path / "run", max_steps=1, save_steps=0)
    monkeypatch.setattr(Trainer, "step", None)
    assert run(checkpoint, text, tmp_path / "run", max_steps=1, save_steps=0, resume=True).loss


def test_a_run_that_has_ended_without_checkpoints_is_not_trained_again(checkpoint, text, tmp_path):
    given = {"max_steps": 1, "save_steps": 0}
    run(checkpoint, text, tmp_path / "run", **given)
    with pytest.raises(LigerError, match=r"this run has ended, its model is in .*/run/model"):
        run(checkpoint, text, tmp_path / "run", **given, resume=True)


def test_a_loss_that_is_not_finite_names_the_checkpoint_that_is_left(
    checkpoint, text, tmp_path, monkeypatch
):
    step = Trainer.step

    def broken(trainer, number, batches):
        made = step(trainer, number, batches)
        return {**made, "loss": torch.tensor(torch.nan)} if number == 1 else made

    monkeypatch.setattr(Trainer, "step", broken)
    left = r"the loss is nan .*step-00000001 has the weights after step 1; try a lower"
    with pytest.raises(LigerError, match=left):
        run(checkpoint, text, tmp_path / "run", max_steps=2, save_steps=1)


def test_weights_too_large_for_the_dtype_of_the_export_are_kept(text, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    model = AutoLiger.from_hf(base)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    model.save_hf(base)
    given = {"max_steps": 2, "save_steps": 0}
    with pytest.raises(LigerError, match=r"down_proj\.weight has values too large for float16"):
        run(base, text, tmp_path / "run", **given, export_dtype="float16")
    assert not (tmp_path / "run" / "model").exists()
    done = run(base, text, tmp_path / "run", **given, resume=True, export_dtype="bfloat16")
    assert {t.dtype for t in tensors(done.model_dir).values()} == {torch.bfloat16}


def test_a_pad_token_without_an_embedding_does_no_harm(text, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    found = json.loads((base / "tokenizer.json").read_text())
    found["added_tokens"].append({**found["added_tokens"][0], "id": 258, "content": "<pad>"})
    (base / "tokenizer.json").write_text(json.dumps(found))
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<pad>"}))
    assert run(base, text, tmp_path / "run", max_steps=2).steps == 2


@pytest.mark.gpu
def test_on_a_gpu_float32_weights_are_trained_under_autocast(checkpoint, text, tmp_path):
    given = {"device": None, "max_steps": 20, "save_steps": 10, "gradient_accumulation_steps": 2}
    result = run(checkpoint, text, tmp_path / "run", **given)
    assert result.eval_after["eval_perplexity"] < 0.6 * result.eval_before["eval_perplexity"]
    assert resumed_settings(result.output_dir)["precision"] == "bf16-mixed"
    assert {t.dtype for t in tensors(result.model_dir).values()} == {torch.float32}
    forget(result.output_dir, 20)
    again = run(checkpoint, text, tmp_path / "run", **given, resume=True)
    # Some kernels add in an order that changes between runs, so the weights differ a little.
    assert again.eval_after["eval_loss"] == pytest.approx(result.eval_after["eval_loss"], rel=1e-2)


def least_memory(checkpoint, text, output_dir, **changes):
    """Return the least bytes that a run names if its budget is too small."""
    with pytest.raises(ConfigError, match=r"at least \d+ bytes") as error:
        run(checkpoint, text, output_dir, memory="1MB", **changes)
    assert not (output_dir / "run.json").exists()
    return re.search(r"at least (\d+) bytes", str(error.value))[1]


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_the_least_memory_changes_nothing(checkpoint, text, tmp_path, compile):
    given = {"device": "cuda", "max_steps": 4, "precision": "float32", "compile": compile}
    plain = run(checkpoint, text, tmp_path / "a", **given, memory="off")
    least = least_memory(checkpoint, text, tmp_path / "b", **given)
    less = run(checkpoint, text, tmp_path / "b", **given, memory=least)
    assert plain.model.memory_plan is None and less.model.memory_plan is not None
    assert less.eval_after["eval_loss"] == pytest.approx(plain.eval_after["eval_loss"], rel=1e-3)
    free = run(checkpoint, text, tmp_path / "c", **given)
    assert not free.model.memory_plan.recomputes


@pytest.mark.usefixtures("rows_at_once")
def test_a_memory_budget_changes_nothing_but_what_layers_keep(checkpoint, text, tmp_path):
    """The plan is stored with the run, and a resumed run has it again."""
    kept = run(checkpoint, text, tmp_path / "a", max_steps=2)
    least = least_memory(checkpoint, text, tmp_path / "b", max_steps=2)
    less = run(checkpoint, text, tmp_path / "b", max_steps=2, memory=least)
    assert same(tensors(kept.model_dir), tensors(less.model_dir))
    plan = less.model.memory_plan
    assert plan.recomputes and plan.prediction.batch == 2 and plan.prediction.budget == int(least)
    assert any(note.startswith("memory: ") and "predicted peak" in note for note in less.notes)
    saved = json.loads((tmp_path / "b" / "run.json").read_text())
    assert MemoryPlan.from_dict(saved["memory_plan"]) == plan

    again = run(checkpoint, text, tmp_path / "b", max_steps=2, memory=least, resume=True)
    assert again.model.memory_plan == plan
    other = run(checkpoint, text, tmp_path / "b", max_steps=2, memory="1GB", resume=True)
    assert not other.model.memory_plan.recomputes
    settings = resumed_settings(tmp_path / "b")
    assert settings["memory"] == "1GB"
    again = finetune(FinetuneConfig.from_options(**settings, resume=True), progress=False)
    assert again.model.memory_plan == other.model.memory_plan


def test_a_run_without_a_budget_has_no_plan_on_a_cpu(checkpoint, text, tmp_path):
    for name, memory in (("a", None), ("b", "off")):
        done = run(checkpoint, text, tmp_path / name, max_steps=1, memory=memory)
        assert done.model.memory_plan is None
    with pytest.raises(
        ConfigError, match=r"memory: .* is what is free on a GPU, and there is none to ask for cpu"
    ):
        run(checkpoint, text, tmp_path / "c", memory="auto")


@pytest.mark.usefixtures("rows_at_once")
def test_a_plan_covers_evaluation_and_accumulated_gradients(checkpoint, text, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a few words\n")
    done = run(
        checkpoint,
        short,
        tmp_path / "run",
        eval_files=[text],
        max_steps=1,
        memory="1GB",
        gradient_accumulation_steps=2,
    )
    assert done.model.memory_plan.prediction.seq == 64  # rows of evaluation are the longest


def test_steps_between_two_logs_are_not_lost(checkpoint, text, tmp_path, monkeypatch):
    """The last ones wait for the end, or for an interruption that saves the run."""
    seldom = {"max_steps": 5, "eval_steps": 100, "logging_steps": 3}
    done = [run(checkpoint, text, tmp_path / "a", **seldom | {"logging_steps": 1})]
    done.append(run(checkpoint, text, tmp_path / "b", **seldom))
    step = Trainer.step

    def pressed(self, *args):
        if self.done == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", pressed)
        with pytest.raises(Interrupted, match="the state after step 2 is saved"):
            run(checkpoint, text, tmp_path / "c", **seldom)
    done.append(run(checkpoint, text, tmp_path / "c", **seldom, resume=True))
    losses = [[(x["step"], x["loss"]) for x in each.metrics if "loss" in x] for each in done]
    assert losses[0] == losses[1] == losses[2] and [at for at, _ in losses[0]] == [1, 2, 3, 4, 5]
