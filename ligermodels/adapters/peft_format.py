"""Adapters in PEFT's format: read and added to the weights of a native model, and written.

An adapter belongs to HF's projections (q_proj, k_proj, ...), which are rows of the packed ones of a
native model. Nothing here imports PEFT.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.adapters.adapter_config import (
    check_config,
    ends,
    has_end,
    is_saved_whole,
    rank_of,
    scaling_of,
    targets,
)
from ligermodels.adapters.lora import RowRange
from ligermodels.converters.files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_PICKLE_NAME,
    ADAPTER_WEIGHTS_NAME,
    read_json,
)
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.converters.weight_map import Entry, WeightMap
from ligermodels.errors import CheckpointError, listing, short_repr

Weights = dict[str, Tensor]
Config = dict[str, Any]

_PREFIX = "base_model.model."
_A, _B = "lora_A.weight", "lora_B.weight"
MAGNITUDE = "lora_magnitude_vector"  # the lengths of DoRA
_MIXTRAL = ".block_sparse_moe.", ".mlp."  # a module's name in its files, and in transformers 5


class HFLinear(NamedTuple):
    """A linear of HF: the rows of a packed one that are its own."""

    hf: str  # the module's name
    rows: RowRange


class ExpertLinear(HFLinear):
    """The projection of one expert: the rows of a weight of all experts that are its own."""

    @property
    def experts(self) -> str:
        """The name of the module of all experts of the layer."""
        return self.hf.rsplit(".", 2)[0]

    @property
    def number(self) -> int:
        """The number of the expert."""
        return int(self.hf.rsplit(".", 2)[1])

    @property
    def projection(self) -> str:
        """The name of the projection in its expert."""
        return _last(self.hf)


def read_adapter(folder: Path) -> tuple[Weights, Config]:
    """Return the tensors and the config of an adapter in PEFT's format.

    Raises:
        CheckpointError: one of its two files is missing or damaged, or the tensors are pickled.
    """
    config = read_json(folder / ADAPTER_CONFIG_NAME, CheckpointError)
    pickled = folder / ADAPTER_PICKLE_NAME
    if os.path.lexists(pickled) and not os.path.lexists(folder / ADAPTER_WEIGHTS_NAME):
        raise CheckpointError(
            f"{pickled}: the file holds pickled tensors, which are never read here, and there is "
            f"no {ADAPTER_WEIGHTS_NAME}; if you trust the file, convert it once, in its folder: "
            'python -c "import torch; from safetensors.torch import save_file; '
            f"save_file(torch.load('{ADAPTER_PICKLE_NAME}', map_location='cpu', "
            f"weights_only=True), '{ADAPTER_WEIGHTS_NAME}')\""
        )
    file = SafetensorsFile(folder / ADAPTER_WEIGHTS_NAME)
    return {name: file.tensor(name) for name in file.tensors}, config


@torch.no_grad()
def add_lora(
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    weight_map: WeightMap,
) -> None:
    """Add an adapter of HF's model to the parameters of a native one, in float32, rounded once.

    LoRA and DoRA of linears and of experts are added, and modules of modules_to_save take the
    places of the model's.

    Args:
        parameters: those of the native model, by name.
        weights: the adapter's tensors under PEFT's names.
        config: the content of its adapter_config.json.
        weight_map: the native model's.
    Raises:
        CheckpointError: a tensor would be left out, a tensor that the config names is missing or
            has another shape, a key of the config is not honoured, or a sum is not finite in the
            dtype of the parameter. Only in the last case may parameters have been changed.
    """
    check_config(config)
    fused, packed = row_orders(weight_map), expert_linears(weight_map)
    single = {name: parts for name, parts in packed.items() if name not in fused}
    linear: dict[str, Tensor] = {}
    in_layer: dict[str, bool] = {}
    for native, parts in (linears(weight_map) | single).items():
        weight = parameters.get(f"{native}.weight", parameters.get(native))
        if weight is not None:
            linear |= {part.hf: weight[part.rows.slice] for part in parts}
            in_layer |= {part.hf: native.startswith("layers.") for part in parts}
    wanted, stacked = _stacked(config, packed)
    chosen = targets(config, in_layer) | {name for name in linear if has_end(name, wanted)}
    whole = {
        span.source: parameters[entry.name][span.row : span.row + span.rows]
        for entry in weight_map
        for span in entry.spans
        if span.expert is None
        and (_PREFIX + span.source in weights or is_saved_whole(config, span.source))
    }
    if twice := sorted(name for name in chosen if f"{name}.weight" in whole):
        raise CheckpointError(
            f"adapter: {_PREFIX}{twice[0]}.weight is the whole weight of a module that has a LoRA "
            "by adapter_config.json, and one of them would be lost; merge the adapter with PEFT's "
            "merge_and_unload"
        )
    shapes: dict[str, tuple[int, ...]] = {name: rows.shape for name, rows in whole.items()}
    for name in chosen:
        (out, width), rank = linear[name].shape, rank_of(config, name)
        shapes |= {f"{name}.{_A}": (rank, width), f"{name}.{_B}": (out, rank)}
        shapes |= {f"{name}.{MAGNITUDE}": (out,)} if config.get("use_dora") else {}
    for start, (name, native, count) in stacked.items():
        (rows, width), rank = parameters[native].shape, rank_of(config, name) * count
        shapes |= {f"{start}.{_A}": (rank, width), f"{start}.{_B}": (rows // count, rank)}
    _check(weights, shapes, config, weight_map.aliases)
    given = {name: weights[_PREFIX + name] for name in shapes}
    for name, here in whole.items():
        _put(name, here, given[name].to(here))
    for name in chosen:
        length = given.get(f"{name}.{MAGNITUDE}")
        factors = given[f"{name}.{_A}"], given[f"{name}.{_B}"]
        total = _sum(linear[name], *factors, scaling_of(config, name), length)
        _put(f"{name}.weight", linear[name], total)
    for start, (name, native, count) in stacked.items():
        order = fused.get(native, slice(None))
        each_a = given[f"{start}.{_A}"].unflatten(0, (count, -1))
        each_b = given[f"{start}.{_B}"].unflatten(1, (-1, count))[order].unbind(2)
        scaling = scaling_of(config, name)
        for a, b, here in zip(each_a, each_b, parameters[native].unflatten(0, (count, -1))):
            _put(name, here, _sum(here, a, b, scaling, None))


def _stacked(
    config: Mapping[str, Any], packed: Mapping[str, Sequence[ExpertLinear]]
) -> tuple[frozenset[str], dict[str, tuple[str, str, int]]]:
    """Return what target_parameters names: modules, and weights of all experts of a layer.

    Transformers 5 keeps a projection of all experts in one parameter, for which PEFT has one
    adapter. A is (experts * rank, in), and B is (out, rank * experts) with the experts as the
    fastest index. The adapter of the last parameter of a module has the module's name, and the one
    before it that name and base_layer.

    Returns: the ends of modules' names; and the name of each adapter -> the parameter's names in
        HF and here, and the number of experts.
    Raises:
        CheckpointError: it names what is no weight of experts.
    """
    wanted = frozenset(config.get("target_parameters") or ())
    unused = {*wanted}
    places: dict[str, list[tuple[str, str, int]]] = {}
    for native, parts in packed.items():
        place = parts[0].experts.replace(*_MIXTRAL)
        name = f"{place}.{_last(native)}"
        if has_end(name, wanted):
            unused -= {*ends(name)}
            places.setdefault(place, []).append((name, native, parts[-1].number + 1))
    if odd := sorted(name for name in unused if not name.endswith(".weight")):
        raise CheckpointError(
            f"adapter: target_parameters: {odd[0]!r} is no weight of all experts of this model"
        )
    modules = frozenset(name.removesuffix(".weight") for name in unused)
    return modules, {
        place + ".base_layer" * depth: each
        for place, found in places.items()
        for depth, each in enumerate(reversed(found))
    }


def _put(name: str, here: Tensor, total: Tensor) -> None:
    """Write a sum into a parameter, or raise CheckpointError if it is not finite."""
    if not total.isfinite().all():
        raise CheckpointError(
            f"adapter: with it, {name} holds NaN or infinite values in {here.dtype}; the adapter's "
            "values are no numbers, or too large with its scale for this dtype"
        )
    here.copy_(total)


def _sum(rows: Tensor, a: Tensor, b: Tensor, scaling: float, length: Tensor | None) -> Tensor:
    """Return the rows of a weight with a LoRA added, or with a DoRA of these lengths."""
    a, b = (x.to(rows.device, torch.float32) for x in (a, b))
    made = rows.float() + scaling * (b @ a)
    if length is not None:
        made *= (length.to(rows.device, torch.float32) / made.norm(dim=1)).unsqueeze(1)
    return made.to(rows.dtype)


def _check(
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    aliases: Mapping[str, str],
) -> None:
    """Raise CheckpointError unless the tensors are those that the config names.

    Args: shapes: of these, without PEFT's prefix; aliases: of tensors that may be there twice.
    """
    copies = {alias for alias, original in aliases.items() if original in shapes}
    if odd := sorted(weights.keys() - {_PREFIX + name for name in (*shapes, *copies)}):
        key = "use_dora" if odd[0].endswith(MAGNITUDE) else "target_modules"
        raise CheckpointError(
            f"adapter: {odd[0]} is not a tensor that adapter_config.json names ({key}: "
            f"{short_repr(config.get(key))}), or not of a LoRA on linears, and would be left out "
            f"(this is so for {len(odd)} tensors); if the file and the config belong together, "
            f"merge the adapter with PEFT's merge_and_unload\n{listing(odd)}"
        )
    if absent := sorted(name for name in shapes if _PREFIX + name not in weights):
        raise CheckpointError(
            f"adapter: {_PREFIX}{absent[0]} is missing, but adapter_config.json names its module "
            f"(this is so for {len(absent)} tensors); get the whole adapter, or correct the config"
            f"\n{listing(absent)}"
        )
    for name, shape in shapes.items():
        if (found := weights[_PREFIX + name]).shape != shape:
            raise CheckpointError(
                f"adapter: {_PREFIX}{name} has the shape {[*found.shape]}, expected {[*shape]}"
            )
    if not weights:
        raise CheckpointError("adapter: there are no tensors")


def adapter_of_hf(
    factors: Mapping[str, tuple[Tensor, Tensor]],
    weight_map: WeightMap,
    settings: Mapping[str, Any],
    others: Mapping[str, Tensor] | None = None,
) -> tuple[Weights, Config]:
    """Return the LoRA of HF's model that has these factors, in PEFT's format.

    Args:
        factors: the name of each linear with an adapter -> A (rank, in) and B (out, rank).
        weight_map: the native model's.
        settings: the keys r, lora_alpha and lora_dropout of the config, and others.
        others: further tensors: DoRA's, and those of modules that were trained whole.
    Returns: the tensors on the CPU, and the content of adapter_config.json. With
        target_parameters, and beside adapters of experts, its lora_dropout is 0: PEFT refuses any
        other, and an export does not train.
    """
    weights = {}
    fused = row_orders(weight_map)
    natives = {name: each for name, each in expert_linears(weight_map).items() if name not in fused}
    experts = {part.hf: part.projection for each in natives.values() for part in each}
    left, parameters = _of_all_experts(factors, weight_map)
    # PEFT takes a module that is called as projections of single experts for experts. It finds a
    # dense one, whose tensors have the same names, as a parameter.
    dense = {name for name in left if _last(name) in experts.values()} - experts.keys()
    parameters += [f"{name}.weight" for name in sorted(dense)]
    native = linears(weight_map) | expert_linears(weight_map)
    modules = left.keys() & factors.keys()
    if experts.keys().isdisjoint(factors):
        modules -= dense
    if parameters or not experts.keys().isdisjoint(factors):
        settings = {**settings, "lora_dropout": 0.0}
    for name, (a, b) in left.items():
        for end, tensor in ((_A, a), (_B, b)):
            weights[f"{_PREFIX}{name}.{end}"] = tensor.detach().cpu().contiguous()
    for name, tensor in (others or {}).items():
        weights[_PREFIX + name] = tensor.detach().cpu().contiguous()
    return weights, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **settings,
        **({"target_parameters": parameters} if parameters else {}),
        "target_modules": short_names(modules, (x.hf for each in native.values() for x in each)),
        **_without_towers(weight_map),
        "bias": "none",
        "inference_mode": True,
    }


def _of_all_experts(
    factors: Mapping[str, tuple[Tensor, Tensor]], weight_map: WeightMap
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[str]]:
    """Return factors, in which one pair is for all experts where HF has one tensor for them.

    They have the names and the shapes of `_stacked`. The second result are HF's parameters.
    """
    left, native = dict(factors), expert_linears(weight_map)
    places: dict[str, list[tuple[str, tuple[Tensor, Tensor]]]] = {}
    for name, order in row_orders(weight_map).items():
        if parts := [part for part in native[name] if part.hf in left]:
            of_a, of_b = zip(*(left.pop(part.hf) for part in parts))
            b = torch.empty_like(torch.stack(of_b))
            b[:, order] = torch.stack(of_b)
            pair = torch.cat(of_a), b.permute(1, 2, 0).flatten(1)
            place = parts[0].experts
            places.setdefault(place, []).append((f"{place}.{parts[0].projection}", pair))
    for place, found in places.items():
        for depth, (_, pair) in enumerate(found):
            left[place + ".base_layer" * (len(found) - 1 - depth)] = pair
    return left, [name for found in places.values() for name, _ in found]


def short_names(chosen: Collection[str], known: Iterable[str]) -> list[str]:
    """Return names by which PEFT takes exactly the chosen modules: ends, or else whole names.

    PEFT takes each module whose name ends in one of these.
    """
    others, ends = {*known}.difference(chosen), {*map(_last, chosen)}
    shared = {end for end in ends if any(name.endswith(end) for name in others)}
    return sorted({name if _last(name) in shared else _last(name) for name in chosen})


def _without_towers(weight_map: WeightMap) -> Config:
    """Return the key with which PEFT leaves alone the other towers of the model, if it has any."""
    towers = weight_map.towers
    starts = tuple(theirs for theirs, _ in towers.spellings) if towers else ()
    if towers is None or not any(s.source.startswith(starts) for e in weight_map for s in e.spans):
        return {}
    names = "|".join(map(re.escape, towers.kept))
    return {"exclude_modules": f"({names}).*"}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def linears(weight_map: WeightMap) -> dict[str, Sequence[HFLinear]]:
    """Return the parts of each native linear, or embedding, by the module's name."""
    return {
        entry.name.removesuffix(".weight"): [HFLinear(*part) for part in parts]
        for entry in weight_map
        if entry.name.endswith(".weight") and (parts := _parts(entry))
    }


