"""What all families share: the parts made from a config, and the forward pass over them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from ligermodels.kernels.autocast import autocast_dtype
from ligermodels.kernels.checks import check_count
from ligermodels.layers import (
    AttentionContext,
    HeadOutput,
    LayerNorm,
    LossHead,
    RMSNorm,
    RotaryEmbedding,
    ScaledEmbedding,
)
from ligermodels.layers.attention import Attention
from ligermodels.layers.attention_backend import prepare
from ligermodels.layers.attention_mask import (
    AttentionMask,
    check_cu_seqlens,
    document_ids_from_positions,
    positions_from_cu_seqlens,
)
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.loss_head import HeadOptions
from ligermodels.models.config import ModelConfig
from ligermodels.models.hf_io import HFModel
from ligermodels.models.kernel_report import kernels_of


class DecoderModel(HFModel):
    """A decoder that emits hidden states; a family declares its parts by calling `build`.

    An architecture whose parts are others may set the attributes declared here by itself.
    """

    embed_tokens: nn.Embedding
    rotary_emb: RotaryEmbedding
    layers: nn.ModuleList
    norm: RMSNorm | LayerNorm
    head: LossHead

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._checkpoint_every = 0  # every so many blocks; 0 for none

    def build(
        self,
        *,
        block: Callable[[Any, int], nn.Module],
        norm: RMSNorm | LayerNorm,
        embedding_scale: float | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        """Make embedding, rope, blocks, final norm and head from the config; draw the weights.

        Args:
            block: makes a layer from the config and the layer's index. A layer is called as
                `layer(x, residual, context)` and returns (x, residual), whose sum is its output.
            norm: the final norm.
            embedding_scale: factor on the embeddings; None for 1.
            logit_scale: factor on the logits, before the cap.
            logit_softcap: logits become cap * tanh(logits / cap); None for no cap.
        """
        config = self.config
        hidden, vocab, padding = config.hidden_size, config.vocab_size, config.pad_token_id
        if embedding_scale is None:
            self.embed_tokens = nn.Embedding(vocab, hidden, padding_idx=padding)
        else:
            self.embed_tokens = ScaledEmbedding(
                vocab, hidden, padding_idx=padding, scale=embedding_scale
            )
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_scaling
        )
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(
            hidden, vocab, tied_to=tied_to, logit_scale=logit_scale, softcap=logit_softcap
        )
        self.initialize_weights()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        **loss_options: Unpack[HeadOptions],
    ) -> Tensor | HeadOutput:
        """Hidden states after the final norm, or with labels the head's output. Never logits.

        Args:
            input_ids: (batch, seq) int64.
            labels: (batch, seq) int64, same positions as input_ids: the shift by one happens
                here. -100 is ignored, and so is what lies across a document's boundary.
            position_ids: (batch or 1, seq). Positions that restart divide a row into documents;
                attention stays inside each. Default 0, 1, 2, ...
            cu_seqlens: (documents + 1) int, starts of the documents in a single row and its
                length; instead of position_ids.
            max_seqlen: longest document of cu_seqlens; lets a GPU use the varlen kernel.
            attention_mask: (batch, seq), 0 for padding on either side, as in HF. Without
                position_ids, positions count the padding, as in HF. With a cache it covers the
                cached tokens too.
            cache: a `ligermodels.KVCache`, for inference.
            loss_options: as in `LossHead.forward` (normalizer, or by its other name
                num_items_in_batch, reduction, label_smoothing, ...).
        Returns: (batch, seq, hidden), or a `HeadOutput`.
        Raises:
            ValueError: inputs that contradict each other or cannot be honoured.
        """
        batch, seq = _check_ids(input_ids)
        if labels is None and loss_options:
            raise ValueError(f"{', '.join(loss_options)}: loss options need labels")
        contexts, document_ids = self._contexts(
            input_ids, position_ids, cu_seqlens, max_seqlen, attention_mask, cache
        )
        hidden = self._hidden(input_ids, contexts)
        if cache is not None:
            cache.advance(seq)
        if labels is None:
            return hidden
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels {tuple(labels.shape)} and input_ids {(batch, seq)} differ in shape"
            )
        ignore_index = (self.head.loss_options | loss_options).get("ignore_index", -100)
        targets = next_token_targets(labels, document_ids, ignore_index)
        return self.head(hidden, targets, **loss_options)

    def loss(self, input_ids: Tensor, labels: Tensor, **options: Unpack[HeadOptions]) -> Tensor:
        """`model(input_ids, labels=labels, **options).loss`. Behind a wrapper, call the wrapper."""
        return self(input_ids, labels=labels, **options).loss

    def _hidden(self, input_ids: Tensor, contexts: dict[str, AttentionContext]) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        every = self._checkpoint_every if torch.is_grad_enabled() else 0
        for index, (layer, rope) in enumerate(zip(self.layers, self.ropes)):
            context = contexts[rope]
            if every and index % every == 0:
                # One tensor is kept at the boundary, not the pair.
                x, residual = x if residual is None else x + residual, None
                x, residual = checkpoint(layer, x, residual, context, use_reentrant=False)
            else:
                x, residual = layer(x, residual, context)
        return self.norm(x) if residual is None else self.norm(x, residual)[0]

    @property
    def ropes(self) -> list[str]:
        """Attribute that holds each layer's rotary embedding."""
        return ["rotary_emb"] * len(self.layers)

    def _contexts(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        attention_mask: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[dict[str, AttentionContext], Tensor | None]:
        """Angles of this pass for each rope, one mask for all, and each token's document where
        rows are packed."""
        batch, seq = input_ids.shape
        past = 0 if cache is None else cache.length
        if cu_seqlens is not None:
            if position_ids is not None or cache is not None:
                raise ValueError(
                    "cu_seqlens takes the place of position_ids, and does not go with a cache"
                )
            if batch != 1:
                raise ValueError(
                    f"cu_seqlens describes one packed row: batch must be 1; got batch {batch}"
                )
            check_cu_seqlens(cu_seqlens, seq, max_seqlen)
            position_ids = positions_from_cu_seqlens(cu_seqlens, batch, seq)
        elif max_seqlen is not None:
            raise ValueError("max_seqlen belongs to cu_seqlens, which is missing")
        if attention_mask is not None and attention_mask.shape != (batch, past + seq):
            raise ValueError(
                f"attention_mask {tuple(attention_mask.shape)}: expected {(batch, past + seq)}"
            )
        if position_ids is not None and (
            position_ids.shape not in ((batch, seq), (1, seq)) or position_ids.is_floating_point()
        ):
            raise ValueError(
                f"position_ids {tuple(position_ids.shape)} of {position_ids.dtype}: expected "
                f"{(batch, seq)} or {(1, seq)} integers"
            )

        document_ids = None
        if position_ids is not None and cache is None:
            document_ids = document_ids_from_positions(position_ids)
        mask = AttentionMask(
            seq,
            past + seq,
            document_ids=document_ids,
            padding_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        if cache is None:
            self._prepare(mask, batch, input_ids.device)

        length: int | None = None
        if position_ids is None:
            position_ids = torch.arange(past, past + seq, device=input_ids.device).unsqueeze(0)
            length = past + seq
        contexts = {}
        for name in sorted(set(self.ropes)):
            cos, sin = getattr(self, name)(position_ids, length)
            contexts[name] = AttentionContext(cos, sin, mask, cache)
        return contexts, document_ids

    def _prepare(self, mask: AttentionMask, batch: int, device: torch.device) -> None:
        weight = self.embed_tokens.weight
        dtype = autocast_dtype(weight) or weight.dtype
        for module in self.modules():
            if isinstance(module, Attention):
                prepare(
                    mask,
                    module.sliding_window,
                    module.softcap,
                    batch,
                    module.num_heads,
                    device,
                    dtype,
                    module.head_dim,
                )

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw weights anew: normal with config.initializer_range, biases 0, norms 1, padding 0."""
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
            elif isinstance(module, (RMSNorm, LayerNorm)):
                module.reset_parameters()

    def generate(self, input_ids: Tensor | list[Any], **options: Any) -> Tensor:
        """Continue prompts, greedily unless asked; see `ligermodels.generation.generate`."""
        from ligermodels.generation.generate import generate

        return generate(self, input_ids, **options)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keep one tensor per block for backward, and compute the rest of the block again there.

        Args: as in transformers.
            activation_checkpointing_kwargs: None or {"use_reentrant": False}.
            every_n_layers: which blocks are computed again: those whose index it divides.
            offload: keeping that tensor in host memory is not implemented; only False is accepted.
        Raises:
            ValueError: an argument asks for what is not implemented.
        """
        options = activation_checkpointing_kwargs or {}
        if not isinstance(options, dict):
            raise ValueError(f"activation checkpointing: {options!r}; expected a dict or None")
        if unknown := options.keys() - {"use_reentrant"}:
            raise ValueError(
                f"activation checkpointing: {', '.join(sorted(unknown))}: not implemented; the one "
                "option that may be given is use_reentrant=False"
            )
        if options.get("use_reentrant"):
            raise ValueError(
                "activation checkpointing: use_reentrant=True is not implemented; leave it out or "
                "set it to False, which computes the same gradients"
            )
        if offload:
            raise ValueError("activation checkpointing: offload=True is not implemented; set False")
        self._checkpoint_every = check_count(
            "activation checkpointing", "every_n_layers", every_n_layers, 1
        )

    def activation_checkpointing_disable(self) -> None:
        """Keep the activations of every block for backward."""
        self._checkpoint_every = 0

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether some blocks are computed again in backward."""
        return self._checkpoint_every > 0

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """`activation_checkpointing_enable` under its older name in transformers."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, every_n_layers, offload)

    # The older names in transformers of the other two.
    gradient_checkpointing_disable = activation_checkpointing_disable
    is_gradient_checkpointing = is_activation_checkpointing

    def kernels(self) -> dict[str, str]:
        """Which implementation each op takes on this model as it is now, and why.

        Returns: op -> "implementation (reason)"; swapped projections are listed by name.
        """
        return kernels_of(self, self.embed_tokens.weight, self.head)


def next_token_targets(
    labels: Tensor, document_ids: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Targets aligned with hidden states: each position's next label, none across a boundary.

    Args: labels (batch, seq); document_ids (batch or 1, seq), as in `AttentionMask`.
    Returns: (batch, seq), the last of each row and of each document ignore_index.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    if document_ids is None:
        return targets
    ends = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1), value=True)
    return targets.masked_fill(ends, ignore_index)


def _check_ids(input_ids: Tensor) -> tuple[int, int]:
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids {tuple(input_ids.shape)}: expected (batch, seq)")
    batch, seq = input_ids.shape
    if batch == 0 or seq == 0:
        raise ValueError(f"input_ids {(batch, seq)}: nothing to compute on")
    return batch, seq
