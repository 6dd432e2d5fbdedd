"""The content of PEFT's adapter_config.json: modules that have a LoRA, its ranks and scales.

The rules by which names match are those of PEFT (`check_target_module_exists`, `get_pattern_key`).
"""

import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from ligermodels.errors import CheckpointError, short_repr

# Keys of the config that are honoured, or mean nothing for the weights.
_KNOWN = {
    *("target_modules", "modules_to_save", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "auto_mapping", "target_parameters"),
    *("r", "lora_alpha", "lora_dropout", "peft_type", "task_type", "use_dora", "use_rslora"),
    *("base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    *("init_lora_weights", "ensure_weight_tying"),
}
# Ways to start an adapter that also change the weights of the model it belongs to.
_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
_ALL_LINEAR = "all-linear"


def check_config(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a key that is not honoured, or a value that cannot be."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"adapter: peft_type is {short_repr(config.get('peft_type'))}; only 'LORA' can be "
            "converted"
        )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGING):
        raise CheckpointError(
            f"adapter: init_lora_weights is {start!r}, which also changed the model's weights; "
            "convert it to a plain LoRA adapter first (PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key not in _KNOWN and value and (key, value) != ("bias", "none"):
            raise CheckpointError(
                f"adapter: {key}={short_repr(value)} cannot be converted; merge the adapter with "
                "PEFT's merge_and_unload"
            )
    saved = config.get("modules_to_save")
    if not isinstance(saved, list | set | None):
        raise CheckpointError(
            f"adapter: modules_to_save is {short_repr(saved)}, but must be a list of names"
        )
    if config.get("target_modules") is None and not config.get("target_parameters"):
        raise CheckpointError(
            "adapter: target_modules is missing, so that it is unknown which modules the adapter "
            "is for; write their names into adapter_config.json"
        )


def targets(config: Mapping[str, Any], linears: Mapping[str, bool]) -> set[str]:
    """Return the names of the modules that get a LoRA.

    Args: linears: the name of each linear and embedding -> whether it is a linear of a layer.
    """
    wanted = config.get("target_modules") or ()
    wanted = wanted if isinstance(wanted, str) else frozenset(wanted)
    if isinstance(wanted, str) and wanted.lower() == _ALL_LINEAR:
        found = {name for name, in_layer in linears.items() if in_layer}
    elif isinstance(wanted, str):
        found = {name for name in linears if re.fullmatch(wanted, name)}
    else:
        in_layers = (name for name in linears if _in_layers(config, name))
        found = {*wanted} & linears.keys() | {name for name in in_layers if has_end(name, wanted)}
    excluded = config.get("exclude_modules") or []
    if isinstance(excluded, str):
        found = {name for name in found if not re.fullmatch(excluded, name)}
    else:
        found = {name for name in found if not has_end(name, frozenset(excluded))}
    return {name for name in found if not is_saved_whole(config, name)}


def is_saved_whole(config: Mapping[str, Any], name: str) -> bool:
    """Return whether modules_to_save names a module, or one that it is a part of."""
    return any(f".{each}." in f".{name}." for each in config.get("modules_to_save") or ())


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Return the rank of a module's LoRA."""
    rank: int = _of_pattern(config, "rank_pattern", module, config.get("r", 8))
    return rank


def scaling_of(config: Mapping[str, Any], module: str) -> float:
    """Return the factor of the product B A of a module."""
    alpha: float = _of_pattern(config, "alpha_pattern", module, config.get("lora_alpha", 8))
    rank = rank_of(config, module)
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def has_end(name: str, names: Set[str]) -> bool:
    """Return whether a module has one of the names, or ends in one."""
    return not names.isdisjoint(ends(name))


def ends(name: str) -> Iterator[str]:
    """Yield a module's name, and every end of it that begins after a dot."""
    yield name
    yield from (name[i + 1 :] for i, letter in enumerate(name) if letter == ".")


def _in_layers(config: Mapping[str, Any], name: str) -> bool:
    """Return whether layers_to_transform, if it is set, names the layer of a module."""
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    starts = [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]
    found = next((m for start in starts if (m := re.match(rf"{start}\.(\d+)\.", name))), None)
    layers = layers if isinstance(layers, list) else [layers]
    return found is not None and int(found[found.re.groups]) in layers


def _of_pattern(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Return a module's value of a pattern: keys are regular expressions for ends of names."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
