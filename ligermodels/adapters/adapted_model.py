"""LoRA in a run: adapters on the linears of a frozen model, and their export.

An adapter belongs to a projection of HF's model, such as q_proj, also where the native model has it
packed with others. It therefore trains the same numbers, and has the same names, as one of PEFT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ligermodels.adapters.adapter_config import ends
from ligermodels.adapters.lora import LoraLinear
from ligermodels.adapters.peft_format import (
    MAGNITUDE,
    ExpertLinear,
    HFLinear,
    adapter_of_hf,
    add_lora,
    expert_linears,
    linears,
    short_names,
)
from ligermodels.adapters.quantized import FLOAT8, Bits, QuantizedLinear
from ligermodels.converters.export import save_adapter
from ligermodels.errors import ConfigError, short_repr
from ligermodels.layers.experts import STACKS, Experts
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import reshard


def add_adapters(
    model: DecoderModel,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    *,
    targets: list[str] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    dora: bool = False,
    rslora: bool = False,
) -> None:
    """Freeze a model, and put new adapters on linears of its layers.

    Args:
        rank, alpha, dropout, dora, rslora: as `LoraLinear` takes them.
        targets: HF's names of projections, such as q_proj, or of single modules, such as
            layers.0.mlp.up_proj. An expert's projection is gate_proj or experts.gate_proj, those of
            all experts are experts, and experts.gate_up_proj is PEFT's name of two. By default,
            and for "all-linear", all linears of the layers, those of experts included.
        dtype: of the adapters, but for the lengths of DoRA, which are float32.
        seed: determines their values, on every device.
    Raises:
        ConfigError: a target names no linear of the layers, or some experts of a layer only; or the
            experts of the model cannot have adapters, and targets does not leave them out; or the
            rank or the targets are none, the dropout leaves nothing, experts have adapters already,
            or are spread over ranks.
    """
    if isinstance(targets, str) or (targets is not None and not targets):
        raise ConfigError(f"lora_targets: {targets!r}; give a list of names, or None for all")
    if rank < 1:
        raise ConfigError(f"lora_r: {rank}; give 1 or more")
    if not 0 <= dropout < 1:
        raise ConfigError(f"lora_dropout: {dropout}; give 0 or more, and less than 1")
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.exchange is not None:
            raise ConfigError(
                f"{name}: experts that are spread over ranks get no adapters; add them before shard"
            )
    wanted = None if targets is None or targets == ["all-linear"] else frozenset(targets)
    unused, known = {*(wanted or ())}, set()
    adapted: dict[str, LoraLinear] = {}  # all are made before one takes its place
    draw = torch.Generator().manual_seed(seed)
    weight_map = model.hf_map()
    for name, parts in (linears(weight_map) | expert_linears(weight_map)).items():
        base = module_at(model, name)
        if not name.startswith("layers.") or not hasattr(base, "in_features"):
            continue  # such as a router, which is no linear
        chosen = []
        for part in parts:
            names = _names(part, name)
            meant = {end for each in names for end in ends(each)}
            unused -= meant
            known |= {part.hf.rpartition(".")[2]}
            known |= {each[each.rindex("experts") :] for each in names[1:]}
            if wanted is None or not wanted.isdisjoint(meant):
                chosen.append(part)
        if chosen:
            experts = _experts_of(name, parts, chosen)
            if isinstance(base, LoraLinear):
                raise ConfigError(f"{name} has adapters already; merge them first")
            if dora and isinstance(chosen[0], ExpertLinear):
                raise ConfigError(
                    f"lora_dora: {name} is of experts, whose adapters have no DoRA; leave them out "
                    "of lora_targets"
                )
            adapted[name] = LoraLinear(
                *(base, [part.rows for part in chosen]),
                rank=rank,
                alpha=alpha,
                dropout=dropout,
                experts=experts,
                dora=dora,
                rslora=rslora,
            )
    left_out = [
        f"{name}.{end}"
        for name, each in model.named_modules()
        for end in (STACKS if isinstance(each, Experts) else ())
        if f"{name}.{end}" not in adapted
    ]
    if wanted is None and left_out:
        raise ConfigError(
            f"lora_targets: {left_out[0]} has experts that cannot have adapters in this family; "
            f"name the linears that shall have some, such as {', '.join(sorted(known))}"
        )
    if unused:
        raise ConfigError(
            f"lora_targets: {short_repr(min(unused))} is no linear of the layers of this model; "
            f"its linears are {', '.join(sorted(known))}"
        )
    model.requires_grad_(False)
    for name, each in adapted.items():
        each.reset_parameters(draw)
        device = next(iter((*each.base_layer.parameters(), *each.base_layer.buffers()))).device
        for end, drawn in [*each.named_parameters(recurse=False)]:
            # Rounded lengths of DoRA would change the model before the first step.
            kind = torch.float32 if end == "lora_magnitude" else dtype
            setattr(each, end, nn.Parameter(drawn.detach().to(device, kind)))
        put(model, name, each)


def train_whole(model: DecoderModel, names: Sequence[str], dtype: torch.dtype) -> None:
    """Train whole modules beside adapters, in this dtype.

    Args: names: HF's, or ends of them: embed_tokens, lm_head or norm, for example.
    Raises:
        ConfigError: a name is that of no module, or of a projection that is packed with others.
    """
    known = whole_modules(model)
    for name in names:
        chosen = [native for hf, native in known.items() if name in ends(hf.rpartition(".")[0])]
        if not chosen:
            tied = "; the head is tied: name embed_tokens" if _is_tied(model) else ""
            modules = ", ".join(sorted({hf.rpartition(".")[0] for hf in known}))
            raise ConfigError(
                f"modules_to_save: {short_repr(name)} is no module that can be trained whole{tied} "
                f"(known, also by the ends of their names: {modules})"
            )
        for native in chosen:
            place, _, last = native.rpartition(".")
            owner = model.get_submodule(place)
            if isinstance(owner, LoraLinear):
                raise ConfigError(
                    f"modules_to_save: {place} has an adapter; name lora_targets without it"
                )
            setattr(owner, last, nn.Parameter(getattr(owner, last).detach().to(dtype)))


def _is_tied(model: DecoderModel) -> bool:
    return bool(getattr(model.head, "is_tied", False))


def whole_modules(model: DecoderModel) -> dict[str, str]:
    """Return HF's name of each parameter that is a whole tensor of HF -> its own name."""
    return {
        entry.spans[0].source: entry.name
        for entry in model.hf_map()
        if len(entry.spans) == 1
        and entry.spans[0].rows == entry.shape[0]
        and not entry.spans[0].transposed
    }


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


