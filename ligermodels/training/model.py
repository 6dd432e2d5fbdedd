"""The model of a run: loaded, with adapters or frozen parts, hashed, and planned for the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligermodels.adapters.adapted_model import add_adapters, merged, quantize, train_whole
from ligermodels.adapters.quantized import FLOAT8, Bits
from ligermodels.converters.files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    ADDED_WEIGHTS,
    CONFIG_NAME,
    copied_files,
    is_adapter,
    local_weight_files,
)
from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.heads.classifier import LigerClassifier
from ligermodels.layers import Experts
from ligermodels.layers.fusion import is_sharded
from ligermodels.memory.byte_sizes import GIB
from ligermodels.memory.fit import Planner
from ligermodels.memory.plan import MemoryPlan, keeping
from ligermodels.memory.rates import data_sheet, gpu_bytes
from ligermodels.models.auto import AutoLiger
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.optimizers import freeze
from ligermodels.training.run_dir import START, RunDir, file_hash
from ligermodels.training.start import has_own_start


def load_model(
    source: Path, config: FinetuneConfig, device: torch.device, *, meta: bool = False
) -> DecoderModel:
    """Return the model of a checkpoint as a run trains it.

    Args: meta: whether the weights are read later.
    Raises:
        CheckpointError, ConfigError: the model cannot be loaded, or lacks what the config names.
    """
    if is_adapter(source):
        raise CheckpointError(
            f"{source}: this is an adapter; make a whole checkpoint of it first ('ligermodels "
            "convert'), or train on with --resume and the folder of its run"
        )
    options, adapter = config.model, config.adapter
    precision = options.precision or "float32"
    dtype = (weight_dtype if adapter.lora_r is None else frozen_dtype)(precision)
    # The linears that are kept in few bits are converted one by one.
    place = torch.device("meta" if meta else "cpu" if adapter.load_in else device)
    loader: Any = LigerClassifier if config.loss.classifies else AutoLiger
    model: DecoderModel = loader.from_hf(source, dtype=dtype, device=place, float8=options.float8)
    given = options.router_aux_loss_coef, options.router_z_loss_coef
    if given != (None, None) and not any(isinstance(x, Experts) for x in model.modules()):
        raise ConfigError(
            f"{source}: router_aux_loss_coef and router_z_loss_coef are for models with experts; "
            "leave them out"
        )
    balance, z = (old if new is None else new for old, new in zip(model.router_losses, given))
    model.router_losses = balance, z
    if adapter.lora_r is not None:
        if adapter.load_in is not None:
            quantize(model, bits_of(adapter.load_in), device)
        add_adapters(
            model,
            adapter.lora_r,
            adapter.lora_alpha or 2.0 * adapter.lora_r,
            adapter.lora_dropout,
            targets=adapter.lora_targets,
            dtype=weight_dtype(precision),
            seed=config.schedule.seed,
            dora=adapter.lora_dora,
            rslora=adapter.lora_rslora,
        )
        score = ["score"] if config.loss.classifies else []
        train_whole(model, [*(adapter.modules_to_save or ()), *score], weight_dtype(precision))
    elif patterns := options.freeze or options.train_only:
        freeze(model, patterns, only=options.train_only is not None)
    return model


def load_checkpoint(run: Path, step: int) -> DecoderModel:
    """Return the model after a step of a run, on the CPU.

    Adapters are added to the model's weights.

    Raises:
        CheckpointError: the run has no such checkpoint, it is damaged, or the model that the run
            started from has changed or is gone.
    """
    run_dir = RunDir(run)
    saved = run_dir.read_settings()
    if saved is None:
        raise CheckpointError(f"{run}: the folder holds no run")
    checkpoints = Checkpoints(run_dir.checkpoint_dir, saved["id"])
    if step not in (steps := checkpoints.folders()):
        known = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
        raise CheckpointError(f"{run}: the run has no checkpoint of step {step}; {known}")
    config = FinetuneConfig.from_options(**saved["settings"])
    source = run / START
    if not has_own_start(config):
        source = Path(resolve(str(config.model.path), revision=config.model.revision))
    check_same(source, run, saved["base"], file_hashes(source))
    model = load_model(source, config, torch.device("cpu"))
    checkpoints.load(step, config.loss.objective(config).module(model))
    return model if config.adapter.lora_r is None else merged(model)


def file_hashes(source: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint or an adapter that a run reads, by name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    optional = (CONFIG_NAME, ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, *ADDED_WEIGHTS)
    names = [name for name in optional if (source / name).exists()]
    names += [*copied_files(source), *([] if is_adapter(source) else local_weight_files(source)[0])]
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda name: file_hash(source / name, CheckpointError), names)
        return dict(zip(names, hashes))


def check_same(source: str | Path, run: Path, then: Mapping[str, Any], now: dict[str, str]) -> None:
    """Raise CheckpointError unless the hashes of what a run was started with are still the same."""
    kinds = {
        "changed": [name for name in then if now.get(name, then[name]) != then[name]],
        "is missing": [name for name in then if name not in now],
        "is new": [name for name in now if name not in then],
    }
    if other := [f"{', '.join(sorted(names))} {kind}" for kind, names in kinds.items() if names]:
        raise CheckpointError(
            f"{source}: this is not what the run in {run} was started with: {', '.join(other)}; "
            "restore it, or start another run"
        )


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the trained weights at a precision of ModelOptions."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def frozen_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights that no optimizer updates: the one in which they are used."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def bits_of(load_in: str) -> Bits:
    """Return what `quantize` takes for a value of --load-in."""
    return 4 if load_in == "4bit" else 8 if load_in == "8bit" else FLOAT8


def planner(
    model: DecoderModel,
    budget: int | str,
    *,
    precision: str,
    accumulates: bool = False,
    **options: Any,
) -> Planner:
    """Return a planner for the training steps of a run.

    A head that skips the rows without a target needs less than it plans for.

    Args:
        model: its weights have the dtype of `precision`.
        budget: bytes, as an int or a text, or "auto".
        precision: that of ModelOptions.
        accumulates: whether gradients exist before forward, because a step has several batches.
        options: those of `Planner`, such as the optimizer, by default AdamW, and how rows are
            packed.
    """
    # Sharded weights are gathered in bfloat16 instead.
    casts = precision == "bf16-mixed" and not any(map(is_sharded, model.parameters()))
    return Planner(
        model,
        budget,
        autocast=torch.bfloat16 if casts else None,
        gradients="kept" if accumulates else "new",
        **options,
    )


def summary(plan: MemoryPlan) -> str:
    """Describe a plan that has a prediction in one line."""
    said = plan.prediction
    assert said is not None
    counts = Counter(map(str, plan.layers))
    policies = ", ".join(f"{n} {keeping(n)} {policy}" for policy, n in counts.most_common())
    return (
        f"{policies}; predicted peak {said.peak_bytes / GIB:.2f} GiB of "
        f"{said.budget / GIB:.2f} GiB for {said.batch} x {said.seq} tokens"
    )


@dataclass(frozen=True)
class Outlook:
    """What fits into a budget.

    Attributes:
        plan: the fastest plan that fits, or None if none fits.
        budget, least_bytes: the budget, and the smallest one with which the batch fits, in bytes.
        largest_batch: with rows of the same length, within 2%.
        largest_seq: with as many rows, within 2%.
        rates: where the rates of the device come from.
    """

    plan: MemoryPlan | None
    budget: int
    least_bytes: int
    largest_batch: int
    largest_seq: int
    rates: str


def outlook(
    family: type[DecoderModel],
    config: ModelConfig,
    batch: int,
    seq: int,
    *,
    budget: str | None = None,
    gpu: str | None = None,
    precision: str = "bf16-mixed",
) -> Outlook:
    """Plan the fine-tuning of a model that need not exist, with all weights trained.

    Args:
        batch, seq: rows, and tokens of each row.
        budget: bytes of GPU memory as a text. By default, and for "auto", all of the GPU: of `gpu`,
            or the bytes that are free on the GPU of this machine.
        gpu: a GPU with a data sheet, such as "H200". By default that of this machine, or an H100.
        precision: that of ModelOptions.
    Raises:
        ConfigError: the GPU is not known, or the budget cannot be read.
    """
    with torch.device("meta"):
        model = family(config).to(weight_dtype(precision))
    rates = None
    if gpu is not None or not torch.cuda.is_available():
        gpu = gpu or "H100"
        if budget in (None, "auto"):
            budget = str(gpu_bytes(gpu))
        rates = data_sheet(gpu, torch.float32 if precision == "float32" else torch.bfloat16)
    found = planner(model, budget or "auto", precision=precision, rates=rates, max_seqlen=seq)
    least = found.least_bytes(batch, seq)
    return Outlook(
        plan=found.plan(batch, seq) if least <= found.budget else None,
        budget=found.budget,
        least_bytes=least,
        largest_batch=found.largest_batch(seq),
        largest_seq=found.largest_seq(batch),
        rates=found.rates.source,
    )
