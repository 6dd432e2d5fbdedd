"""Translate the rope fields of a config.json to those of a config class, and back.

The fields have two spellings. The old one is `rope_theta` and `rope_scaling`. In Gemma 3 these
describe the full-attention layers, and `rope_local_base_freq` describes the sliding layers. The new
one is `rope_parameters`. In Gemma 3 it holds an object for each layer type. Both spellings are
read, in transformers' order of precedence, and both are written.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from ligermodels.converters.files import is_int, is_number
from ligermodels.errors import ConfigError, printable, short_repr

FIELDS = ("rope_theta", "rope_local_base_freq", "rope_scaling", "partial_rotary_factor")
# Each rope type and the numbers that it needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
# Numbers that a rope may have. For those of the second line, 0 means that the number is absent.
_OPTIONAL_NUMBERS = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "partial_rotary_factor",
)
_OPTIONAL_OR_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# This scales queries, with every rope type.
_QUERY_BETA = "llama_4_scaling_beta"
# Outside these bounds a frequency overflows or underflows.
_LEAST, _MOST = 1e-6, 1e12
# All keys of a rope object that something here reads.
_READ = {
    *("rope_type", "type", "rope_theta", "truncate"),
    *("short_factor", "long_factor", *_OPTIONAL_NUMBERS, *_OPTIONAL_OR_ZERO),
    *(name for names in ROPE_TYPES.values() for name in names),
}
_HAS_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


class RopeConfig:
    """The rope fields of every config class.

    Some classes also have `rope_local_base_freq`, and some have `partial_rotary_factor`.

    Attributes: rope_scaling has a "rope_type" and no theta; it is None for plain rope.
        unread_rope_keys names keys of it that `RotaryEmbedding` does not read and that change
        nothing. Published YaRN checkpoints of Llama and Mistral have "finetuned", which
        transformers ignores, too. default_rope is the rope of a config.json that describes none.
    """

    unread_rope_keys: ClassVar[tuple[str, ...]] = ("finetuned",)
    default_rope: ClassVar[dict[str, Any]] = {}
    # Other names that the family's checkpoints have for a rope type.
    rope_type_aliases: ClassVar[dict[str, str]] = {}
    # Whether there is an old spelling, which families newer than transformers 5 do not have.
    old_rope_spelling: ClassVar[bool] = True

    rope_theta: float
    rope_scaling: dict[str, Any] | None


def fields_from_hf(raw: Mapping[str, Any], config_class: type[RopeConfig]) -> dict[str, Any]:
    """Return the rope fields of `config_class` with the values of a config.json.

    Args: raw is the config.json.
    Raises:
        ConfigError: the fields are malformed, or describe a rope that is not implemented.
    """
    if not config_class.old_rope_spelling:
        raw = {**raw, **dict.fromkeys(("rope_scaling", "rope_theta", "rope_local_base_freq"))}
    theta = ("rope_theta", config_class.rope_theta)
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), (dict, type(None))):
            raise ConfigError(f"{key!r} is {short_repr(raw[key])}, expected an object or null")
    if (local_theta := getattr(config_class, "rope_local_base_freq", None)) is not None:
        local = ("rope_local_base_freq", local_theta)
        return _fields_per_layer_type(raw, theta, local, config_class)
    # A non-empty rope_scaling replaces all of rope_parameters, also its theta.
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = dict(raw.get(key) or config_class.default_rope)
    length = "original_max_position_embeddings"
    rope_type = given.get("rope_type") or given.get("type")
    if isinstance(rope_type, str) and rope_type in config_class.rope_type_aliases:
        given["rope_type"] = rope_type = config_class.rope_type_aliases[rope_type]
    if rope_type in _HAS_ORIGINAL_LENGTH and raw.get(length) is not None:
        given[length] = raw[length]
    fields: dict[str, Any] = {}
    if (default := getattr(config_class, "partial_rotary_factor", None)) is not None:
        fields["partial_rotary_factor"] = part = _part(given, key, raw, default)
        if is_int(raw.get("head_dim")):
            raw = {**raw, "head_dim": int(raw["head_dim"] * part)}
    _refuse_unread(given, config_class.unread_rope_keys, f"'{key}.")
    rope_theta, scaling = _theta_and_scaling(given, key, raw, theta)
    return {"rope_theta": rope_theta, "rope_scaling": scaling, **fields}


def _part(given: dict[str, Any], key: str, raw: Mapping[str, Any], default: float) -> float:
    """Take partial_rotary_factor out of the rope object `given`, or from `raw`, or the default."""
    part, name = None, f"{key}.partial_rotary_factor"
    if given.get("rope_type", given.get("type")) != "proportional":  # which uses it in another way
        part = given.pop("partial_rotary_factor", None)
    if part is None:
        part, name = raw.get("partial_rotary_factor"), "partial_rotary_factor"
    part = default if part is None else part
    if not is_number(part) or not 0 < part <= 1:
        raise ConfigError(f"{name!r} is {short_repr(part)}, expected a number above 0, at most 1")
    return float(part)


def _fields_per_layer_type(
    raw: Mapping[str, Any],
    theta: tuple[str, float],
    local_theta: tuple[str, float],
    config_class: type[RopeConfig],
) -> dict[str, Any]:
    nested = raw.get("rope_parameters") or {}
    for name, value in nested.items():
        if name not in LAYER_TYPES or not isinstance(value, (dict, type(None))):
            raise ConfigError(
                f"'rope_parameters.{printable(name)}' is {short_repr(value)}; this family allows "
                f"only {' and '.join(LAYER_TYPES)} there, and each must be an object"
            )
    # transformers merges rope_scaling into this object, and "rope_type" wins over "type".
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters.full_attention"
    full = {
        **(nested.get("full_attention") or config_class.default_rope or {"rope_type": "default"}),
        **(raw.get("rope_scaling") or {}),
    }
    may_stay = config_class.unread_rope_keys
    _refuse_unread(full, may_stay, f"'{key}.")
    rope_theta, scaling = _theta_and_scaling(full, key, raw, theta)
    key = "rope_parameters.sliding_attention"
    sliding = nested.get("sliding_attention") or {}
    _refuse_unread(sliding, may_stay, f"'{key}.")
    rope_local_base_freq, local_scaling = _theta_and_scaling(sliding, key, raw, local_theta)
    if local_scaling is not None:
        raise ConfigError(
            f"'{key}.rope_type' is {local_scaling['rope_type']!r}; scaled rope in sliding layers "
            "is not implemented; expected 'default'"
        )
    return {
        "rope_theta": rope_theta,
        "rope_local_base_freq": rope_local_base_freq,
        "rope_scaling": scaling,
    }


def _theta_and_scaling(
    given: Mapping[str, Any], key: str, raw: Mapping[str, Any], fallback: tuple[str, float]
) -> tuple[float, dict[str, Any] | None]:
    """Split the rope object `given` into theta and the scaling. Messages call the object `key`.

    Args: fallback says where to find a theta that `given` lacks: a key of `raw`, then a default.
    """
    scaling = {name: copy.deepcopy(value) for name, value in given.items() if value is not None}
    theta, theta_key = scaling.pop("rope_theta", None), f"{key}.rope_theta"
    if theta is None:
        theta, theta_key = raw.get(fallback[0]), fallback[0]
    theta = fallback[1] if theta is None else theta
    if not is_number(theta) or theta <= 0:
        raise ConfigError(f"{theta_key!r} is {short_repr(theta)}, expected a positive number")

    old_spelling = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", old_spelling)
    _check_type(rope_type, f"'{key}.")
    if scaling.get("partial_rotary_factor", 1) != 1 and rope_type != "proportional":
        value = short_repr(scaling["partial_rotary_factor"])
        raise ConfigError(
            f"'{key}.partial_rotary_factor' is {value}, which changes the computation and is not "
            "implemented"
        )
    if rope_type == "default" and _QUERY_BETA not in scaling:
        return theta, None
    _check(rope_type, scaling, raw, f"'{key}.")
    return theta, {"rope_type": rope_type, **scaling}


def _refuse_unread(scaling: Mapping[str, Any], may_stay: Collection[str], where: str) -> None:
    """Refuse a key that no rope reads: the family's own code may compute with it, as with alpha."""
    for name, value in scaling.items():
        if name in _READ or name in may_stay or value is None:
            continue
        what = "which no rope here reads"
        if isinstance(value, dict):
            what = "but rope per layer type is not implemented"
        raise ConfigError(
            f"{where}{printable(name)}' is {short_repr(value)}, {what}; if it does not change the "
            "computation, add it to unread_rope_keys of the config class"
        )