def _names(part: HFLinear, native: str) -> list[str]:
    """Return the names by which a target may mean a linear: its own, and those of its experts."""
    if not isinstance(part, ExpertLinear):
        return [part.hf]
    projections = part.projection, native.rpartition(".")[2]  # here, and in PEFT
    return [part.hf, part.experts, *(f"{part.experts}.{each}" for each in projections)]


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


def merged(
    model: DecoderModel, adapter: tuple[dict[str, Tensor], dict[str, Any]] | None = None
) -> DecoderModel:
    """Return the model of the checkpoint with the adapters added to its weights, on the CPU.

    The weights are those of the checkpoint, even if training used them quantised. Modules that were
    trained whole take their places.

    Args: adapter: what `adapter_of(model)` returned.
    Raises:
        CheckpointError: the checkpoint's weights cannot be read, or a sum is not finite.
        ConfigError: the model was not loaded from a checkpoint.
    """
    weights, config = adapter or adapter_of(model)
    if model.source.folder is None:
        raise ConfigError("merged: the model is of no checkpoint; load it with from_hf")
    frozen = (x.dtype for x in model.parameters() if not x.requires_grad)
    dtype = next(frozen, model.norm.weight.dtype)
    whole: DecoderModel = type(model).from_hf(model.source.folder, dtype=dtype)
    add_lora(dict(whole.named_parameters()), weights, config, whole.hf_map())
    return whole


def adapter_of(model: DecoderModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the adapters in PEFT's format, under the names of HF's model: tensors and config.

    Every rank of a sharded model must call it.
    """
    first = next(each for each in model.modules() if isinstance(each, LoraLinear))
    settings: dict[str, Any] = {
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout.p,
        **({"use_rslora": True} if first.rslora else {}),
        **({"use_dora": True} if first.lora_magnitude is not None else {}),
    }
    native = {name: hf for hf, name in whole_modules(model).items()}
    trained = _whole_values(model)
    others = {native[name]: x for name, x in trained.items() if ".lora_" not in name}
    if others:
        known, whole = (
            {x.rpartition(".")[0] for x in names} for names in (native.values(), others)
        )
        settings["modules_to_save"] = short_names(whole, known)
        if _is_tied(model) and "embed_tokens.weight" in trained:
            settings["ensure_weight_tying"] = True  # PEFT then reads a copy for the head
            aliases = model.hf_map().aliases
            others |= {hf: others[of].clone() for hf, of in aliases.items() if of in others}
    if model.loss_type == "ForSequenceClassification":
        settings["task_type"] = "SEQ_CLS"
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    weight_map = model.hf_map()
    for name, parts in (linears(weight_map) | expert_linears(weight_map)).items():
        each = module_at(model, name)
        if isinstance(each, LoraLinear):
            names = {part.rows: part.hf for part in parts}
            a, b = (trained[f"{name}.lora_{end}"] for end in "ab")
            factors |= {names[rows]: (a, b) for rows, a, b in each.factors(a, b)}
            if (lengths := trained.get(f"{name}.lora_magnitude")) is not None:
                of_parts = zip(each.parts, each.by_part(lengths))
                others |= {f"{names[rows]}.{MAGNITUDE}": part for rows, part in of_parts}
    return adapter_of_hf(factors, weight_map, settings, others)


def _whole_values(model: DecoderModel) -> dict[str, Tensor]:
    """Return whole trained parameters by name, of which a rank may have a part: then on the CPU."""
    layout = model.layout
    if layout is not None:
        reshard(model)
    trained = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    return {name: x if layout is None else layout.whole(name, x).cpu() for name, x in trained}


def export_adapter(model: DecoderModel, folder: Path, base: str, dtype: torch.dtype | None) -> None:
    """Write the adapters in PEFT's format, under the names of HF's model.

    Every rank of a sharded model must call it, and the first one writes.

    Args: base: the hub id or folder of the model of the adapters; dtype: None keeps their dtype.
    Raises:
        SaveError: the files cannot be written, or a value is not finite in this dtype.
    """
    weights, config = adapter_of(model)
    if model.layout is None or dist.get_rank() == 0:
        config["base_model_name_or_path"] = base
        weights = {name: tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}
        save_adapter(folder, weights, config, source_files=model.source.files)
