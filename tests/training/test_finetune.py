"""A run from the files to the export: it learns, survives kills and refuses contradictions."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from ligermodels import AutoLiger, LigerLlama
from ligermodels.errors import ConfigError, DataError, LigerError
from ligermodels.training import data
from ligermodels.training import finetune as module
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import finetune, resumed_settings
from ligermodels.training.processes import Interrupted
from ligermodels.training.trainer import Trainer
from tests.training.tiny_run import (
    make_text,
    run,
    same,
    tensors,
    timeless,
)

ROOT = Path(__file__).parents[2]
# The handlers of a fresh process.
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.fixture(scope="module")
def finished(checkpoint, text, tmp_path_factory):
    return run(
        checkpoint, text, tmp_path_factory.mktemp("finished") / "run", max_steps=40, save_steps=16
    )


def test_perplexity_falls_and_every_step_is_logged(finished):
    assert finished.eval_after["eval_perplexity"] < 0.5 * finished.eval_before["eval_perplexity"]
    steps = [entry["step"] for entry in finished.metrics if "loss" in entry]
    assert steps == list(range(1, 41))
    evaluated = [entry["step"] for entry in finished.metrics if "eval_loss" in entry]
    assert evaluated == [0, 8, 16, 24, 32, 40]
    keys = {"step", "loss", "learning_rate", "grad_norm", "tokens", "targets", "seconds"}
    keys |= {"tokens_per_second"}
    assert keys == finished.metrics[1].keys()
    lines = (finished.output_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == finished.metrics


def test_the_folder_holds_plot_checkpoints_and_export(finished):
    assert (finished.output_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(file.name for file in (finished.output_dir / "checkpoints").iterdir())
    assert names == ["step-00000032", "step-00000040"]
    exported = {file.name for file in finished.model_dir.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= exported
    assert same(tensors(finished.model_dir), finished.model.state_dict())


def test_the_export_opens_in_transformers_with_the_same_loss(finished):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(finished.model_dir).eval()
    ids = torch.randint(0, 258, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = finished.model.eval()(ids, labels=ids).loss
        torch.testing.assert_close(ours, theirs(ids, labels=ids).loss, rtol=1e-5, atol=0)


def test_a_resumed_finished_run_changes_nothing(finished, checkpoint, text):
    before = (finished.model_dir / "model.safetensors").read_bytes()
    again = run(checkpoint, text, finished.output_dir, max_steps=40, save_steps=16, resume=True)
    assert again.metrics == finished.metrics
    assert (finished.model_dir / "model.safetensors").read_bytes() == before


def test_a_run_is_resumed_from_another_folder(checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.chdir(text.parent)
    first = run(os.path.relpath(checkpoint), text.name, tmp_path / "run", max_steps=2)
    monkeypatch.chdir(tmp_path)
    saved = resumed_settings("run")
    assert saved["train_files"] == [str(text)] and saved["model"] == str(checkpoint)
    again = finetune(
        FinetuneConfig.from_options(**saved | {"output_dir": "run", "resume": True}), progress=False
    )
    assert again.metrics == first.metrics


def test_resuming_with_other_options_or_data_is_refused(finished, checkpoint, text, tmp_path):
    def resume(**changes):
        changes = {"max_steps": 40, "save_steps": 16, "resume": True} | changes
        return run(checkpoint, text, finished.output_dir, **changes)

    with pytest.raises(LigerError, match=r"learning_rate: the run was started with 0\.003"):
        resume(learning_rate=1e-3)
    with pytest.raises(LigerError, match="max_steps: the run was started with 40"):
        resume(max_steps=50)
    other = make_text(tmp_path / "other.txt", seed=1)
    for changes in (
        {"train_files": [text, other]},
        {"eval_files": [other]},
        {"eval_fraction": 0.5},
    ):
        with pytest.raises(
            LigerError, match=rf"the training data \({text}.*\) or the part that is"
        ):
            resume(**changes)
    saved = resumed_settings(finished.output_dir)
    assert saved["learning_rate"] == 3e-3 and "resume" not in saved
    assert resumed_settings(tmp_path) == {}


def test_another_run_is_refused_and_overwritten_only_when_told(checkpoint, text, tmp_path):
    first = run(checkpoint, text, tmp_path / "run", max_steps=1)
    (first.output_dir / "notes.txt").write_text("mine")
    with pytest.raises(LigerError, match="holds another run"):
        run(checkpoint, text, tmp_path / "run", max_steps=1)
    with pytest.raises(DataError):  # a mistake in the new run leaves the old one unchanged
        run(checkpoint, tmp_path / "none.txt", tmp_path / "run", overwrite_output_dir=True)
    with pytest.raises(LigerError, match="would remove this, which the run reads"):
        run(first.model_dir, text, tmp_path / "run", overwrite_output_dir=True)
    assert first.model_dir.is_dir()
    second = run(checkpoint, text, tmp_path / "run", max_steps=2, overwrite_output_dir=True)
    assert len(second.metrics) == 2 + 3
    assert (first.output_dir / "notes.txt").read_text() == "mine"


def test_a_loss_that_is_not_finite_stops_the_run(checkpoint, text, tmp_path):
    with pytest.raises(
        LigerError, match=r"step \d+: the loss is (nan|inf|[\d.]+) and the gradient"
    ):
        run(checkpoint, text, tmp_path / "run", max_steps=40, learning_rate=1e30, max_grad_norm=0)
    assert not (tmp_path / "run" / "model").exists()


def test_the_callers_generators_are_left_alone(checkpoint, text, tmp_path):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    run(checkpoint, text, tmp_path / "run", max_steps=1)
    assert torch.equal(torch.rand(3), wanted)


def test_a_device_that_is_not_there_is_refused(checkpoint, text, tmp_path):
    for device in ("gpu", "mps", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(ConfigError, match="device: "):
            run(checkpoint, text, tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


def test_one_process_does_not_share_out_experts(checkpoint, text, tmp_path):
    with pytest.raises(ConfigError, match=r"expert_parallel: 2 processes .* are 1; start"):
        run(checkpoint, text, tmp_path / "run", expert_parallel=2)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def handlers():
    """Give the signals the handlers of a fresh process."""
    old = [signal.signal(s, h) for s, h in DEFAULTS.items()]
    yield
    for s, handler in zip(DEFAULTS, old):
        signal.signal(s, handler)


@pytest.fixture(scope="module")
def undisturbed(checkpoint, text, tmp_path_factory):
    """A run of six steps, and the bytes of its export."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    out = run(checkpoint, text, folder, save_steps=2, eval_steps=2).output_dir
    return out, (out / "model" / "model.safetensors").read_bytes()


