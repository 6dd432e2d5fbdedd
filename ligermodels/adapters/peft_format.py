"""Adapters in PEFT's format: those for HF's projections, for packed ones, and the way back.

Published adapters belong to HF's projections (q_proj, k_proj, ...). A native model has one packed
projection in their place. Its adapter has the A matrices of the parts on top of each other and
their B matrices on a diagonal of blocks, so that it adds to each row what the part added. An
adapter of a packed projection becomes one of each part, with the same A and the part's rows of B.

Both are state dicts with PEFT's names and the content of adapter_config.json. Nothing here imports
PEFT. `peft.get_peft_model(model, LoraConfig(**config))` makes the modules of a native adapter, and
`peft.set_peft_model_state_dict` loads its tensors.
"""

import copy
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.adapters.adapter_config import (
    KEPT,
    alpha_of,
    check_config,
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
_EMBEDDING_A, _EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
_MIXTRAL = ".block_sparse_moe.", ".mlp."  # a module's name in its files, and in transformers 5
# Ends of a module's own tensors, which an adapter may hold beside those of a LoRA.
_OWN = ("weight", "bias", "base_layer.weight", "base_layer.bias")


# The name of an expert's projection: that of all experts, the expert's number, the projection.
_OF_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)")


class HFLinear(NamedTuple):
    """A linear of HF: the rows of a packed one that are its own."""

    hf: str  # the module's name
    rows: RowRange


class ExpertLinear(HFLinear):
    """The projection of one expert: the rows of a weight of all experts that are its own."""

    @property
    def experts(self) -> str:
        """The name of the module of all experts of the layer."""
        return _match(self.hf)[1]

    @property
    def number(self) -> int:
        """The number of the expert."""
        return int(_match(self.hf)[2])

    @property
    def projection(self) -> str:
        """The name of the projection in its expert."""
        return _match(self.hf)[3]


def _match(name: str) -> re.Match[str]:
    found = _OF_EXPERT.fullmatch(name)
    assert found is not None
    return found


def pack_adapter(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    weight_map: WeightMap,
    base: Mapping[str, Tensor] | None = None,
) -> tuple[Weights, Config]:
    """Return the adapter of a native model for one of HF's model.

    The products B A are the same to rounding. The rank of a packed projection is the sum of its
    parts' ranks.

    Args:
        weights: the adapter's tensors under PEFT's names.
        config: the content of its adapter_config.json.
        weight_map: the native model's.
        base: the native model's parameters. DoRA needs them where only some of the parts of a
            packed projection have an adapter.
    Returns: the tensors and the config of the native adapter.
    Raises:
        CheckpointError: a tensor or a key of the config would be left out, a tensor of a module
            that the config names is missing or has another shape, or a value overflows; the
            message names it.
    """
    _check(weights, config, weight_map)
    native, made = linears(weight_map), Weights()
    of_module, left = _by_module(weights, (p.hf for parts in native.values() for p in parts))
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, parts in native.items():
        found = {p: of_module.get(p.hf, {}) for p in parts}
        if not any(found.values()):
            continue
        if len(parts) == 1:
            (taken,) = found.values()
            made |= {f"{_PREFIX}{module}.{end}": tensor for end, tensor in taken.items()}
            if any("lora_" in end for end in taken):
                name = parts[0].hf
                ranks[module], alphas[module] = rank_of(config, name), alpha_of(config, name)
            continue
        _check_lora(found)
        has_lora = {part: taken for part, taken in found.items() if taken}
        scales = {part: scaling_of(config, part.hf) for part in has_lora}
        scale = next(iter(scales.values()))
        a = torch.cat([taken[_A] for taken in has_lora.values()])
        b = a.new_zeros(sum(part.rows.size for part in parts), len(a))
        column = 0
        for part, taken in has_lora.items():
            block, ratio = taken[_B], scales[part] / scale
            columns = slice(column, column + block.shape[1])
            block = block if ratio == 1 else block * ratio
            _check_finite(f"{part.hf}.{_B}, in the scale of {module},", block)
            b[part.rows.slice, columns] = block
            column += block.shape[1]
        made |= {f"{_PREFIX}{module}.{_A}": a, f"{_PREFIX}{module}.{_B}": b}
        if any(MAGNITUDE in taken for taken in found.values()):
            made[f"{_PREFIX}{module}.{MAGNITUDE}"] = _magnitude(module, found, base)
        ranks[module] = len(a)
        alphas[module] = scale * (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
    _move_others(left, made, weight_map, to_hf=False)
    return made, _new_config(config, made, ranks, alphas)


def unpack_adapter(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], weight_map: WeightMap
) -> tuple[Weights, Config]:
    """Return the adapter of HF's model for one of a native model: bitwise the same numbers.

    The arguments and errors are those of `pack_adapter`.
    """
    _check(weights, config, weight_map, native=True)
    native, made = linears(weight_map), Weights()
    of_module, left = _by_module(weights, native)
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, parts in native.items():
        taken = of_module.get(module)
        if not taken:
            continue
        if len(parts) > 1:
            _check_lora({HFLinear(module, RowRange(0, 0)): taken})
        for part in parts:
            for end, tensor in taken.items():
                whole = end == _A or len(parts) == 1
                rows = tensor if whole else tensor[part.rows.slice].clone()
                made[f"{_PREFIX}{part.hf}.{end}"] = rows
            if any("lora_" in end for end in taken):
                ranks[part.hf], alphas[part.hf] = rank_of(config, module), alpha_of(config, module)
    _move_others(left, made, weight_map, to_hf=True)
    return made, _new_config(config, made, ranks, alphas)


