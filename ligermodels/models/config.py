"""The base class of all families' configs, and the checks of their fields."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import Self

from ligermodels.converters import hf_config, hf_rope
from ligermodels.converters.files import is_int
from ligermodels.errors import ConfigError, short_repr

# The sizes of a model that is fast to build and to compare. They differ from each other, so that no
# shape can be mistaken for another one.
_SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LONGEST_WINDOW = 2**40


@dataclass(kw_only=True)
class ModelConfig(hf_config.HFConfig):
    """Sizes and settings of a decoder, under HF's field names.

    The dataclass is not frozen: fields may be assigned before a model is built from it. Without a
    value, head_dim and num_key_value_heads get theirs when the config is made, and do not follow
    what is assigned later. `extra` holds the whole config.json of the checkpoint, so that an export
    writes every key again.

    Raises:
        ConfigError: a field has a value that no model can have.
    """

    activation_field: ClassVar[str] = "hidden_act"  # or "hidden_activation"
    # HF's name of each activation that the family computes -> the name in `GatedMLP`. A family with
    # an MLP of its own lists what that MLP computes, under any names.
    activations: ClassVar[dict[str, str]] = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
    # Name of a published size -> the fields that differ from the family's defaults.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # Integers of at least 1, if the family has them -> the largest value. These limits are far
    # above any published model: a config beyond them is damaged or malicious, and is refused before
    # anything is allocated.
    # A family adds its own fields: `largest = ModelConfig.largest | {"num_experts": 2**14}`.
    largest: ClassVar[dict[str, int]] = {
        "vocab_size": 2**24,
        "hidden_size": 2**20,
        "intermediate_size": 2**22,
        "num_hidden_layers": 2**14,
        "num_attention_heads": 2**16,
        "num_key_value_heads": 2**16,
        "head_dim": 2**16,
        "max_position_embeddings": 2**40,
    }
    # Numbers that must be positive, unless their field is None.
    positive: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "rope_theta")
    # The values of layer_types that the family has layers of.
    layer_type_names: ClassVar[tuple[str, ...]] = hf_rope.LAYER_TYPES
    # The fields of a small model of the family where `small` would choose other values.
    small_fields: ClassVar[dict[str, Any]] = {}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # If these are None, they are num_attention_heads and hidden_size / num_attention_heads.
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # contains "rope_type", does not contain theta
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None  # dtype of the checkpoint, such as "bfloat16"
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    def __init_subclass__(cls) -> None:
        cls.presets = {}  # A subclass must not inherit the sizes of another family.

    def __post_init__(self) -> None:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if self.head_dim is None and _is_size(heads) and _is_size(hidden) and hidden % heads == 0:
            self.head_dim = hidden // heads
        self.validate()

    def validate(self) -> None:
        """Check every field. It is called on construction and again when a model is built.

        Raises:
            ConfigError: a field is invalid; the message has its name, its value and what is
                allowed.
        """
        fault = next(_faults(self), None)
        if fault is not None:
            raise ConfigError(f"config: {fault}")

    @property
    def activation(self) -> str:
        """The MLP's activation by its name in `activations`: "silu", "gelu_tanh" or "gelu"."""
        return self.activations[getattr(self, self.activation_field)]

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """Return the config of a published model size. Keyword arguments override its fields.

        Raises:
            ConfigError: the name is unknown; the message lists the known names.
        """
        if name not in cls.presets:
            raise ConfigError(
                f"preset {name!r} is unknown; the known presets are {', '.join(cls.presets)}"
            )
        return cls(**copy.deepcopy({**cls.presets[name], **overrides}))

    @classmethod
    def small(cls, **overrides: Any) -> Self:
        """Return the config of a tiny model, for checks and tests. Arguments override its fields.

        Its sizes are small. The other fields have their defaults, or the values in `small_fields`.
        """
        return cls(**copy.deepcopy({**_SMALL, **cls.small_fields, **overrides}))

    @property
    def keys_to_ignore_at_inference(self) -> list[str]:
        """Raise ConfigError if transformers' Trainer is about to take hidden states for logits.

        Trainer asks for this name before each batch of an evaluation or a prediction. Whether it
        will keep what the model returns without labels is only in its local variables.
        """
        asking = sys._getframe(1).f_locals
        if asking.get("has_labels") is False and asking.get("prediction_loss_only") is False:
            raise ConfigError(
                "Trainer predicts without labels: a native model returns hidden states, which are "
                "no predictions; pass LigerForCausalLM.from_native(model), or "
                "LigerForSequenceClassification for a classifier"
            )
        return []

    @property
    def window(self) -> int | None:
        """The window of the layers that have one."""
        used = getattr(self, "use_sliding_window", True)
        return getattr(self, "sliding_window", None) if used else None

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window, where the config has no layer_types."""
        return self.window is not None

    @property
    def types(self) -> list[str]:
        """The type of each layer."""
        return self.listed_types()

    def listed_types(self) -> list[str]:
        """Return the layer_types, or those that `slides` says."""
        full, sliding = hf_rope.LAYER_TYPES
        layers = range(self.num_hidden_layers)
        given = getattr(self, "layer_types", None)
        return given or [sliding if self.slides(index) else full for index in layers]

    @property
    def sliding_windows(self) -> list[int | None]:
        """For each layer, the number of keys that a query sees, including its own; None for all."""
        return windows_from_types(self.types, self.window)

    @property
    def recomputes_keys_after(self) -> int | None:
        """The length beyond which generation computes all keys again, as transformers does."""
        return None

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that rope rotates: the first ones."""
        return int(self.head_dim * getattr(self, "partial_rotary_factor", 1.0))

    def get_text_config(self, **options: Any) -> Self:
        """Return the config itself. HF's Trainer asks for it if it is given a tokenizer."""
        return self


def sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None = None, **others: Any
) -> dict[str, Any]:
    """Return the fields of a published size under HF's names, and any other fields given.

    `inner` is intermediate_size.
    """
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
    """Return the window of each layer according to HF's layer_types; None for full attention.

    Raises:
        ConfigError: a layer is of type 'sliding_attention', but window is None.
    """
    slides = [kind == "sliding_attention" for kind in layer_types]
    if any(slides) and window is None:
        raise ConfigError(
            f"config: sliding_window is None, but layer {slides.index(True)} is of type "
            "'sliding_attention'; set sliding_window"
        )
    return [window if sliding else None for sliding in slides]


def _faults(config: ModelConfig) -> Iterator[str]:
    """Yield a description of each field that no model can have.

    A check may rely on the checks before it, so the caller reads only the first description.
    """
    for name, largest in config.largest.items():
        value = getattr(config, name, 1)
        if name == "head_dim" and value is None:
            yield (
                f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads "
                f"{config.num_attention_heads}; set head_dim"
            )
        if not _is_size(value) or value > largest:
            yield f"{name} is {short_repr(value)}; expected an integer from 1 to {largest}"
    yield from hf_config.type_faults(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        yield (
            f"partial_rotary_factor {getattr(config, 'partial_rotary_factor', 1.0)} of head_dim "
            f"{config.head_dim} is {config.rotary_dim}, the elements that rope rotates; expected "
            "an even number from 2 to head_dim"
        )
    if (name := getattr(config, config.activation_field)) not in config.activations:
        known = ", ".join(config.activations)
        yield (
            f"{config.activation_field} {short_repr(name)} is not implemented; expected one of "
            f"{known}"
        )
    if config.attention_dropout:
        yield f"attention_dropout {config.attention_dropout} is not implemented; set it to 0"
    for name in config.positive:
        value = getattr(config, name)
        if value is not None and not 0 < value <= sys.float_info.max:
            yield f"{name} is {short_repr(value)}; expected a positive number"
    if not 0 <= config.initializer_range <= sys.float_info.max:
        value = short_repr(config.initializer_range)
        yield f"initializer_range is {value}; expected a number of at least 0"
    yield from _layer_faults(config)
    if config.rope_scaling is not None:
        sizes = {**vars(config), "head_dim": config.rotary_dim}
        hf_rope.check_scaling(config.rope_scaling, sizes, config.unread_rope_keys)
    token, vocab = config.pad_token_id, config.vocab_size
    if token is not None and not -vocab <= token < vocab:
        yield f"pad_token_id {token} is outside the vocabulary of {vocab} tokens"


def _layer_faults(config: ModelConfig) -> Iterator[str]:
    """Yield a description of each invalid field that may differ from layer to layer."""
    full, sliding = hf_rope.LAYER_TYPES
    types = getattr(config, "layer_types", None)
    if types is not None:
        if any(kind not in config.layer_type_names for kind in types):
            expected = " and ".join(map(repr, config.layer_type_names))
            yield f"layer_types is {short_repr(types)}; expected a list of {expected}"
        layers = config.num_hidden_layers
        if len(types) != layers:
            yield f"layer_types has {len(types)} entries, expected num_hidden_layers = {layers}"
    for window in set(config.sliding_windows):
        if window is not None and not (_is_size(window) and window <= _LONGEST_WINDOW):
            yield (
                f"sliding_window is {short_repr(window)}; expected an integer from 1 to "
                f"{_LONGEST_WINDOW}, or None"
            )
    given = None if hasattr(config, "layer_types") else config.extra.get("layer_types")
    made = [full if window is None else sliding for window in config.sliding_windows]
    if given is not None and given != made:
        yield (
            f"layer_types is {short_repr(given)}, but the layers of this {config.model_type!r} are "
            f"{short_repr(made)}; correct layer_types or remove it"
        )