PHASES = {
    "tokenizing": (data, "split_text", 1),
    "loading": (AutoLiger, "from_hf", 1),
    "first evaluation": (Trainer, "evaluate", 1),
    "step": (Trainer, "step", 3),
    "a later evaluation": (Trainer, "evaluate", 3),
    "checkpoint": (torch.distributed.checkpoint, "save", 1),
    "last step": (Trainer, "step", 6),
    "export": (LigerLlama, "save_hf", 1),
    "picture": (module, "plot_losses", 1),
}


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("phase", "save_steps"),
    [*((phase, 2) for phase in PHASES), ("step", 0), ("last step", 0), ("export", 0)],
)
def test_a_signal_at_every_phase_loses_nothing(
    checkpoint, text, tmp_path, undisturbed, monkeypatch, phase, save_steps
):
    holder, name, count = PHASES[phase]
    original = getattr(holder, name)
    signum = signal.SIGTERM if len(phase) % 2 else signal.SIGINT
    left = count

    def interrupted(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signum)
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, interrupted)
    given = {"save_steps": save_steps, "eval_steps": 2}
    with pytest.raises(Interrupted) as stop:
        run(checkpoint, text, tmp_path / "run", **given)
    assert stop.value.signum == signum
    steps = {"step": 3, "a later evaluation": 4, "checkpoint": 2, "last step": 6}
    said = str(stop.value)
    if phase in steps:
        assert f"the state after step {steps[phase]} is saved" in said and "--resume" in said
    elif phase in ("export", "picture"):
        assert "after the export" in said
    elif phase == "first evaluation":
        assert "starts from the beginning" in said
    else:
        assert "nothing was changed" in said and not (tmp_path / "run").exists()
    monkeypatch.undo()
    folder, (straight, weights) = tmp_path / "run", undisturbed
    if (phase, save_steps) == ("export", 0):
        with pytest.raises(LigerError, match="this run has ended"):
            run(checkpoint, text, folder, **given, resume=True)
    else:
        run(checkpoint, text, folder, **given, resume=True)
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    assert timeless(folder) == timeless(straight)
    assert (folder / "checkpoints").exists() == bool(save_steps)


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_a_library_turns_into_another_error_is_an_interruption(
    checkpoint, text, tmp_path, monkeypatch
):
    def broken(*_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("release unlocked lock") from None

    monkeypatch.setattr(data, "split_text", broken)
    with pytest.raises(Interrupted, match="nothing was changed"):
        run(checkpoint, text, tmp_path / "run")


def test_a_second_ctrl_c_within_a_step_keeps_the_last_checkpoint(
    checkpoint, text, tmp_path, undisturbed, monkeypatch
):
    step = Trainer.step

    def broken_off(self, number, batches):
        if number == 4:
            self.model.embed_tokens.weight.data.fill_(9)
            raise KeyboardInterrupt
        return step(self, number, batches)

    monkeypatch.setattr(Trainer, "step", broken_off)
    given = {"save_steps": 3, "eval_steps": 2}
    with pytest.raises(Interrupted, match="the state after step 3 is saved"):
        run(checkpoint, text, tmp_path / "run", **given)
    monkeypatch.undo()
    again = run(checkpoint, text, tmp_path / "run", **given, resume=True)
    assert (again.model_dir / "model.safetensors").read_bytes() == undisturbed[1]


def test_a_restart_resumes_only_what_its_own_launch_has_begun(
    checkpoint, text, tmp_path, monkeypatch
):
    given = {"max_steps": 1, "save_steps": 1}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    run(checkpoint, text, tmp_path / "run", **given)
    made = tmp_path / "run/checkpoints/step-00000001"
    before = made.stat().st_ino
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run(checkpoint, text, tmp_path / "run", **given)
    assert made.stat().st_ino == before
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    with pytest.raises(LigerError, match="the folder holds another run"):
        run(checkpoint, text, tmp_path / "run", **given)
