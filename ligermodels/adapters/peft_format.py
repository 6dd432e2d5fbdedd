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
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.converters.checkpoint_files import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from ligermodels.converters.files import is_number, read_json
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.converters.weight_map import Entry, WeightMap
from ligermodels.errors import CheckpointError, listing, shown

Weights = dict[str, Tensor]
Config = dict[str, Any]

_PREFIX = "base_model.model."
_A, _B, _MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_EMBEDDING_A = "lora_embedding_A"
# Keys of the config that name modules; they are written anew from the tensors.
_NAMING = {
    *("target_modules", "modules_to_save", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "auto_mapping"),
}
# Keys that a converted adapter keeps, because they mean the same for it.
_KEPT = {
    *("r", "lora_alpha", "lora_dropout", "peft_type", "task_type", "use_dora", "use_rslora"),
    *("bias", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    *("init_lora_weights", "ensure_weight_tying"),
}
# Ways to start an adapter that also change the weights of the model it belongs to.
_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Part(NamedTuple):
    """A linear of HF: the rows of a packed one that are its own."""

    hf: str  # the module's name
    row: int
    rows: int


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
        CheckpointError: a tensor or a key of the config would be left out; the message names it.
    """
    _check_config(config)
    left, made = dict(weights), Weights()
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, parts in linears(weight_map).items():
        found = {p: _take(left, p.hf) for p in parts}
        if not any(found.values()):
            continue
        if len(parts) == 1:
            (taken,) = found.values()
            made |= {f"{_PREFIX}{module}.{end}": tensor for end, tensor in taken.items()}
            if (rank := _rank(taken)) is not None:
                ranks[module], alphas[module] = rank, _alpha(config, parts[0].hf)
            continue
        _check_lora(found)
        has_lora = {part: taken for part, taken in found.items() if _A in taken}
        scales = {p: _scaling(config, p.hf, len(taken[_A])) for p, taken in has_lora.items()}
        scale = next(iter(scales.values()))
        a = torch.cat([taken[_A] for taken in has_lora.values()])
        b = a.new_zeros(sum(part.rows for part in parts), len(a))
        column = 0
        for part, taken in has_lora.items():
            block, ratio = taken[_B], scales[part] / scale
            columns = slice(column, column + block.shape[1])
            b[part.row : part.row + part.rows, columns] = block if ratio == 1 else block * ratio
            column += block.shape[1]
        made |= {f"{_PREFIX}{module}.{_A}": a, f"{_PREFIX}{module}.{_B}": b}
        if any(_MAGNITUDE in taken for taken in found.values()):
            made[f"{_PREFIX}{module}.{_MAGNITUDE}"] = _magnitude(module, found, base)
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
    _check_config(config)
    left, made = dict(weights), Weights()
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, parts in linears(weight_map).items():
        taken = _take(left, module)
        if not taken:
            continue
        if len(parts) > 1:
            _check_lora({Part(module, 0, 0): taken})
        for part in parts:
            rows = slice(part.row, part.row + part.rows)
            for end, tensor in taken.items():
                whole = end == _A or len(parts) == 1
                made[f"{_PREFIX}{part.hf}.{end}"] = tensor if whole else tensor[rows].clone()
            if (rank := _rank(taken)) is not None:
                ranks[part.hf], alphas[part.hf] = rank, _alpha(config, module)
    _move_others(left, made, weight_map, to_hf=True)
    return made, _new_config(config, made, ranks, alphas)


def read_adapter(folder: Path) -> tuple[Weights, Config]:
    """Return the tensors and the config of an adapter in PEFT's format.

    Raises:
        CheckpointError: one of its two files is missing or damaged, or a value is not finite.
    """
    config = read_json(folder / ADAPTER_CONFIG_NAME, CheckpointError)
    file = SafetensorsFile(folder / ADAPTER_WEIGHTS_NAME)
    weights = {name: file.tensor(name) for name in file.tensors}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{file.path}: {shown(name)} holds NaN or infinite values")
    file.close()
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
        CheckpointError: a tensor or a key of the config is not part of a LoRA on linears, or does
            not fit the model. Nothing was changed.
    """
    _check_config(config)
    _check_numbers(config)
    left, found = dict(weights), []
    for module, parts in linears(weight_map).items():
        for part in parts:
            if taken := _take(left, part.hf):
                if odd := sorted(taken.keys() ^ {_A, _B}):
                    raise CheckpointError(
                        f"adapter: {part.hf}.{odd[0]}: only a plain LoRA is added to weights; "
                        "merge the adapter with PEFT's merge_and_unload"
                    )
                _check_fit(config, part, taken, parameters[f"{module}.weight"].shape[1])
                found.append((module, part, taken))
    if left:
        raise CheckpointError(
            f"adapter: {min(left)!r} is no part of a LoRA on a linear, and would be left out (this "
            f"is so for {len(left)} tensors)\n{listing(sorted(left))}"
        )
    for module, part, taken in found:
        rows = parameters[f"{module}.weight"][part.row : part.row + part.rows]
        a, b = (taken[end].to(rows.device, torch.float32) for end in (_A, _B))
        rows.copy_(rows.float() + _scaling(config, part.hf, len(a)) * (b @ a))


def adapter_of_hf(
    factors: Mapping[str, tuple[Tensor, Tensor]],
    weight_map: WeightMap,
    settings: Mapping[str, Any],
) -> tuple[Weights, Config]:
    """Return the LoRA of HF's model that has these factors, in PEFT's format.

    Args:
        factors: the name of each linear with an adapter -> A (rank, in) and B (out, rank).
        weight_map: the native model's.
        settings: the keys r, lora_alpha and lora_dropout of the config.
    Returns: the tensors on the CPU, and the content of adapter_config.json.
    """
    weights = {}
    for name, (a, b) in factors.items():
        for end, tensor in ((_A, a), (_B, b)):
            weights[f"{_PREFIX}{name}.{end}"] = tensor.detach().cpu().contiguous()
    return weights, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **settings,
        "target_modules": _target_modules(factors.keys(), weight_map),
        "bias": "none",
        "inference_mode": True,
    }


