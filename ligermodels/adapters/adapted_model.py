"""LoRA in a run: adapters on the linears of a frozen model, and their export.

An adapter belongs to a projection of HF's model, such as q_proj, also where the native model has it
packed with others. It therefore trains the same numbers, and has the same names, as one of PEFT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.adapters.adapter_config import ends
from ligermodels.adapters.lora import LoraLinear
from ligermodels.adapters.peft_format import (
    ExpertLinear,
    HFLinear,
    adapter_of_hf,
    expert_linears,
    linears,
)
from ligermodels.adapters.quantized import FLOAT8, Bits, QuantizedLinear
from ligermodels.converters.checkpoint import is_finite
from ligermodels.converters.export import save_adapter
from ligermodels.errors import CheckpointError, ConfigError, short_repr
from ligermodels.layers.experts import Experts
from ligermodels.models.auto import AutoLiger
from ligermodels.models.base import DecoderModel

STACKS = ("gate_up_proj", "down_proj")  # the weights of `Experts`


def add_adapters(
    model: DecoderModel,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    *,
    targets: list[str] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> None:
    """Freeze a model, and put new adapters on linears of its layers.

    Args:
        rank, alpha, dropout: as `LoraLinear` takes them.
        targets: HF's names of projections, such as q_proj, or of single modules, such as
            layers.0.mlp.up_proj. An expert's projection is gate_proj or experts.gate_proj, those of
            all experts are experts, and experts.gate_up_proj is PEFT's name of two. By default,
            and for "all-linear", all linears of the layers, those of experts included.
        dtype: of the adapters.
        seed: determines their values, on every device.
    Raises:
        ConfigError: a target names no linear of the layers, or some experts of a layer only; or the
            experts of the model cannot have adapters, and targets does not leave them out; or the
            rank or the targets are none, experts have adapters already, or are spread over ranks.
    """
    if isinstance(targets, str) or (targets is not None and not targets):
        raise ConfigError(f"lora_targets: {targets!r}; give a list of names, or None for all")
    if rank < 1:
        raise ConfigError(f"lora_r: {rank}; give 1 or more")
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.exchange is not None:
            raise ConfigError(f"{name}: experts that are spread over ranks cannot have adapters")
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    wanted = None if targets is None or targets == ["all-linear"] else frozenset(targets)
    unused, known = {*(wanted or ())}, set()
    weight_map = model.hf_map()
    for name, parts in (linears(weight_map) | expert_linears(weight_map)).items():
        base = module_at(model, name)
        if not name.startswith("layers.") or not hasattr(base, "in_features"):
            continue  # such as a router, which is no linear
        names = {part: _names(part, name) for part in parts}
        known |= {each for part in parts for each in _short_names(part, name)}
        chosen = [part for part in parts if wanted is None or not wanted.isdisjoint(names[part])]
        unused.difference_update(*names.values())
        if chosen:
            experts = _experts_of(name, parts, chosen)
            if experts and isinstance(base, LoraLinear):
                raise ConfigError(f"{name}: these experts have adapters already; merge them first")
            rows = [part.rows for part in chosen]
            adapted = LoraLinear(
                base, rows, rank=rank, alpha=alpha, dropout=dropout, experts=experts
            )
            adapted.reset_parameters(draw)
            device = next(iter((*base.parameters(), *base.buffers()))).device
            for end in ("lora_a", "lora_b"):
                drawn = getattr(adapted, end).detach()
                setattr(adapted, end, nn.Parameter(drawn.to(device, dtype)))
            put(model, name, adapted)
    if wanted is None and (left_out := next(_plain_experts(model), None)):
        raise ConfigError(
            f"lora_targets: {left_out} has experts that cannot have adapters in this family; name "
            f"the linears that shall have some, such as {', '.join(sorted(known))}"
        )
    if unused:
        raise ConfigError(
            f"lora_targets: {short_repr(min(unused))} is no linear of the layers of this model; "
            f"its linears are {', '.join(sorted(known))}"
        )


def quantize(model: DecoderModel, bits: Bits, device: torch.device) -> None:
    """Move a model to a device, with weights of 4 bits, 8 bits or in float8 in the layers' linears.

    The device never holds more than one of them unconverted.

    Raises:
        ConfigError: a linear has an odd number of inputs, which 4 bits do not allow, or sizes that
            are no multiples of 16 for float8; or the GPU does not multiply float8.
    """
    names, stacks = [], []
    for name, each in model.layers.named_modules():
        if isinstance(each, Experts):
            stacks += [f"{name}.{end}" for end in STACKS]
            for bias in (each.gate_up_bias, each.down_bias):
                if bias is not None:
                    bias.requires_grad_(False)
        elif type(each) is nn.Linear:
            names.append(name)
    if stacks and bits == FLOAT8:
        raise ConfigError(
            f"load_in: layers.{stacks[0]}: experts have no products in float8; use 4 or 8 bits"
        )
    for name in names + stacks:
        linear = module_at(model.layers, name)
        if type(linear) is not nn.Linear:
            raise ConfigError(
                f"load_in: layers.{name} has adapters; quantize the model before them"
            )
        try:
            converted = QuantizedLinear(linear, bits, device=device)
        except ConfigError as error:
            raise ConfigError(f"load_in: layers.{name}: {error}") from None
        put(model.layers, name, converted)
    model.to(device)


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module of this name, or an `nn.Linear` of a parameter of this name."""
    place, _, last = name.rpartition(".")
    found = getattr(model.get_submodule(place), last)
    return stacked_linear(found) if isinstance(found, nn.Parameter) else found


