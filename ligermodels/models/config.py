"""What the configs of all families share."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from ligermodels.converters import hf_config, hf_rope
from ligermodels.converters.files import is_int
from ligermodels.errors import ConfigError, shown

# Far above any published model; a config beyond them is damaged or hostile, and is refused
# before anything is sized by it.
_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**40,
    # Of some families only.
    "query_pre_attn_scalar": 2**32,
    "sliding_window_pattern": 2**14,
}


# Checked in the families that have them; without a soft cap, None.
_POSITIVE = (
    *("rms_norm_eps", "rope_theta", "rope_local_base_freq"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_LONGEST_WINDOW = 2**40

# HF's names of the MLP's activation, and ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(kw_only=True)
class ModelConfig:
    """Sizes and settings of a decoder, under HF's field names.

    Not frozen: assign to a field before building a model from it. `extra` holds the config.json
    a checkpoint came with, whole, so that an export gives back every key.

    Raises:
        ConfigError: a field that no model can have.
    """

    model_type: ClassVar[str]
    # transformers' model class, where it is not the capitalised model_type and "ForCausalLM".
    architecture: ClassVar[str | None] = None
    activation_field: ClassVar[str] = "hidden_act"  # or "hidden_activation"
    # Published sizes by name: the fields that differ from the family's defaults.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # model_type of a config.json that has this family's as its text_config, beside other towers.
    wrapper_type: ClassVar[str | None] = None
    # Fields for which a JSON null means: derive the value.
    null_is_derived: ClassVar[tuple[str, ...]] = ()
    # Fields that an export spells out even where the checkpoint left them out.
    written: ClassVar[tuple[str, ...]] = ()

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # None stands for num_attention_heads and hidden_size / num_attention_heads; __post_init__
    # puts the number in its place.
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # with "rope_type", without theta
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None  # the checkpoint's, such as "bfloat16"
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    def __init_subclass__(cls) -> None:
        cls.presets = {}  # a family's own: another family's sizes are no sizes of it

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and _is_size(self.num_attention_heads):
            if not isinstance(self.hidden_size, int) or self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"config: hidden_size {self.hidden_size} is not a multiple of "
                    f"num_attention_heads {self.num_attention_heads}; set head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.validate()

    def validate(self) -> None:
        """Check every field; called on construction, and again when a model is built.

        Raises:
            ConfigError: naming the field, its value and what is allowed.
        """
        fault = next(_faults(self), None)
        if fault is not None:
            raise ConfigError(f"config: {fault}")

    @property
    def activation(self) -> str:
        """The MLP's activation under our name: "silu", "gelu_tanh" or "gelu"."""
        return _ACTIVATIONS[getattr(self, self.activation_field)]

    @property
    def sliding_windows(self) -> list[int | None]:
        """How many keys each layer's queries see, their own included; None for all."""
        return [None] * self.num_hidden_layers

    @classmethod
    def from_hf(cls, folder: str | os.PathLike[str]) -> Self:
        """Read `folder`/config.json.

        Raises:
            ConfigError: naming the file and the key that is damaged, unknown or not implemented.
        """
        raw = hf_config.read_config(folder)
        try:
            return cls(**hf_config.fields_from_hf(raw, cls))
        except ConfigError as error:
            raise ConfigError(f"{Path(folder) / 'config.json'}: {error}") from None

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The config of a published model size, with fields changed by keyword.

        Raises:
            ConfigError: an unknown name; lists the known ones.
        """
        if name not in cls.presets:
            raise ConfigError(f"preset {name!r} is unknown; known: {', '.join(cls.presets)}")
        return cls(**{**cls.presets[name], **overrides})

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, model_type included, `extra` left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        del values["extra"]
        return {"model_type": self.model_type, **values}


def sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None = None, **others: Any
) -> dict[str, Any]:
    """The fields of a published size, and others by keyword; `inner` is intermediate_size."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


def _is_size(value: Any) -> bool:
    return is_int(value) and value >= 1


def windows_from_types(layer_types: list[str], window: int | None) -> list[int | None]:
    """The window of each layer from HF's layer_types; None where a layer attends to everything.

    Raises:
        ConfigError: a layer slides, and there is no window.
    """
    slides = [kind == "sliding_attention" for kind in layer_types]
    if any(slides) and window is None:
        raise ConfigError(
            f"config: sliding_window is None, but layer {slides.index(True)} is of type "
            "'sliding_attention'"
        )
    return [window if sliding else None for sliding in slides]


def _faults(config: ModelConfig) -> Iterator[str]:
    """What no model can have; each check may rely on those before it."""
    for name, largest in _LARGEST.items():
        value = getattr(config, name, 1)
        if not _is_size(value) or value > largest:
            yield f"{name} is {shown(value)}; expected an integer from 1 to {largest}"
    yield from hf_config.type_faults(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    if config.head_dim % 2:
        yield f"head_dim {config.head_dim} is odd; rope rotates pairs"
    if (name := getattr(config, config.activation_field)) not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        yield f"{config.activation_field} {shown(name)} is not implemented; known: {known}"
    if config.attention_dropout:
        yield f"attention_dropout {config.attention_dropout} is not implemented; set 0"
    for name in _POSITIVE:
        value = getattr(config, name, 1.0)
        if value is None and name.endswith("softcapping"):
            continue
        if not 0 < value <= sys.float_info.max:
            yield f"{name} is {shown(value)}; expected a positive number"
    if not 0 <= config.initializer_range <= sys.float_info.max:
        value = shown(config.initializer_range)
        yield f"initializer_range is {value}; expected a number of at least 0"
    yield from _layer_faults(config)
    if config.rope_scaling is not None:
        hf_rope.check_scaling(config.rope_scaling, vars(config))
    token, vocab = config.pad_token_id, config.vocab_size
    if token is not None and not -vocab <= token < vocab:
        yield f"pad_token_id {token} is outside the vocabulary of {vocab}"


def _layer_faults(config: ModelConfig) -> Iterator[str]:
    """What differs from layer to layer."""
    full, sliding = hf_rope.LAYER_TYPES
    types = getattr(config, "layer_types", None)
    if types is not None:
        if any(kind not in hf_rope.LAYER_TYPES for kind in types):
            yield f"layer_types is {shown(types)}; expected a list of {full!r} and {sliding!r}"
        layers = config.num_hidden_layers
        if len(types) != layers:
            yield f"layer_types has {len(types)} entries, expected num_hidden_layers = {layers}"
    for window in set(config.sliding_windows):
        if window is not None and not (_is_size(window) and window <= _LONGEST_WINDOW):
            yield (
                f"sliding_window is {shown(window)}; expected an integer from 1 to "
                f"{_LONGEST_WINDOW}, or None"
            )
    given = None if hasattr(config, "layer_types") else config.extra.get("layer_types")
    made = [full if window is None else sliding for window in config.sliding_windows]
    if given is not None and given != made:
        yield (
            f"layer_types is {shown(given)}, but the layers of this {config.model_type!r} are "
            f"{shown(made)}"
        )