def read_adapter(folder: Path) -> tuple[Weights, Config]:
    """Return the tensors and the config of an adapter in PEFT's format.

    Raises:
        CheckpointError: one of its two files is missing or damaged, a value is not finite, or the
            tensors are pickled.
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
    weights = {name: file.tensor(name) for name in file.tensors}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{file.path}: {short_repr(name)} holds NaN or infinite values")
    return weights, config


@torch.no_grad()
def add_lora(
    parameters: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    weight_map: WeightMap,
) -> None:
    """Add the LoRA of HF's model to the parameters of a native one, in float32 and rounded once.

    Args: as in `pack_adapter`; parameters, those of the native model, by name.
    Raises:
        CheckpointError: a tensor or a key of the config is not part of a LoRA on linears, a tensor
            of a module that the config names is missing or has another shape, or a sum is not
            finite in the dtype of the parameter. Nothing was changed.
    """
    weights, config = of_each_expert(weights, config, weight_map)
    _check(weights, config, weight_map, experts=True)
    native = linears(weight_map) | expert_linears(weight_map)
    of_module, left = _by_module(weights, (p.hf for parts in native.values() for p in parts))
    found = []
    for module, parts in native.items():
        weight = parameters.get(f"{module}.weight", parameters.get(module))
        for part in parts:
            if taken := of_module.get(part.hf):
                is_whole = taken.keys() == {"weight"}
                if not is_whole and (odd := sorted(taken.keys() - {_A, _B, MAGNITUDE})):
                    raise CheckpointError(
                        f"adapter: {_PREFIX}{part.hf}.{odd[0]}: only LoRA and DoRA are added to "
                        "weights; merge the adapter with PEFT's merge_and_unload"
                    )
                assert weight is not None
                found.append((part.hf, weight[part.rows.slice], taken))
    for alias, original in weight_map.aliases.items():
        if _PREFIX + original in weights:
            left.pop(_PREFIX + alias, None)
    for entry in weight_map:  # modules that were trained whole
        source = entry.spans[0].source
        if _PREFIX + source in left and entry.shape[0] == entry.spans[0].rows:
            taken = {"weight": left.pop(_PREFIX + source)}
            found.append((source, parameters[entry.name], taken))
    if left:
        raise CheckpointError(
            f"adapter: {min(left)!r} is no part of a LoRA on a linear, and would be left out (this "
            f"is so for {len(left)} tensors); merge the adapter with PEFT's merge_and_unload\n"
            f"{listing(sorted(left))}"
        )
    for name, rows, taken in found:
        _check_finite(f"the sum of {name}.weight and its LoRA", _sum(rows, taken, config, name))
    for name, rows, taken in found:  # computed again: a second model would not fit everywhere
        rows.copy_(_sum(rows, taken, config, name))


def of_each_expert(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], weight_map: WeightMap
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Return an adapter that PEFT has for weights of all experts as one of each expert.

    Transformers 5 keeps the projections of all experts in one parameter, for which PEFT has an
    adapter if target_parameters names it. A is (experts * rank, in), and B is (out, rank * experts)
    with the experts as the fastest index. Gate and up have one A, which both get here. The adapter
    of the last parameter of a module has the module's name, and the one before it that name and
    base_layer.

    Raises:
        CheckpointError: a tensor that target_parameters names is missing or has another shape, or
            it names what is no weight of experts.
    """
    wanted = frozenset(config.get("target_parameters") or ())
    if not wanted:
        return weights, config
    made, unused = dict(weights), set(wanted)
    modules: list[str] = []
    ranks: dict[str, Any] = {}
    alphas: dict[str, Any] = {}
    orders = row_orders(weight_map)
    places: dict[str, list[tuple[str, str, Sequence[ExpertLinear]]]] = {}
    for native, parts in expert_linears(weight_map).items():
        place = parts[0].experts.replace(*_MIXTRAL)
        name = f"{place}.{native.rpartition('.')[2]}"
        if has_end(name, wanted):
            unused -= {each for each in wanted if has_end(name, {each})}
            places.setdefault(place, []).append((name, native, parts))
    for place, found in places.items():
        for depth, (name, native, parts) in enumerate(found):
            start = f"{_PREFIX}{place}." + "base_layer." * (len(found) - 1 - depth)
            rank, count = rank_of(config, name), parts[-1].number + 1
            rows = sum(part.rows.size for part in parts) // count
            a, b = (_expert_tensor(made, start + end) for end in (_A, _B))
            if len(a) != rank * count or b.shape != (rows, rank * count):
                raise CheckpointError(
                    f"adapter: {start}{_A} and {_B} have the shapes {[*a.shape]} and {[*b.shape]}, "
                    f"expected {rank * count} rows and {[rows, rank * count]}, for rank {rank} and "
                    f"{count} experts"
                )
            a_each, b_each = a.view(count, rank, -1), b.view(rows, rank, count)
            b_each = b_each[orders.get(native, slice(None))]
            for part in parts:
                row = part.rows.start % rows
                made[f"{_PREFIX}{part.hf}.{_A}"] = a_each[part.number]
                made[f"{_PREFIX}{part.hf}.{_B}"] = b_each[
                    row : row + part.rows.size, :, part.number
                ]
                modules.append(part.hf)
            names = "|".join(sorted({part.projection for part in parts}))
            pattern = rf"{re.escape(parts[0].experts)}\.\d+\.({names})"
            ranks[pattern], alphas[pattern] = rank, alpha_of(config, name)
    if any(parts[0].experts != place for place, found in places.items() for *_, parts in found):
        made = {name.replace(*_MIXTRAL[::-1]): tensor for name, tensor in made.items()}
    modules += [name.removesuffix(".weight") for name in unused if name.endswith(".weight")]
    if odd := sorted(name for name in unused if not name.endswith(".weight")):
        raise CheckpointError(
            f"adapter: target_parameters: {odd[0]!r} is no weight of all experts of this model"
        )
    others = config.get("target_modules") or []
    if isinstance(others, str):
        raise CheckpointError(
            f"adapter: target_modules is the pattern {others!r} beside target_parameters; write "
            "the names of the modules into adapter_config.json"
        )
    kept = {key: value for key, value in config.items() if key != "target_parameters"}
    return made, kept | {
        "target_modules": [*others, *modules],
        "rank_pattern": ranks | (config.get("rank_pattern") or {}),
        "alpha_pattern": alphas | (config.get("alpha_pattern") or {}),
    }