def stacked_linear(weight: nn.Parameter) -> nn.Linear:
    """Return a linear that has this very weight (out, in), and no bias."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    return linear


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another, or of a parameter."""
    place, _, last = name.rpartition(".")
    owner = model.get_submodule(place)
    delattr(owner, last)
    setattr(owner, last, module)


def _plain_experts(model: DecoderModel) -> Iterator[str]:
    """Yield the names of weights of experts that have no adapter."""
    for name, each in model.named_modules():
        if isinstance(each, Experts):
            found = {end: getattr(each, end) for end in STACKS}
            yield from (f"{name}.{end}" for end, x in found.items() if type(x) is not LoraLinear)


def _names(part: HFLinear, native: str) -> set[str]:
    """Return the names by which a target may mean a linear: its own, and their ends."""
    names = {part.hf}
    if isinstance(part, ExpertLinear):
        names |= _of_experts(part.experts, part, native)
    return {end for name in names for end in ends(name)}


def _short_names(part: HFLinear, native: str) -> set[str]:
    """Return the shortest names by which a target may mean a linear, or all experts."""
    names = {part.hf.rpartition(".")[2]}
    if isinstance(part, ExpertLinear):
        names |= _of_experts(part.experts.rpartition(".")[2], part, native)
    return names


def _of_experts(place: str, part: ExpertLinear, native: str) -> set[str]:
    """Return the names of all experts, and of their projections here and in PEFT."""
    return {place, f"{place}.{part.projection}", f"{place}.{native.rpartition('.')[2]}"}


def _experts_of(name: str, parts: Sequence[HFLinear], chosen: Sequence[HFLinear]) -> int:
    """Return the number of experts that a weight is of, or 1 if it is of none.

    Raises:
        ConfigError: an expert would have another adapter than the first.
    """
    every = [part for part in parts if isinstance(part, ExpertLinear)]
    if not every:
        return 1
    count = 1 + max(part.number for part in every)
    each = Counter(part.projection for part in chosen if isinstance(part, ExpertLinear))
    if {*each.values()} != {count}:
        raise ConfigError(
            f"lora_targets: {chosen[0].hf} is the projection of one of {count} experts of {name}; "
            f"all of them get an adapter, or none: name {every[0].projection}"
        )
    return count


def merged(model: DecoderModel) -> DecoderModel:
    """Return the model of the checkpoint with the adapters added to its weights, on the CPU.

    The weights are those of the checkpoint, even if training used them quantised.

    Raises:
        CheckpointError: the checkpoint's weights cannot be read, or are no longer those that the
            model was loaded from, or a sum is not finite.
    """
    assert model.source.folder is not None
    dtype = model.embed_tokens.weight.dtype
    whole: DecoderModel = AutoLiger.from_hf(model.source.folder, dtype=dtype)
    _check_same_weights(model, whole)
    for name, each in model.named_modules():
        if isinstance(each, LoraLinear):
            weight = module_at(whole, name).weight
            assert isinstance(weight, Tensor)
            each.add_to(weight)
            if not is_finite(weight.detach()):
                raise CheckpointError(
                    f"{name}.weight holds NaN or infinite values in {dtype} after the adapter was "
                    "added; its values or lora's alpha are too large"
                )
    return whole


def _check_same_weights(model: DecoderModel, whole: DecoderModel) -> None:
    """Raise unless the frozen weights of a model with adapters are those of its checkpoint."""
    for name, stored in whole.named_parameters():
        place, _, last = name.rpartition(".")
        base = _without_adapter(model.get_submodule(place))
        if not (isinstance(base, QuantizedLinear) and last == "weight"):
            base = _without_adapter(getattr(base, last))
        if isinstance(base, QuantizedLinear):
            again = QuantizedLinear(stacked_linear(stored), base.bits, device=base.codes.device)
            same = torch.equal(again.codes, base.codes) and torch.equal(again.scales, base.scales)
        else:
            held = base.weight if isinstance(base, nn.Linear) else base
            same = torch.equal(held.detach().cpu(), stored.detach())
        if not same:
            raise CheckpointError(
                f"{model.source.folder}: {name} was changed while the run was using it; restore "
                "the model and resume the run"
            )


def _without_adapter(module: Any) -> Any:
    return module.base_layer if isinstance(module, LoraLinear) else module


def export_adapter(model: DecoderModel, folder: Path, base: str, dtype: torch.dtype | None) -> None:
    """Write the adapters in PEFT's format, under the names of HF's model.

    Args: base: the hub id or folder of the model of the adapters; dtype: None keeps their dtype.
    Raises:
        SaveError: the files cannot be written, or a value is not finite in this dtype.
    """
    first = next(each for each in model.modules() if isinstance(each, LoraLinear))
    settings = {"r": first.rank, "lora_alpha": first.alpha, "lora_dropout": first.dropout.p}
    weights, config = adapter_of_hf(factors_of(model), model.hf_map(), settings)
    if dtype is not None:
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    config["base_model_name_or_path"] = base
    save_adapter(folder, weights, config, source_files=model.source.files)


def factors_of(model: DecoderModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of the adapter of each linear of HF's model, by its name."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    weight_map = model.hf_map()
    for name, parts in (linears(weight_map) | expert_linears(weight_map)).items():
        each = module_at(model, name)
        if isinstance(each, LoraLinear):
            hf = {part.rows: part.hf for part in parts}
            found |= {hf[rows]: (a, b) for rows, a, b in each.factors()}
    return found
