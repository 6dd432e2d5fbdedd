"""The rope fields of a config.json, which have an old and a new spelling, and back.

Old: `rope_theta` and `rope_scaling`; in Gemma 3 these are of the full layers, and the sliding ones
have `rope_local_base_freq`. New: `rope_parameters`, in Gemma 3 one for each layer type. Both are
read, in transformers' order of precedence, and both are written.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

from ligermodels.errors import ConfigError, printable, shown

FIELDS = ("rope_theta", "rope_local_base_freq", "rope_scaling")
# Rope types and the numbers that each of them needs.
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
_HAS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


def fields_from_hf(raw: dict[str, Any], cls: Any, source: str) -> dict[str, Any]:
    """The rope fields of the config dataclass `cls`.

    The scaling has "rope_type" in it and not theta; it is None for plain rope.

    Raises:
        ConfigError: what is no rope, or one that is not implemented.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), (dict, type(None))):
            raise ConfigError(f"{source}: {key!r} is {shown(raw[key])}, expected an object or null")
    if hasattr(cls, "rope_local_base_freq"):
        return _fields_per_layer_type(raw, cls, source)
    # A non-empty rope_scaling replaces the whole of rope_parameters, its theta included.
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = dict(raw.get(key) or {})
    length = "original_max_position_embeddings"
    rope_type = given.get("rope_type") or given.get("type")
    if rope_type in _HAS_ORIGINAL_LENGTH and raw.get(length) is not None:
        given[length] = raw[length]
    theta, scaling = _theta_and_scaling(given, key, raw, ("rope_theta", cls.rope_theta), source)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _fields_per_layer_type(raw: dict[str, Any], cls: Any, source: str) -> dict[str, Any]:
    nested = raw.get("rope_parameters") or {}
    for name, value in nested.items():
        if name not in LAYER_TYPES or not isinstance(value, (dict, type(None))):
            raise ConfigError(
                f"{source}: 'rope_parameters.{printable(name)}' is {shown(value)}; this family "
                f"has an object for each of {' and '.join(LAYER_TYPES)}"
            )
    # rope_scaling merges into what stands there, so that "type" loses against "rope_type".
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters.full_attention"
    full = {
        **(nested.get("full_attention") or {"rope_type": "default"}),
        **(raw.get("rope_scaling") or {}),
    }
    theta, scaling = _theta_and_scaling(full, key, raw, ("rope_theta", cls.rope_theta), source)
    key = "rope_parameters.sliding_attention"
    local_theta, local_scaling = _theta_and_scaling(
        nested.get("sliding_attention") or {},
        key,
        raw,
        ("rope_local_base_freq", cls.rope_local_base_freq),
        source,
    )
    if local_scaling is not None:
        raise ConfigError(
            f"{source}: '{key}.rope_type' is {local_scaling['rope_type']!r}; scaled rope in "
            "sliding layers is not implemented"
        )
    return {"rope_theta": theta, "rope_local_base_freq": local_theta, "rope_scaling": scaling}


def _theta_and_scaling(
    given: dict[str, Any], key: str, raw: dict[str, Any], fallback: tuple[str, float], source: str
) -> tuple[float, dict[str, Any] | None]:
    """Split the rope object `given`, which messages call `key`.

    Args: fallback is the key beside it that theta may stand under, and the default.
    """
    scaling = {name: copy.deepcopy(value) for name, value in given.items() if value is not None}
    theta, theta_key = scaling.pop("rope_theta", None), f"{key}.rope_theta"
    if theta is None:
        theta, theta_key = raw.get(fallback[0]), fallback[0]
    theta = fallback[1] if theta is None else theta
    if not is_number(theta) or theta <= 0:
        raise ConfigError(f"{source}: {theta_key!r} is {shown(theta)}, expected a positive number")

    old_spelling = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", old_spelling)
    if not isinstance(rope_type, str) or rope_type not in ROPE_NUMBERS:
        raise ConfigError(
            f"{source}: '{key}.rope_type' is {shown(rope_type)}, expected one of "
            f"{', '.join(ROPE_NUMBERS)}"
        )
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"{source}: '{key}.partial_rotary_factor' is "
            f"{shown(scaling['partial_rotary_factor'])}, which changes the maths and is not "
            "implemented"
        )
    if nested := [name for name, value in scaling.items() if isinstance(value, dict)]:
        raise ConfigError(
            f"{source}: '{key}.{printable(nested[0])}': rope per layer type is not implemented"
        )
    if rope_type == "default":
        return theta, None
    _check(rope_type, scaling, raw, f"{source}: '{key}.")
    return theta, {"rope_type": rope_type, **scaling}