def check_scaling(
    scaling: Mapping[str, Any], sizes: Mapping[str, Any], unread: Collection[str] = ()
) -> None:
    """Refuse a `rope_scaling` that no model can have.

    Args: sizes holds the config's rope_theta and max_position_embeddings, and as head_dim the size
        of the rotated part of a head. unread names keys that may stay although no rope reads them.
    Raises:
        ConfigError: a number is missing or wrong, or a key says something else than the config's
            own fields. The message names it.
    """
    rope_type: Any = scaling.get("rope_type")
    _check_type(rope_type, "config: 'rope_scaling.")
    _refuse_unread(scaling, unread, "config: 'rope_scaling.")
    own = {"type": rope_type, "partial_rotary_factor": 1, **sizes}
    if rope_type == "proportional":
        own["partial_rotary_factor"] = scaling.get("partial_rotary_factor")
    for name in ("type", "rope_theta", "partial_rotary_factor"):
        if scaling.get(name) not in (None, own[name]):
            raise ConfigError(
                f"config: 'rope_scaling.{name}' is {short_repr(scaling[name])}, but the model "
                f"would have {short_repr(own[name])}, because this key is only read in a "
                "config.json; remove it, and set "
                f"{'rope_type' if name == 'type' else f'{name} of the config'}"
            )
    _check(rope_type, scaling, sizes, "config: 'rope_scaling.")


