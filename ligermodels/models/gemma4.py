"""Gemma 4's text model: Gemma 3's blocks with wide heads in full layers, and options of each size.

Its values are normalised, and in full layers they may be the keys before their norm and rope. The
largest models have experts beside the MLP. The smallest ones have embeddings for each layer, and
their last layers take the keys and values of earlier ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.converters.files import is_int
from ligermodels.converters.weight_map import Towers, WeightMap
from ligermodels.errors import ConfigError, short_repr
from ligermodels.layers import (
    Attention,
    AttentionContext,
    Experts,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    Router,
    ScaledEmbedding,
    UnitRMSNorm,
)
from ligermodels.layers.fusion import pre_norm
from ligermodels.models.auto import register
from ligermodels.models.base import DecoderContext
from ligermodels.models.config import sizes
from ligermodels.models.family import FamilyModel
from ligermodels.models.gemma import GemmaFields
from ligermodels.models.module_map import FUSED

_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


@dataclass(kw_only=True)
class Gemma4Config(GemmaFields):
    """Fields of a Gemma 4 text `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma4_text"
    wrapper_type: ClassVar[str | None] = "gemma4"
    keeps_wrapper: ClassVar[bool] = True
    activation_field: ClassVar[str] = "hidden_activation"
    old_rope_spelling: ClassVar[bool] = False
    absent_if_none: ClassVar[tuple[str, ...]] = ("per_layer_config",)
    default_rope: ClassVar[dict[str, Any]] = _ROPE
    # "vision" lets the tokens of an image see each other; there are none in a text.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"use_bidirectional_attention": ("vision",)}
    largest = GemmaFields.largest | {"global_head_dim": 2**16}
    positive = (*GemmaFields.positive, "rope_local_base_freq", "final_logit_softcapping")
    small_fields: ClassVar[dict[str, Any]] = {
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 131,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int = 4  # of the sliding layers, as head_dim
    head_dim: int = 256
    global_head_dim: int = 512  # of the full layers
    num_global_key_value_heads: int | None = None  # with attention_k_eq_v; None: the same number
    per_layer_config: dict[str, Any] | None = None  # these two of layers by index, instead
    max_position_embeddings: int = 131072
    rope_theta: float = 1e6  # theta of the full layers; rope_scaling is also theirs
    rope_scaling: dict[str, Any] | None = field(default_factory=lambda: dict(_ROPE))
    rope_local_base_freq: float = 1e4  # theta of the sliding layers
    hidden_activation: str = "gelu_pytorch_tanh"
    sliding_window: int | None = 512
    layer_types: list[str] | None = None  # None: every sixth layer is full; the last always is
    final_logit_softcapping: float | None = None
    hidden_size_per_layer_input: int = 256  # 0: no embeddings for each layer
    vocab_size_per_layer_input: int = 262144
    attention_k_eq_v: bool = False  # whether the values of full layers are their keys
    num_kv_shared_layers: int = 0  # so many last layers take keys and values of earlier ones
    use_double_wide_mlp: bool = False  # whether these have MLPs of twice the width
    enable_moe_block: bool = False  # whether each layer has experts beside its MLP
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    def validate(self) -> None:
        """Check every field, as in `ModelConfig`, and the options of the sizes."""
        super().validate()
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if not (0 <= first <= len(self.types) and {*self.types} <= {*self.types[:first]}):
            raise ConfigError(
                f"config: num_kv_shared_layers is {self.num_kv_shared_layers}, but the first "
                f"{first} layers must have each of the types {sorted(set(self.types))}"
            )
        known = {"head_dim", "num_key_value_heads"}
        for index, own in (self.per_layer_config or {}).items():
            sizes = own if isinstance(own, dict) else {"": own}
            if sizes.keys() - known or not all(map(is_int, sizes.values())):
                raise ConfigError(
                    f"config: per_layer_config has {short_repr(own)} for layer {index}; expected "
                    f"integers for {sorted(known)} alone"
                )
        for layer in range(self.num_hidden_layers):
            head_dim, kv_heads = self.kv_sizes(layer)
            if min(head_dim, kv_heads) < 1 or head_dim % 2 or self.num_attention_heads % kv_heads:
                raise ConfigError(
                    f"config: layer {layer} has {kv_heads} key heads of size {head_dim}; expected "
                    f"an even size, and a divisor of num_attention_heads "
                    f"{self.num_attention_heads}"
                )
        count, chosen, inner = self.num_experts, self.top_k_experts, self.moe_intermediate_size
        if self.enable_moe_block and not (count and chosen and inner and chosen <= count):
            raise ConfigError(
                f"config: enable_moe_block with num_experts {count}, top_k_experts {chosen} and "
                f"moe_intermediate_size {inner}; expected sizes, the second at most the first"
            )

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window: all but each sixth one."""
        return (layer_index + 1) % 6 != 0

    @property
    def types(self) -> list[str]:
        """The type of each layer. The last one is full, as in transformers."""
        return [*self.listed_types()[: self.num_hidden_layers - 1], "full_attention"]

    def kv_sizes(self, index: int) -> tuple[int, int]:
        """Return the size of the heads and the number of key heads of a layer."""
        sizes = {"head_dim": self.head_dim, "num_key_value_heads": self.num_key_value_heads}
        if self.per_layer_config is not None:
            sizes |= self.per_layer_config.get(str(index), {})
        elif self.types[index] == "full_attention":
            sizes["head_dim"] = self.global_head_dim
            if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
                sizes["num_key_value_heads"] = self.num_global_key_value_heads
        return sizes["head_dim"], sizes["num_key_value_heads"]

    def kv_source(self, index: int) -> int | None:
        """Return the layer whose keys and values a layer takes, or None if it has its own."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if index < first:
            return None
        return max(i for i in range(first) if self.types[i] == self.types[index])

    def mlp_width(self, index: int) -> int:
        """Return the width of a layer's MLP."""
        doubled = self.use_double_wide_mlp and self.kv_source(index) is not None
        return self.intermediate_size * (2 if doubled else 1)

    def has_values(self, index: int) -> bool:
        """Return whether a layer with keys also has a projection of values."""
        return not (self.attention_k_eq_v and self.types[index] == "full_attention")

    @property
    def cache_widths(self) -> list[int]:
        """The size of the keys of a token in each layer's cache."""
        layers = range(self.num_hidden_layers)
        sizes = [head_dim * heads for head_dim, heads in map(self.kv_sizes, layers)]
        return [0 if self.kv_source(i) is not None else sizes[i] for i in layers]


_GEMMA4 = {"final_logit_softcapping": 30.0}
_LARGE = _GEMMA4 | {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
}

Gemma4Config.presets = {
    "gemma-4-e2b": _GEMMA4
    | sizes(1536, 6144, 35, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True)
    | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
    "gemma-4-e4b": _GEMMA4 | sizes(2560, 10240, 42, 8, 2, num_kv_shared_layers=18),
    "gemma-4-26b-a4b": _LARGE
    | sizes(2816, 2112, 30, 16, 8, num_global_key_value_heads=2, enable_moe_block=True)
    | {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "gemma-4-31b": _LARGE | sizes(5376, 21504, 60, 32, 16, num_global_key_value_heads=4),
}


class Gemma4Router(Router):
    """A router that normalises its input, and scales the weights of each expert."""

    def __init__(self, config: Gemma4Config) -> None:
        assert config.num_experts and config.top_k_experts
        super().__init__(
            config.hidden_size, config.num_experts, config.top_k_experts, normalize=True
        )
        self.eps = config.rms_norm_eps
        self.input_scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, x: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, experts and logits, as `Router` does."""
        scale = self.input_scale * x.shape[-1] ** -0.5
        x = kernels.rms_norm(x, scale, self.eps, casting_mode="gemma")
        weights, experts, logits = super().forward(x, experts)
        # Backward of an index would add the tokens of an expert one after the other.
        factors = self.per_expert_scale.expand_as(logits).gather(-1, experts.long())
        return weights * factors, experts, logits


class Gemma4Block(nn.Module):
    """h = x + norm(attention(norm(x))), then h + norm(mlp(norm(h))), and what the config adds.

    With experts, the last norm is that of norm(mlp(norm(h))) + norm(experts(norm(h))). With
    embeddings for each layer, norm(projection(act(gate(h)) * embedding)) is added after that. The
    output is multiplied by `layer_scalar`, which is not trained.
    """

    def __init__(self, config: Gemma4Config, index: int, norm_of: Callable[..., RMSNorm]) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.hidden_size_per_layer_input
        (head_dim, kv_heads), source = config.kv_sizes(index), config.kv_source(index)
        layers = range(config.num_hidden_layers)
        self.self_attn = Attention(
            hidden,
            config.num_attention_heads,
            kv_heads,
            head_dim,
            bias=config.attention_bias,
            scale=1.0,
            sliding_window=config.sliding_windows[index],
            q_norm=norm_of(head_dim),
            k_norm=norm_of(head_dim) if source is None else None,
            v_norm=UnitRMSNorm(config.rms_norm_eps) if source is None else None,
            values_are_keys=source is None and not config.has_values(index),
            layer_index=index,
            shares_kv=index in map(config.kv_source, layers),
            kv_from=source,
        )
        self.mlp = GatedMLP(hidden, config.mlp_width(index), activation=config.activation)
        self.input_layernorm = norm_of()
        self.post_attention_layernorm = norm_of()
        self.pre_feedforward_layernorm = norm_of()
        self.post_feedforward_layernorm = norm_of()
        self.experts = None
        if config.enable_moe_block:
            self.post_feedforward_layernorm_1 = norm_of()
            self.pre_feedforward_layernorm_2 = norm_of()
            self.post_feedforward_layernorm_2 = norm_of()
            assert config.moe_intermediate_size
            inner = config.moe_intermediate_size
            self.experts = Experts(Gemma4Router(config), hidden, inner, config.activation)
        self.activation = config.activation
        self.has_input = bool(size)
        if size:
            self.per_layer_input_gate = nn.Linear(hidden, size, bias=False)
            self.per_layer_projection = nn.Linear(size, hidden, bias=False)
            self.post_per_layer_input_norm = norm_of()
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Any, ...]:
        """Return (output, None), and routes of experts; `DecoderBlock` has the arguments."""
        x, residual = self.self_attn(pre_norm(self.input_layernorm, x, residual), context)
        x = self.post_attention_layernorm(x)
        out, x = self.mlp(pre_norm(self.pre_feedforward_layernorm, x, residual))
        routes: tuple[Any, ...] = ()
        if self.experts is not None:
            normed = self.pre_feedforward_layernorm_2(x)
            sparse, *routes = self.experts(normed, context.experts, routed_by=x)
            out = self.post_feedforward_layernorm_1(out)
            out = out + self.post_feedforward_layernorm_2(sparse)
        x = x + self.post_feedforward_layernorm(out)
        if self.has_input:
            assert context.layer_input is not None
            packed = torch.cat([self.per_layer_input_gate(x), context.layer_input], -1)
            out = self.per_layer_projection(kernels.glu(packed, self.activation))
            x = x + self.post_per_layer_input_norm(out)
        return x * self.layer_scalar.to(x.dtype), None, *routes


@register
class LigerGemma4(FamilyModel):
    """The text model of Gemma 4, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output. A model with
    embeddings for each layer takes input_ids, and no inputs_embeds.
    """

    config_class = Gemma4Config
    config: Gemma4Config
    built_from: Gemma4Config
    cast_without_gradient = ("layer_scalar",)
    norm_options: ClassVar[dict[str, Any]] = {"casting_mode": "gemma"}  # one rounding, at the end
    hf_names: ClassVar[dict[str, str]] = {
        "experts": "",
        "experts.router": "router",
        "experts.router.weight": "router.proj.weight",
        "experts.router.input_scale": "router.scale",
    }
    expert_layouts: ClassVar[dict[str, dict[str, str]]] = {FUSED: {}}
    towers = Towers(
        (("model.language_model.", "model."),),
        kept=(
            *("model.vision_tower.", "model.embed_vision."),
            *("model.audio_tower.", "model.embed_audio."),
        ),
    )

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config, embedding_scale=config.hidden_size**0.5)
        longest = config.max_position_embeddings
        sizes = {kind: config.kv_sizes(index)[0] for index, kind in enumerate(config.types)}
        full, sliding = sizes["full_attention"], sizes.get("sliding_attention", config.head_dim)
        self.rotary_emb = RotaryEmbedding(full, config.rope_theta, longest, config.rope_scaling)
        self.rotary_emb_local = RotaryEmbedding(sliding, config.rope_local_base_freq, longest)

    def build(self, **options: Any) -> None:
        """Make the modules as `DecoderModel` does, and those of the embeddings for each layer."""
        config, hidden = self.config, self.config.hidden_size
        if size := config.hidden_size_per_layer_input:
            rows = config.num_hidden_layers * size
            self.embed_tokens_per_layer = ScaledEmbedding(
                config.vocab_size_per_layer_input,
                rows,
                padding_idx=config.pad_token_id,
                scale=size**0.5,
            )
            self.per_layer_model_projection = nn.Linear(hidden, rows, bias=False)
            # HF divides the projection by the root of hidden_size before; the norm undoes that.
            eps = config.rms_norm_eps * hidden
            self.per_layer_projection_norm = RMSNorm(size, eps, **self.norm_options)
        super().build(**options)

    @classmethod
    def weight_map(cls, config: Gemma4Config) -> WeightMap:
        """Return the map of `hf_names`; a checkpoint may hold projections that no layer uses."""
        made = super().weight_map(config)
        unused = (
            f"model.layers.{index}.self_attn.{each}.weight"
            for index in range(config.num_hidden_layers)
            if config.kv_source(index) is not None
            for each in ("k_proj", "v_proj", "k_norm")
        )
        return replace(made, ignored=(*made.ignored, *unused))

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: see `Gemma4Block`."""
        return Gemma4Block(self.config, layer_index, self.norm_of)

    def prepare_context(self, inputs: Tensor, **options: Any) -> DecoderContext:
        """Return what the layers share; with the tokens' embeddings for each layer, if any."""
        context = super().prepare_context(inputs, **options)
        size = self.built_from.hidden_size_per_layer_input
        if not size or inputs.dim() != 2:
            return context
        ids = inputs if self.row_shard is None else self.row_shard.split(inputs)
        rows = self.embed_tokens_per_layer(ids)
        return context._replace(layer_embeddings=rows.unflatten(-1, (-1, size)))

    def run_layers(self, x: Tensor, context: DecoderContext) -> tuple[Tensor, list[Any]]:
        """Run the layers as `DecoderModel` does; each gets its own embedding of the tokens.

        That is (norm(projection of x) + embedding) / sqrt(2).

        Raises:
            ValueError: the context was made from embeddings, and the layers need ids.
        """
        if size := self.built_from.hidden_size_per_layer_input:
            if context.layer_embeddings is None:
                raise ValueError(
                    "inputs_embeds: the layers have embeddings of their own, which need the "
                    "tokens; pass input_ids"
                )
            projected = self.per_layer_model_projection(x).unflatten(-1, (-1, size))
            projected = self.per_layer_projection_norm(projected)
            inputs = (projected + context.layer_embeddings) * 2**-0.5
            pairs = zip(context.layers, inputs.unbind(2), strict=True)
            context = context._replace(
                layers=[each.changed(layer_input=own) for each, own in pairs]
            )
        return super().run_layers(x, context)