def _target_modules(names: Iterable[str], weight_map: WeightMap) -> list[str]:
    """Return the ends of names that stand for exactly these modules, or else their whole names."""
    chosen = set(names)
    ends = {name.rpartition(".")[2] for name in chosen}
    every = {part.hf for parts in linears(weight_map).values() for part in parts}
    meant = {name for name in every if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == chosen else chosen)


def linears(weight_map: WeightMap) -> dict[str, list[Part]]:
    """Return the parts of each native linear, or embedding, by the module's name."""
    found = {}
    for entry in weight_map:
        if entry.name.endswith(".weight") and len(entry.shape) == 2 and _is_stack(entry):
            found[entry.name.removesuffix(".weight")] = [
                Part(span.source.removesuffix(".weight"), span.row, span.rows)
                for span in entry.spans
            ]
    return found


def _is_stack(entry: Entry) -> bool:
    """Return whether each span of a weight is a whole weight of HF."""
    return all(s.source_row == 0 and s.source.endswith(".weight") for s in entry.spans)


def _take(left: Weights, module: str) -> Weights:
    """Remove the tensors of a module's adapter from `left`, and return them by their endings."""
    start = f"{_PREFIX}{module}."
    names = [name for name in left if name.startswith(start)]
    return {name.removeprefix(start): left.pop(name) for name in names}


def _rank(taken: Weights) -> int | None:
    """Return the rank of the adapter of a linear or an embedding; None if there is none."""
    return next((len(taken[end]) for end in (_A, _EMBEDDING_A) if end in taken), None)


