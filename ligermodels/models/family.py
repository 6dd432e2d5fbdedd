"""The base class of the families of this package."""

from typing import Any, ClassVar

from ligermodels.layers import RotaryEmbedding
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig


class FamilyModel(DecoderModel):
    """A decoder under HF's names, whose modules `build` makes. A family defines `make_block`.

    If the config has a `rope_local_base_freq`, it is theta of the layers with a window, whose rope
    is not scaled. A `final_logit_softcapping` is the cap of the logits.

    Args: options: those of `build`.
    """

    hf_names: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config)
        softcap = getattr(config, "final_logit_softcapping", None)
        self.build(norm=self.norm_of(), logit_softcap=softcap, **options)
        if (losses := getattr(config, "router_losses", None)) is not None:
            self.router_losses = losses
        if (theta := getattr(config, "rope_local_base_freq", None)) is not None:
            longest = config.max_position_embeddings
            self.rotary_emb_local = RotaryEmbedding(config.head_dim, theta, longest)

    @property
    def ropes(self) -> list[str]:
        """For each layer, the attribute of its rope."""
        if getattr(self.built_from, "rope_local_base_freq", None) is None:
            return ["rotary_emb"] * len(self.layers)
        windows = self.built_from.sliding_windows
        return ["rotary_emb" if window is None else "rotary_emb_local" for window in windows]
