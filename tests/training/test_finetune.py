"""A run from the files to the export: it learns, survives kills and refuses contradictions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ligermodels import AutoLiger, LigerLlama, MemoryPlan
from ligermodels.errors import CheckpointError, ConfigError, DataError, LigerError
from ligermodels.training import checkpoints, data
from ligermodels.training import finetune as module
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.finetune import finetune, resumed_settings
from ligermodels.training.interrupts import Interrupted
from ligermodels.training.trainer import Trainer
from tests.training.tiny_run import make_checkpoint, make_text

ROOT = Path(__file__).parents[2]
# The handlers of a fresh process.
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text") / "words.txt")


def options(checkpoint, text, output_dir, **changes):
    given = {
        "model": checkpoint,
        "train_files": [text],
        "output_dir": output_dir,
        "separator": "",
        "seq_len": 64,
        "batch_size": 2,
        "learning_rate": 3e-3,
        "max_steps": 6,
        "device": "cpu",
    }
    return FinetuneConfig(**(given | changes))


def run(*args, **changes):
    return finetune(options(*args, **changes), progress=False)


def tensors(folder):
    return AutoLiger.from_hf(folder).state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def finished(checkpoint, text, tmp_path_factory):
    return run(
        checkpoint, text, tmp_path_factory.mktemp("finished") / "run", max_steps=40, save_steps=16
    )


def test_perplexity_falls_and_every_step_is_logged(finished):
    assert finished.perplexity_after < 0.5 * finished.perplexity_before
    steps = [entry["step"] for entry in finished.metrics if "loss" in entry]
    assert steps == list(range(1, 41))
    evaluated = [entry["step"] for entry in finished.metrics if "eval_loss" in entry]
    assert evaluated == [0, 8, 16, 24, 32, 40]
    keys = {"step", "loss", "learning_rate", "grad_norm", "tokens", "targets", "seconds"}
    assert keys == finished.metrics[1].keys()
    lines = (finished.output_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == finished.metrics


def test_the_folder_holds_plot_checkpoints_and_export(finished):
    assert (finished.output_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(file.name for file in (finished.output_dir / "checkpoints").iterdir())
    assert names == ["step-00000032.safetensors", "step-00000040.safetensors"]
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


@pytest.mark.parametrize(
    ("chains", "least", "threads"),
    [
        # Two threads are slow while other tests run on the same cores.
        pytest.param(["4"], 7, "1", id="sample"),
        pytest.param(["0", "1", "2", "3", "4"], 20, "2", id="long", marks=pytest.mark.long),
    ],
)
def test_killing_at_any_moment_and_resuming_gives_the_same_weights(
    checkpoint, text, tmp_path, chains, least, threads
):
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    driver = subprocess.run(
        [sys.executable, ROOT / "tests" / "kill_driver.py", checkpoint, text, tmp_path, *chains],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert driver.returncode == 0, driver.stderr
    kills = [int(line.split()[-2]) for line in driver.stdout.splitlines()]
    assert len(kills) == len(chains) and sum(kills) >= least
    straight = tmp_path / "straight"
    for chain in chains:
        killed = tmp_path / f"killed-{chain}"
        for name in ("model/model.safetensors", "checkpoints/step-00000012.safetensors"):
            assert (killed / name).read_bytes() == (straight / name).read_bytes(), (chain, name)
        assert timeless(killed) == timeless(straight)
        assert everything(killed) == everything(straight)


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def timeless(folder):
    """Return the metrics without their times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_resuming_without_a_run_starts_one(checkpoint, text, tmp_path):
    one = run(checkpoint, text, tmp_path / "a", resume=True, max_steps=2)
    other = run(checkpoint, text, tmp_path / "b", max_steps=2)
    assert same(one.model.state_dict(), other.model.state_dict())