def _check_lora(found: Mapping[Part, Weights]) -> None:
    """Raise unless the parts of a packed projection have LoRA or DoRA, and nothing else."""
    for part, taken in found.items():
        odd = sorted(taken.keys() - {_A, _B, _MAGNITUDE})
        if taken and (odd or _A not in taken or _B not in taken):
            name = odd[0] if odd else f"{_A} or {_B}, which is missing"
            raise CheckpointError(
                f"adapter: {part.hf}: {name}: only LoRA and DoRA can be converted between packed "
                "and separate projections; load it with "
                "ligermodels.integrations.peft_adapters.load_peft_model"
            )


def _magnitude(
    module: str, found: Mapping[Part, Weights], base: Mapping[str, Tensor] | None
) -> Tensor:
    """Return DoRA's norms of all rows of a packed projection.

    A row without adapter has the norm of its weight, so that DoRA leaves it as it is.
    """
    pieces = []
    for part, taken in found.items():
        if _MAGNITUDE in taken:
            pieces.append(taken[_MAGNITUDE])
        elif base is None or _A in taken:
            raise CheckpointError(
                f"adapter: {module} has DoRA for other parts, but not for {part.hf}; pass the "
                "model's parameters as base"
            )
        else:
            weight = base[f"{module}.weight"][part.row : part.row + part.rows]
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


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a key that a converted adapter would not honour."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"adapter: peft_type is {shown(config.get('peft_type'))}; only 'LORA' can be converted"
        )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGING):
        raise CheckpointError(
            f"adapter: init_lora_weights is {start!r}, which also changed the model's weights; "
            "convert it to a plain LoRA adapter first (PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key not in _KEPT | _NAMING and value:
            raise CheckpointError(f"adapter: {key}={shown(value)} cannot be converted")


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the ranks and alphas of a config can be computed with."""
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"adapter: {key} is {shown(patterns)}, but must be an object")
        for pattern, value in patterns.items():
            if not _is_simple(pattern):
                raise CheckpointError(
                    f"adapter: {key}: {shown(pattern)} is not a simple expression, so a match "
                    "could take very long; write the names of the modules in full"
                )
            _check_number(f"{key}[{shown(pattern)}]", value)
    _check_number("lora_alpha", config.get("lora_alpha", 8))
    _check_number("r", config.get("r", 8))


def _check_number(key: str, value: Any) -> None:
    if not is_number(value) or abs(value) > 1e30:
        raise CheckpointError(f"adapter: {key} is {shown(value)}, but must be a number")


def _is_simple(pattern: str) -> bool:
    """Return whether the pattern matches names quickly: it has few repetitions, none nested."""
    repeats = re.findall(r"(?<!\\)[*+?{]", pattern)
    if len(pattern) > 1000 or len(repeats) > 3 or re.search(r"(?<!\\)\)[*+?{]", pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _check_fit(config: Mapping[str, Any], part: Part, taken: Weights, width: int) -> None:
    """Raise CheckpointError unless A and B have the shapes that the config and the linear need."""
    rank = _of_pattern(config, "rank_pattern", part.hf, config.get("r", 8))
    for end, shape in ((_A, (rank, width)), (_B, (part.rows, rank))):
        if tuple(taken[end].shape) != shape or rank < 1:
            raise CheckpointError(
                f"adapter: {part.hf}.{end} has the shape {list(taken[end].shape)}, expected "
                f"{list(shape)}"
            )


def _alpha(config: Mapping[str, Any], module: str) -> float:
    return _of_pattern(config, "alpha_pattern", module, config.get("lora_alpha", 8))


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A."""
    alpha = _alpha(config, module)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_pattern(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Return a module's value of a pattern: keys are regular expressions for ends of names."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


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
    new = {key: copy.deepcopy(value) for key, value in config.items() if key in _KEPT}
    return new | {
        "target_modules": sorted(adapted),
        "modules_to_save": sorted(saved) or None,
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items()},
        "alpha_pattern": {re.escape(name): alpha for name, alpha in alphas.items()},
    }
