"""What the families of this package have in common: they are made of these parts."""

from typing import Any, ClassVar

from ligermodels.layers import Attention, GatedMLP, RMSNorm, RotaryEmbedding
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig


class FamilyModel(DecoderModel):
    """A decoder under HF's names, whose modules `build` makes. A family defines `make_block`.

    If the config has a `rope_local_base_freq`, it is theta of the layers with a window, whose rope
    is not scaled.

    Args: options: those of `build`.
    """

    hf_names: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config)
        self.build(norm=self.norm_of(), **options)
        self.router_losses = config.router_losses
        if (theta := getattr(config, "rope_local_base_freq", None)) is not None:
            longest = config.max_position_embeddings
            self.rotary_emb_local = RotaryEmbedding(config.head_dim, theta, longest)

    @property
    def ropes(self) -> list[str]:
        """For each layer, the attribute of its rope."""
        if not hasattr(self, "rotary_emb_local"):
            return super().ropes
        windows = self.built_from.sliding_windows
        return ["rotary_emb" if window is None else "rotary_emb_local" for window in windows]

    def norm_of(self, size: int | None = None, **options: Any) -> RMSNorm:
        """Return a norm over `size` features, by default the hidden size.

        Args: options: the other arguments of `RMSNorm`.
        """
        return RMSNorm(size or self.config.hidden_size, self.config.rms_norm_eps, **options)

    def attention_of(self, layer_index: int, **options: Any) -> Attention:
        """Return the attention of a layer, with the heads and the window that the config says.

        Args: options: the other arguments of `Attention`.
        """
        config = self.config
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        options |= {"sliding_window": config.sliding_windows[layer_index]}
        return Attention(config.hidden_size, *heads, layer_index=layer_index, **options)

    def mlp_of(self, inner: int | None = None, bias: bool = False) -> GatedMLP:
        """Return an MLP whose gate and up have the width `inner`, by default intermediate_size."""
        config = self.config
        inner = inner or config.intermediate_size
        return GatedMLP(config.hidden_size, inner, bias=bias, activation=config.activation)