def _expert_tensor(left: Weights, name: str) -> Tensor:
    """Remove a tensor from an adapter and return it, or raise if it is missing."""
    if name not in left:
        raise CheckpointError(
            f"adapter: {name} is missing, but target_parameters of adapter_config.json names its "
            "weight; get the whole adapter, or correct the config"
        )
    return left.pop(name)


def _sum(rows: Tensor, taken: Weights, config: Mapping[str, Any], name: str) -> Tensor:
    """Return the rows of a weight with a LoRA or DoRA added, or other rows, in their dtype."""
    if (whole := taken.get("weight")) is not None:
        if whole.shape != rows.shape:
            raise CheckpointError(
                f"adapter: {_PREFIX}{name} has the shape {[*whole.shape]}, and the model's is "
                f"{[*rows.shape]}; resize the model's embeddings to those of the adapter first"
            )
        return whole.to(rows)
    a, b = (taken[end].to(rows.device, torch.float32) for end in (_A, _B))
    made = rows.float() + scaling_of(config, name) * (b @ a)
    if MAGNITUDE in taken:
        length = taken[MAGNITUDE].to(rows.device, torch.float32)
        made *= (length / made.norm(dim=1)).unsqueeze(1)
    return made.to(rows.dtype)


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
        "target_modules": _target_modules(modules, weight_map),
        **_without_towers(weight_map),
        "bias": "none",
        "inference_mode": True,
    }