def expert_linears(weight_map: WeightMap) -> dict[str, Sequence[ExpertLinear]]:
    """Return the projections of all experts in each native weight of experts, by its name.

    Where HF has one tensor for all experts, as of gpt-oss, an expert's part of it has a name here
    that HF does not have, such as experts.3.gate_up_proj.
    """
    found: dict[str, Sequence[ExpertLinear]] = {}
    for entry in weight_map:
        parts = _parts(entry)
        if entry.name in (fused := row_orders([entry])):
            place, _, last = entry.spans[0].source.rpartition(".")
            size = len(fused[entry.name])
            count = entry.shape[0] // size
            parts = [(f"{place}.{e}.{last}", RowRange(e * size, size)) for e in range(count)]
        elif entry.name.endswith(".weight"):
            continue
        if parts and all(name.split(".")[-2].isdigit() for name, _ in parts):
            found[entry.name] = [ExpertLinear(*part) for part in parts]
    return found


def row_orders(weight_map: Iterable[Entry]) -> dict[str, list[int]]:
    """Return each native weight of experts that is one tensor in HF, with HF's output of each row.

    The rows are those of one expert.
    """
    return {
        entry.name: [
            span.source_row + span.step * row
            for span in entry.spans
            if span.expert == 0
            for row in range(span.rows)
        ]
        for entry in weight_map
        if entry.name.endswith("_proj") and all(span.expert is not None for span in entry.spans)
    }


def _parts(entry: Entry) -> list[tuple[str, RowRange]]:
    """Return the names and rows of the HF linears that a native matrix is a stack of, if it is."""
    is_stack = all(s.source_row == 0 and s.source.endswith(".weight") for s in entry.spans)
    if len(entry.shape) != 2 or not is_stack:
        return []
    return [(s.source.removesuffix(".weight"), RowRange(s.row, s.rows)) for s in entry.spans]