def test_a_run_is_resumed_from_another_folder(checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.chdir(text.parent)
    first = run(os.path.relpath(checkpoint), text.name, tmp_path / "run", max_steps=2)
    monkeypatch.chdir(tmp_path)
    saved = resumed_settings("run")
    assert saved["train_files"] == [str(text)] and saved["model"] == str(checkpoint)
    again = finetune(
        FinetuneConfig(**saved | {"output_dir": "run", "resume": True}), progress=False
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
    with pytest.raises(LigerError, match=rf"training data is not what.*: {other} changed or is"):
        resume(train_files=[text, other])
    with pytest.raises(LigerError, match=r"training data is not what.*: the files are the same"):
        resume(eval_files=[other])
    saved = resumed_settings(finished.output_dir)
    assert saved["learning_rate"] == 3e-3 and "resume" not in saved
    assert resumed_settings(tmp_path) == {}


def test_a_training_file_that_is_left_out_on_resume_is_named(checkpoint, text, tmp_path):
    other = make_text(tmp_path / "other.txt", seed=1)
    run(checkpoint, text, tmp_path / "run", train_files=[text, other], max_steps=1)
    with pytest.raises(LigerError, match=rf"training data is not what.*: {other} is left out"):
        run(checkpoint, text, tmp_path / "run", max_steps=1, resume=True)


def test_a_run_into_the_checkpoint_is_refused_before_anything_is_written(text, tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    for changes in ({}, {"overwrite_output_dir": True}, {"resume": True}):
        with pytest.raises(LigerError, match="is the checkpoint to start from; choose another"):
            run(folder, text, tmp_path / "x" / ".." / "tiny", **changes)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_rows_beyond_the_models_length_are_noted_once(text, tmp_path):
    short = make_checkpoint(tmp_path / "short", max_position_embeddings=32)
    notes = run(short, text, tmp_path / "run", max_steps=1, separator=None).notes
    assert sum("the model's max_position_embeddings (32)" in note for note in notes) == 1
    assert sum("data: 1 document, " in note for note in notes) == 2


def test_another_run_is_refused_and_overwritten_only_when_told(checkpoint, text, tmp_path):
    first = run(checkpoint, text, tmp_path / "run", max_steps=1)
    (first.output_dir / "notes.txt").write_text("mine")
    with pytest.raises(LigerError, match="holds another run"):
        run(checkpoint, text, tmp_path / "run", max_steps=1)
    with pytest.raises(DataError):  # a mistake in the new run leaves the old one unchanged
        run(checkpoint, tmp_path / "none.txt", tmp_path / "run", overwrite_output_dir=True)
    with pytest.raises(LigerError, match="would remove the model"):
        run(first.model_dir, text, tmp_path / "run", overwrite_output_dir=True)
    assert first.model_dir.is_dir()
    second = run(checkpoint, text, tmp_path / "run", max_steps=2, overwrite_output_dir=True)
    assert len(second.metrics) == 2 + 3
    assert (first.output_dir / "notes.txt").read_text() == "mine"


def test_an_evaluation_file_takes_the_place_of_the_held_out_part(checkpoint, text, tmp_path):
    other = make_text(tmp_path / "eval.txt", paragraphs=5, seed=3)
    kept = run(checkpoint, text, tmp_path / "a", max_steps=1, eval_files=[other], save_steps=0)
    none = run(checkpoint, text, tmp_path / "b", max_steps=1, eval_fraction=0, save_steps=0)
    assert kept.eval_loss_before is not None and kept.metrics[0]["step"] == 0
    assert none.eval_loss_before is None and none.perplexity_after is None
    # Neither run keeps training data for evaluation.
    assert same(kept.model.state_dict(), none.model.state_dict())
    assert not (kept.output_dir / "checkpoints").exists()


def test_completions_and_conversations_train(checkpoint, tmp_path):
    records = [
        *({"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(20)),
        *(
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "yo"},
                ]
            }
            for _ in range(10)
        ),
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    result = run(checkpoint, file, tmp_path / "run", max_steps=25, gradient_accumulation_steps=2)
    assert result.perplexity_after < 0.5 * result.perplexity_before


def test_bf16_weights_and_an_export_in_another_dtype(checkpoint, text, tmp_path):
    pure = run(checkpoint, text, tmp_path / "a", precision="bf16", max_steps=2)
    assert {t.dtype for t in tensors(pure.model_dir).values()} == {torch.bfloat16}
    mixed = run(
        checkpoint,
        text,
        tmp_path / "b",
        precision="bf16-mixed",
        max_steps=2,
        export_dtype="float16",
    )
    assert {t.dtype for t in tensors(mixed.model_dir).values()} == {torch.float16}
    full = run(checkpoint, text, tmp_path / "c", precision="bf16-mixed", max_steps=2)
    assert {t.dtype for t in tensors(full.model_dir).values()} == {torch.float32}


def test_checkpointed_activations_change_nothing(checkpoint, text, tmp_path):
    plain = run(checkpoint, text, tmp_path / "a", max_steps=2)
    less = run(checkpoint, text, tmp_path / "b", max_steps=2, activation_checkpointing=True)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(less.model.state_dict()[name], value, rtol=1e-5, atol=1e-7)


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


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(text, tmp_path):
    small = make_checkpoint(
        tmp_path / "small", vocab_size=250, eos_token_id=None, bos_token_id=None
    )
    with pytest.raises(ConfigError, match="vocab_size: the tokenizer makes token 257"):
        run(small, text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_of_the_run_is_named(checkpoint, text, tmp_path):
    first = run(checkpoint, text, tmp_path / "run", max_steps=2)
    (file,) = (first.output_dir / "checkpoints").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"step-00000002\.safetensors: the file is trunc"):
        run(checkpoint, text, tmp_path / "run", max_steps=2, resume=True)


def test_a_device_that_is_not_there_is_refused(checkpoint, text, tmp_path):
    for device in ("gpu", "mps", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(ConfigError, match="device: "):
            run(checkpoint, text, tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


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
    "checkpoint": (checkpoints, "save_file", 1),
    "last step": (Trainer, "step", 6),
    "export": (LigerLlama, "save_hf", 1),
    "picture": (module, "plot_losses", 1),
}


@pytest.mark.parametrize("save_steps", [0, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_at_every_phase_loses_nothing(
    checkpoint, text, tmp_path, undisturbed, monkeypatch, phase, save_steps
):
    if save_steps == 0 and phase == "checkpoint":
        pytest.skip("no checkpoint is written")
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
    old = [signal.signal(s, h) for s, h in DEFAULTS.items()]
    given = {"save_steps": save_steps, "eval_steps": 2}
    try:
        with pytest.raises(Interrupted) as stop:
            run(checkpoint, text, tmp_path / "run", **given)
    finally:
        for s, handler in zip(DEFAULTS, old):
            signal.signal(s, handler)
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
    again = run(checkpoint, text, tmp_path / "run", **given, resume=True)
    straight, weights = undisturbed
    assert (again.model_dir / "model.safetensors").read_bytes() == weights
    assert timeless(again.output_dir) == timeless(straight)
    assert (again.output_dir / "checkpoints").exists() == bool(save_steps)


def test_a_signal_that_a_library_turns_into_another_error_is_an_interruption(
    checkpoint, text, tmp_path, monkeypatch
):
    def broken(*_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("release unlocked lock") from None

    monkeypatch.setattr(data, "split_text", broken)
    old = [signal.signal(s, h) for s, h in DEFAULTS.items()]
    try:
        with pytest.raises(Interrupted, match="nothing was changed"):
            run(checkpoint, text, tmp_path / "run")
    finally:
        for s, handler in zip(DEFAULTS, old):
            signal.signal(s, handler)


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
    made = tmp_path / "run/checkpoints/step-00000001.safetensors"
    before = made.stat().st_ino
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run(checkpoint, text, tmp_path / "run", **given)
    assert made.stat().st_ino == before
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    with pytest.raises(LigerError, match="the folder holds another run"):
        run(checkpoint, text, tmp_path / "run", **given)
    run(checkpoint, text, tmp_path / "run", **given, overwrite_output_dir=True)
    saved = json.loads((tmp_path / "run/run.json").read_text())
    assert saved["launch"] == "second"


@pytest.mark.parametrize("change", ["config.json", "tokenizer_config.json", "weights"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_replaced_model_is_refused_on_resume(text, tmp_path, change, begun):
    base = make_checkpoint(tmp_path / "base")
    first = run(base, text, tmp_path / "run", max_steps=2)
    if not begun:
        shutil.rmtree(first.output_dir / "checkpoints")
    if change == "weights":
        model = AutoLiger.from_hf(base)
        with torch.no_grad():
            model.norm.weight[0] += 1
        model.save_hf(base)
    else:
        found = json.loads((base / change).read_text())
        found |= {"rms_norm_eps": 0.1, "chat_template": "none"}
        (base / change).write_text(json.dumps(found))
    before = everything(first.output_dir)
    with pytest.raises(LigerError, match=f"not the model that the run .* with: {change} changed"):
        run(base, text, tmp_path / "run", max_steps=2, resume=True)
    assert everything(first.output_dir) == before


def test_a_model_that_has_moved_is_the_same_model(text, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    first = run(base, text, tmp_path / "run", max_steps=2)
    base.rename(tmp_path / "moved")
    again = run(tmp_path / "moved", text, tmp_path / "run", max_steps=2, resume=True)
    assert again.metrics == first.metrics
    assert resumed_settings(tmp_path / "run")["model"] == str(tmp_path / "moved")


def test_a_tokenizer_that_changes_during_the_run_is_not_exported(text, tmp_path, monkeypatch):
    base = make_checkpoint(tmp_path / "base")
    file = base / "tokenizer_config.json"
    kept = file.read_text()
    step = Trainer.step

    def change(self, number, batches):
        file.write_text("{}")
        return step(self, number, batches)

    monkeypatch.setattr(Trainer, "step", change)
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: the file was changed while"
    ):
        run(base, text, tmp_path / "run", max_steps=2)
    monkeypatch.undo()
    file.write_text(kept)
    done = run(base, text, tmp_path / "run", max_steps=2, resume=True)
    assert (done.model_dir / file.name).read_text() == kept


@pytest.mark.parametrize("save_steps", [0, 1])
@pytest.mark.parametrize("fraction", [0, 0.1])
def test_a_last_update_that_is_not_finite_is_not_exported(
    checkpoint, text, tmp_path, save_steps, fraction
):
    with pytest.raises(LigerError, match=r"infinite or NaN|held-out loss is nan"):
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


def test_metrics_that_are_lost_are_not_made_up(checkpoint, text, tmp_path):
    first = run(checkpoint, text, tmp_path / "run", max_steps=3)
    (first.output_dir / "metrics.jsonl").unlink()
    again = run(checkpoint, text, tmp_path / "run", max_steps=3, resume=True)
    assert again.loss is None and again.eval_loss_before is None
    assert again.perplexity_before is None
    assert again.eval_loss_after == first.eval_loss_after


def test_checkpoints_of_another_run_are_refused(checkpoint, text, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        run(checkpoint, text, tmp_path / name, max_steps=2, seed=seed)
    file = "checkpoints/step-00000002.safetensors"
    shutil.copy(tmp_path / "b" / file, tmp_path / "a" / file)
    with pytest.raises(CheckpointError, match="belongs to a run with another model, other data"):
        run(checkpoint, text, tmp_path / "a", max_steps=2, resume=True)
    shutil.copy(tmp_path / "b" / file, tmp_path / "a" / "checkpoints/step-00000003.safetensors")
    with pytest.raises(CheckpointError, match="the run has only 2 steps; remove"):
        run(checkpoint, text, tmp_path / "a", max_steps=2, resume=True)


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
    assert result.perplexity_after < 0.6 * result.perplexity_before
    assert resumed_settings(result.output_dir)["precision"] == "bf16-mixed"
    assert {t.dtype for t in tensors(result.model_dir).values()} == {torch.float32}
    (result.output_dir / "checkpoints" / "step-00000020.safetensors").unlink()
    again = run(checkpoint, text, tmp_path / "run", **given, resume=True)
    # Some kernels add in an order that changes between runs, so the weights differ a little.
    assert again.eval_loss_after == pytest.approx(result.eval_loss_after, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{"activation_checkpointing": True}, {"compile": True}])
def test_on_a_gpu_checkpointing_and_compilation_change_nothing(checkpoint, text, tmp_path, changes):
    given = {"device": "cuda", "max_steps": 4, "precision": "float32"}
    plain = run(checkpoint, text, tmp_path / "a", **given)
    other = run(checkpoint, text, tmp_path / "b", **given, **changes)
    assert other.eval_loss_after == pytest.approx(plain.eval_loss_after, rel=1e-3)


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
    assert less.eval_loss_after == pytest.approx(plain.eval_loss_after, rel=1e-3)
    free = run(checkpoint, text, tmp_path / "c", **given)
    assert not free.model.memory_plan.recomputes


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
    again = finetune(FinetuneConfig(**settings, resume=True), progress=False)
    assert again.model.memory_plan == other.model.memory_plan


def test_a_run_without_a_budget_has_no_plan_on_a_cpu(checkpoint, text, tmp_path):
    for name, memory in (("a", None), ("b", "off")):
        done = run(checkpoint, text, tmp_path / name, max_steps=1, memory=memory)
        assert done.model.memory_plan is None
    with pytest.raises(ConfigError, match="needs a GPU"):
        run(checkpoint, text, tmp_path / "c", memory="auto")


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