def _of_all_experts(
    factors: Mapping[str, tuple[Tensor, Tensor]], weight_map: WeightMap
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[str]]:
    """Return factors, in which one pair is for all experts where HF has one tensor for them.

    They are those of `of_each_expert`, with its names. The second result are HF's parameters.
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


def _target_modules(names: Iterable[str], weight_map: WeightMap) -> list[str]:
    """Return the ends of names that stand for exactly these modules, or else their whole names."""
    chosen = set(names)
    ends = {*map(_last, chosen)}
    native = linears(weight_map) | expert_linears(weight_map)
    every = {part.hf for parts in native.values() for part in parts}
    meant = {name for name in every if _last(name) in ends}
    return sorted(ends if meant == chosen else chosen)


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
        if parts and all(_OF_EXPERT.fullmatch(name) for name, _ in parts):
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


def _by_module(
    weights: Mapping[str, Tensor], modules: Iterable[str]
) -> tuple[dict[str, Weights], Weights]:
    """Return the tensors of each module's adapter by their endings, and all other tensors."""
    known, left = {*modules}, Weights()
    found: dict[str, Weights] = {}
    for name, tensor in weights.items():
        module = name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else ""
        while module and module not in known:
            module = module.rpartition(".")[0]
        if module:
            end = name.removeprefix(f"{_PREFIX}{module}.")
            found.setdefault(module, {})[end] = tensor
        else:
            left[name] = tensor
    return found, left


def _check_lora(found: Mapping[HFLinear, Weights]) -> None:
    """Raise unless the parts of a packed projection have LoRA or DoRA, and nothing else."""
    for part, taken in found.items():
        if odd := sorted(taken.keys() - {_A, _B, MAGNITUDE}):
            raise CheckpointError(
                f"adapter: {_PREFIX}{part.hf}.{odd[0]}: only LoRA and DoRA can be converted "
                "between packed and separate projections; load it with "
                "ligermodels.integrations.peft_adapters.load_peft_model"
            )


def _magnitude(
    module: str, found: Mapping[HFLinear, Weights], base: Mapping[str, Tensor] | None
) -> Tensor:
    """Return DoRA's norms of all rows of a packed projection.

    A row without adapter has the norm of its weight, so that DoRA leaves it as it is.
    """
    pieces = []
    for part, taken in found.items():
        if MAGNITUDE in taken:
            pieces.append(taken[MAGNITUDE])
        elif base is None:
            raise CheckpointError(
                f"adapter: {module} has DoRA for other parts, but not for {part.hf}; pass the "
                "model's parameters as base"
            )
        else:
            weight = base[f"{module}.weight"][part.rows.slice]
            pieces.append(weight.float().norm(dim=1).to(weight.dtype))
    return torch.cat(pieces)


def _move_others(left: Weights, made: Weights, weight_map: WeightMap, *, to_hf: bool) -> None:
    """Rename the remaining tensors, which are whole modules such as norms, or raise."""
    names = {}
    for entry in weight_map:
        if len(entry.spans) == 1 and entry.spans[0].rows == entry.shape[0]:
            native, hf = _PREFIX + entry.name, _PREFIX + entry.spans[0].source
            names[native if to_hf else hf] = hf if to_hf else native
    if odd := sorted(left.keys() - names.keys()):
        raise CheckpointError(
            f"adapter: {odd[0]!r} belongs to no linear or whole module of this model, and would "
            f"be left out (this is so for {len(odd)} tensors)\n{listing(odd)}"
        )
    made |= {names[name]: tensor for name, tensor in left.items()}