def check_scaling(scaling: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raise ConfigError for a `rope_scaling` of a config that no model can have.

    Args: sizes holds the config's head_dim, rope_theta and max_position_embeddings.
    """
    rope_type = scaling.get("rope_type")
    if not isinstance(rope_type, str) or rope_type not in ROPE_NUMBERS:
        raise ConfigError(
            f"config: rope_scaling has rope_type {shown(rope_type)}; known: "
            f"{', '.join(ROPE_NUMBERS)}"
        )
    _check(rope_type, scaling, sizes, "config: 'rope_scaling.")


# Numbers of a rope scaling that may be absent; the last four may be 0, which stands for absent.
_OPTIONAL_NUMBERS = (
    *("factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
# Beyond these a frequency over- or underflows.
_LEAST, _MOST = 1e-6, 1e12


def _check(rope_type: str, scaling: dict[str, Any], raw: dict[str, Any], where: str) -> None:
    def fault(name: str, what: str) -> ConfigError:
        return ConfigError(f"{where}{name}' {what}")

    for name in (*ROPE_NUMBERS[rope_type], *_OPTIONAL_NUMBERS):
        value = scaling.get(name)
        if value is None:
            if name in ROPE_NUMBERS[rope_type]:
                raise fault(name, f"is missing; rope type {rope_type!r} needs it")
        elif not is_number(value) or not _LEAST <= value <= _MOST:
            if not (value == 0 and is_number(value) and name in _OPTIONAL_NUMBERS[3:]):
                raise fault(name, f"is {shown(value)}, expected a positive number")
    if not isinstance(scaling.get("truncate", True), bool):
        raise fault("truncate", f"is {shown(scaling['truncate'])}, expected true or false")
    if rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise fault("high_freq_factor", "must be greater than low_freq_factor")
    if rope_type == "yarn" and raw.get("rope_theta") == 1:
        raise fault("rope_type", "is 'yarn', which needs a rope_theta other than 1")
    if rope_type == "dynamic" and raw.get("head_dim") == 2:
        raise fault("rope_type", "is 'dynamic', which needs a head_dim greater than 2")
    if rope_type == "longrope":
        _check_longrope(scaling, raw, fault)


def _check_longrope(
    scaling: dict[str, Any], raw: dict[str, Any], fault: Callable[[str, str], ConfigError]
) -> None:
    original = scaling.get("original_max_position_embeddings", raw.get("max_position_embeddings"))
    if isinstance(original, (int, float)) and original <= 1:
        raise fault("original_max_position_embeddings", f"is {original}, expected more than 1")
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if (
            not isinstance(factors, list)
            or not factors
            or not all(is_number(factor) and _LEAST <= factor <= _MOST for factor in factors)
        ):
            raise fault(name, "is no list of positive numbers; rope type 'longrope' needs it")
        head_dim = raw.get("head_dim")
        if isinstance(head_dim, int) and len(factors) != head_dim // 2:
            raise fault(
                name, f"has {len(factors)} numbers, expected head_dim / 2 = {head_dim // 2}"
            )


def write(raw: dict[str, Any], config: Any, changed: bool) -> None:
    """Put both spellings of the config's rope into a config.json.

    Args: changed says that the config's rope is another than that of `raw`.
    """
    scaling = copy.deepcopy(config.rope_scaling)
    if scaling is not None and scaling["rope_type"] == "default":
        scaling = None
    if changed:
        # The new values hold the length too, and one at config level would override theirs.
        raw.pop("original_max_position_embeddings", None)
    elif scaling and raw.get("rope_theta") not in (None, config.rope_theta):
        # What came in contradicts itself and stays; the scaling, which wins, says which holds.
        scaling["rope_theta"] = config.rope_theta
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta}
    spellings: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }
    if hasattr(config, "rope_local_base_freq"):
        local = config.rope_local_base_freq
        spellings["rope_local_base_freq"] = local
        spellings["rope_parameters"] = {
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    for key, value in spellings.items():
        if changed or key not in raw or (not raw[key] and value is not None):
            raw[key] = value
    length = "original_max_position_embeddings"
    if scaling and scaling["rope_type"] == "longrope" and length in scaling:
        # transformers 4 reads longrope's length here alone, and 5 reads the same from it.
        raw.setdefault(length, scaling[length])


def is_int(value: Any) -> bool:
    """Whether JSON holds an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether JSON holds a finite number, and no integer beyond 64 bits: torch takes none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_int(value) and abs(value) < 2**63