def _check_type(rope_type: object, where: str) -> None:
    """Refuse a rope_type that no rope has."""
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        expected = f"expected one of {', '.join(ROPE_TYPES)}"
        raise ConfigError(f"{where}rope_type' is {short_repr(rope_type)}, {expected}")


def _check(rope_type: str, scaling: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> None:
    """Check the numbers of a rope. A message puts `where` before the name of a number."""

    def fault(name: str, what: str) -> ConfigError:
        return ConfigError(f"{where}{name}' {what}")

    optional_or_zero = (*_OPTIONAL_OR_ZERO, _QUERY_BETA)
    for name in (*ROPE_TYPES[rope_type], *_OPTIONAL_NUMBERS, *optional_or_zero):
        value = scaling.get(name)
        if value is None:
            if name in ROPE_TYPES[rope_type]:
                raise fault(name, f"is missing; rope type {rope_type!r} needs it")
        elif not _is_positive(value):
            if not (is_number(value) and value == 0 and name in optional_or_zero):
                raise fault(name, f"is {short_repr(value)}, expected a positive number")
    if not isinstance(scaling.get("truncate", True), bool):
        raise fault("truncate", f"is {short_repr(scaling['truncate'])}, expected true or false")
    if rope_type == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise fault("high_freq_factor", "must be greater than low_freq_factor")
    if rope_type == "longrope":
        _check_longrope(scaling, raw, fault)


def _is_positive(value: Any) -> bool:
    return is_number(value) and _LEAST <= value <= _MOST


def _check_longrope(
    scaling: Mapping[str, Any], raw: Mapping[str, Any], fault: Callable[[str, str], ConfigError]
) -> None:
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if not isinstance(factors, list) or not factors or not all(map(_is_positive, factors)):
            raise fault(name, "is not a list of positive numbers; rope type 'longrope' needs one")
        head_dim = raw.get("head_dim")
        if isinstance(head_dim, int) and len(factors) != head_dim // 2:
            raise fault(
                name,
                f"has {len(factors)} numbers, expected half of the rotated part of a head, "
                f"{head_dim // 2}",
            )


def fields_to_hf(raw: dict[str, Any], config: RopeConfig, changed: bool) -> None:
    """Write both spellings of a config's rope into the config.json `raw`.

    Args: changed is True if the config's rope differs from the one in `raw`.
    """
    scaling = copy.deepcopy(config.rope_scaling)
    if scaling is not None and scaling["rope_type"] == "default" and _QUERY_BETA not in scaling:
        scaling = None
    if changed:
        # The new scaling has its own length. A length at the top level would override it.
        raw.pop("original_max_position_embeddings", None)
    elif scaling and raw.get("rope_theta") not in (None, config.rope_theta):
        # The checkpoint has two thetas. Both are kept. The one in the scaling takes precedence,
        # so the scaling gets the theta that the config uses.
        scaling["rope_theta"] = config.rope_theta
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta}
    if (part := getattr(config, "partial_rotary_factor", None)) is not None:
        parameters["partial_rotary_factor"] = part
    spellings: dict[str, Any] = {
        **({} if part is None else {"partial_rotary_factor": part}),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }
    if (local := getattr(config, "rope_local_base_freq", None)) is not None:
        spellings["rope_local_base_freq"] = local
        spellings["rope_parameters"] = {
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    if not config.old_rope_spelling:
        spellings = {"rope_parameters": spellings["rope_parameters"]}
    elif config.default_rope and raw.get("rope_scaling", "") is None and not changed:
        del spellings["rope_scaling"]  # null, where a missing rope is no plain one
    for key, value in spellings.items():
        if changed or key not in raw or (not raw[key] and value is not None):
            raw[key] = value
    length = "original_max_position_embeddings"
    if scaling and scaling["rope_type"] == "longrope" and length in scaling:
        # transformers 4 reads the length of longrope only here. Version 5 also accepts it here.
        raw.setdefault(length, scaling[length])
