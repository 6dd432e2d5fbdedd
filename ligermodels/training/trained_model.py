"""The model that a run trains: loaded, with adapters or frozen parts, also from a checkpoint."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from ligermodels.adapters.adapted_model import add_adapters, merged, quantize
from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.models.auto import AutoLiger
from ligermodels.models.base import DecoderModel
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.inputs import check_unchanged, weights_hash
from ligermodels.training.lora_options import parse_lora
from ligermodels.training.medusa import MedusaObjective
from ligermodels.training.memory import frozen_dtype, weight_dtype
from ligermodels.training.optimizers import freeze
from ligermodels.training.run_dir import CHECKPOINTS, RUN_FILE, RunDir

# run/checkpoints/step-00000500.safetensors, run/checkpoints/step-00000500, run/checkpoint-500
_STEP = re.compile(r"(?:step|checkpoint)-(\d{1,18})(?:\.safetensors)?")


def load_model(
    source: Path,
    config: FinetuneConfig,
    precision: str,
    device: torch.device,
    *,
    meta: bool = False,
) -> tuple[DecoderModel, str | None]:
    """Return the model of a checkpoint as a run trains it.

    Args: precision: the run's precision, never None; meta: whether the weights are read later.
    Returns: the model, and the hash of the weights that the checkpoint holds if they are kept in
        few bits. Devices may round those in different ways.
    Raises:
        CheckpointError, ConfigError: the model cannot be loaded, or lacks what the config names.
    """
    dtype = (weight_dtype if config.lora is None else frozen_dtype)(precision)
    place, stored = torch.device("meta") if meta else device, None
    if config.load_in is not None:
        place = torch.device("cpu")  # the linears are converted one by one
    model: DecoderModel = AutoLiger.from_hf(source, dtype=dtype, device=place)
    if config.lora is not None:
        if config.load_in is not None:
            stored = weights_hash(model)
            quantize(model, int(config.load_in[0]), device)
        options = parse_lora(config.lora)
        add_adapters(
            model,
            options.r,
            options.alpha,
            options.dropout,
            targets=config.lora_targets,
            dtype=weight_dtype(precision),
            seed=config.seed,
        )
    elif patterns := config.freeze or config.train_only:
        freeze(model, patterns, only=config.train_only is not None)
    return model, stored


def checkpoint_step(path: str | Path) -> tuple[Path, int] | None:
    """Return the folder of a run and a step, if the path names a checkpoint of a run.

    It is that of the file or folder in RUN/checkpoints, or RUN/checkpoint-STEP.
    """
    path = Path(path)
    match = _STEP.fullmatch(path.name)
    run = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
    if match is None or not os.path.isfile(run / RUN_FILE):
        return None
    return run, int(match[1])


def load_checkpoint(run: Path, step: int) -> tuple[DecoderModel, MedusaHeads | None]:
    """Return the model after a step of a run, on the CPU, and Medusa's heads if it trained them.

    Adapters are added to the model's weights.

    Raises:
        CheckpointError: the run has no such checkpoint, it is damaged, or the model that the run
            started from has changed or is gone.
    """
    run_dir = RunDir(run)
    saved = run_dir.read_settings()
    if saved is None:
        raise CheckpointError(f"{run}: the folder holds no run")
    checkpoints = Checkpoints(run_dir.checkpoint_dir)
    if step not in (steps := checkpoints.files()):
        known = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        raise CheckpointError(f"{run}: the run has no checkpoint of step {step}; {known}")
    known_options = {each.name for each in fields(FinetuneConfig)}
    config = FinetuneConfig(**{k: v for k, v in saved["settings"].items() if k in known_options})
    source = Path(resolve(config.model, revision=config.revision))
    of_weights = (
        "weights",
        "teacher",
        "heads",
        "reward_function",
    )  # The other hashes are those of files.
    check_unchanged(source, {k: v for k, v in saved["base"].items() if k not in of_weights})
    precision = config.precision or "float32"
    model, stored = load_model(source, config, precision, torch.device("cpu"))
    heads: MedusaHeads | None = None
    trained: nn.Module = model
    if config.medusa_heads is not None:
        medusa = MedusaObjective(config)
        trained, heads = medusa.module(model), medusa.heads
    # The checkpoint holds the trained weights alone.
    partial = not all(p.requires_grad for p in model.parameters())
    if partial and (stored or weights_hash(model)) != saved["base"].get("weights"):
        raise CheckpointError(
            f"{source}: these are not the weights that the run in {run} was started with; restore "
            "the model"
        )
    checkpoints.load(step, trained)
    return model if config.lora is None else merged(model), heads