def _check(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    weight_map: WeightMap,
    *,
    native: bool = False,
    experts: bool = False,
) -> None:
    """Raise CheckpointError unless the tensors are those of the modules that the config names.

    Tensors that belong to no linear are not looked at, unless the config names their module.

    Args:
        native: whether the names are those of the native model.
        experts: whether the projections of experts count as linears.
    """
    check_config(config)
    shapes = {entry.name: entry.shape for entry in weight_map}
    known: dict[str, dict[str, tuple[int, ...]]] = {}
    in_layer = {}
    packed = linears(weight_map) | (expert_linears(weight_map) if experts else {})
    for module, parts in packed.items():
        rows, width = shapes.get(f"{module}.weight") or shapes[module]
        for part in [HFLinear(module, RowRange(0, rows))] if native else parts:
            name, size = part.hf, (part.rows.size, width)
            known[name] = _shapes(config, name, *size, embedding=module == "embed_tokens")
            in_layer[name] = module.startswith("layers.")
    targeted = targets(config, in_layer)
    of_module, left = _by_module(weights, known)
    needed: dict[str, tuple[int, ...] | None] = {}
    for module, tensors in known.items():
        for end in sorted(of_module.get(module, {}).keys() - {*_OWN}):
            if module not in targeted or end not in tensors:
                key = "use_dora" if end == MAGNITUDE else "target_modules"
                raise CheckpointError(
                    f"adapter: {_PREFIX}{module}.{end} is not a tensor that adapter_config.json "
                    f"names ({key}: {short_repr(config.get(key))}), and would be left out; the "
                    "file and the config belong to different adapters, or the method is not LoRA"
                )
        if module in targeted:
            needed |= {f"{_PREFIX}{module}.{end}": shape for end, shape in tensors.items()}
    needed |= dict.fromkeys(_others(config, weight_map, targeted, native=native))
    if absent := sorted(needed.keys() - weights.keys()):
        unknown = sorted(name for name in left if ".lora_" in name)
        others = f"; {short_repr(unknown[0])} belongs to no linear of this model" if unknown else ""
        raise CheckpointError(
            f"adapter: {absent[0]} is missing, but adapter_config.json names its module (this is "
            f"so for {len(absent)} tensors){others}; get the whole adapter, or correct the config\n"
            f"{listing(absent)}"
        )
    for name, shape in needed.items():
        if shape is not None and weights[name].shape != shape:
            raise CheckpointError(
                f"adapter: {name} has the shape {[*weights[name].shape]}, expected {[*shape]}"
            )
    if not weights:
        raise CheckpointError(
            "adapter: there are no tensors, and target_modules "
            f"{short_repr(config['target_modules'])} names no linear of this model"
        )


def _shapes(
    config: Mapping[str, Any], module: str, rows: int, width: int, *, embedding: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that the adapter of a linear or an embedding has."""
    rank = rank_of(config, module)
    if embedding:
        rows, width = width, rows
    a, b = (_EMBEDDING_A, _EMBEDDING_B) if embedding else (_A, _B)
    dora = {MAGNITUDE: (rows,)} if config.get("use_dora") else {}
    return {a: (rank, width), b: (rows, rank), **dora}


def _others(
    config: Mapping[str, Any], weight_map: WeightMap, targeted: set[str], *, native: bool
) -> Iterator[str]:
    """Yield the names of whole parameters that the config says an adapter has."""
    biases = config.get("bias", "none")
    for entry in weight_map:
        for name in [entry.name] if native else [span.source for span in entry.spans]:
            module, _, end = name.rpartition(".")
            if end == "bias" and (
                biases == "all" or (biases == "lora_only" and module in targeted)
            ):
                yield f"{_PREFIX}{module}.{'base_layer.' if module in targeted else ''}bias"
            elif is_saved_whole(config, module):
                yield _PREFIX + name


def _check_finite(what: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise CheckpointError(
            f"adapter: {what} holds NaN or infinite values in {values.dtype}; the adapter's scale "
            "or its values are too large for this dtype"
        )


def _new_config(
    config: Mapping[str, Any], made: Weights, ranks: dict[str, int], alphas: dict[str, float]
) -> Config:
    """Return the config for converted tensors, with the names of all modules in full."""
    adapted = {
        name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in made if ".lora_" in name
    }
    saved = {
        name.removeprefix(_PREFIX).rpartition(".")[0]
        for name in made
        if ".lora_" not in name and ".base_layer." not in name
    }
    new = {key: copy.deepcopy(value) for key, value in config.items() if key in KEPT}
    return new | {
        "target_modules": sorted(adapted),
        "modules_to_save": sorted(saved) or None,
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items()},
        "alpha_pattern": {re.escape(name): alpha for name, alpha in alphas.items()},
    }
