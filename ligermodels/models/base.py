"""What all families share: the forward pass, loading, saving, and the report on kernels."""

import copy
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self, Unpack

from ligermodels.kernels.autocast import autocast_dtype
from ligermodels.layers import (
    AttentionContext,
    HeadOutput,
    LayerNorm,
    LossHead,
    RMSNorm,
    RotaryEmbedding,
)
from ligermodels.layers.attention import Attention, Cache
from ligermodels.layers.attention_backend import prepare
from ligermodels.layers.attention_mask import (
    AttentionMask,
    check_cu_seqlens,
    document_ids,
    positions_from_cu_seqlens,
)
from ligermodels.layers.loss_head import HeadOptions
from ligermodels.models import hf_io as checkpoints
from ligermodels.models.config import ModelConfig
from ligermodels.models.kernel_report import kernels_of


class DecoderModel(nn.Module):
    """A decoder that emits hidden states; families set up the parts declared here.

    Attributes:
        config: the family's config.
        built_from: the config as it was when the modules were made from it.
        source_folder: the local checkpoint folder that the weights came from, or None.
        source_dtype: the dtype they were loaded in, or None.
    """

    config_class: ClassVar[type[ModelConfig]]
    embed_tokens: nn.Embedding
    rotary_emb: RotaryEmbedding
    layers: nn.ModuleList
    norm: RMSNorm
    head: LossHead

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.built_from = copy.deepcopy(config)
        self.source_folder: Path | None = None
        self.source_dtype: torch.dtype | None = None
        self.activation_checkpointing = False

    # --- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **loss_options: Unpack[HeadOptions],
    ) -> Tensor | HeadOutput:
        """Hidden states after the final norm, or with labels the head's output. Never logits.

        Args:
            input_ids: (batch, seq) int64.
            labels: (batch, seq) int64, same positions as input_ids: the shift by one happens
                here. -100 is ignored, and so is what lies across a document's boundary.
            position_ids: (batch or 1, seq). Several documents in a row are told by positions
                that restart; attention stays inside each. Default 0, 1, 2, ...
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
        contexts, documents = self._contexts(
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
        ignore_index = loss_options.get(
            "ignore_index", self.head.loss_options.get("ignore_index", -100)
        )
        targets = next_token_targets(labels, documents, ignore_index)
        return self.head(hidden, targets, **loss_options)

    def loss(self, input_ids: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """`model(input_ids, labels=labels, **options).loss`. Behind a wrapper, call the wrapper."""
        return self(input_ids, labels=labels, **options).loss

    def _hidden(self, input_ids: Tensor, contexts: dict[str, AttentionContext]) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer, rope in zip(self.layers, self.ropes):
            context = contexts[rope]
            if self.activation_checkpointing and torch.is_grad_enabled():
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
        cache: Cache | None,
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

        documents = None
        if position_ids is not None and cache is None:
            documents = document_ids(position_ids)
        mask = AttentionMask(
            seq,
            past + seq,
            documents=documents,
            tokens=attention_mask,
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
        return contexts, documents

    def _prepare(self, mask: AttentionMask, batch: int, device: torch.device) -> None:
        weight = self.embed_tokens.weight
        dtype = autocast_dtype(weight) or weight.dtype
        for module in self.modules():
            if isinstance(module, Attention):
                prepare(
                    mask,
                    module.window,
                    module.softcap,
                    batch,
                    module.num_heads,
                    device,
                    dtype,
                    module.head_dim,
                )

    # --- weights ---------------------------------------------------------------------------------

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

    @classmethod
    def from_hf(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        allow_nonfinite: bool = False,
    ) -> Self:
        """Load an HF checkpoint.

        Args:
            path: a local folder, or a hub id such as "meta-llama/Llama-3.2-1B".
            dtype: of the parameters; default what the checkpoint is stored in.
            device: where the parameters go, tensor by tensor.
            revision: branch, tag or commit of a hub id.
            allow_nonfinite: let NaN and infinite weights in.
        Raises:
            ConfigError: config.json is damaged, of another family, or asks for what is not
                implemented.
            CheckpointError: weights missing, unexpected, mis-shaped, damaged or quantised, a
                repository absent or closed; names and shapes are checked before anything large
                is allocated.
        """
        return checkpoints.load(cls, path, dtype, torch.device(device), revision, allow_nonfinite)

    def save_hf(self, folder: str | os.PathLike[str], *, max_shard_size: int = 5 * 10**9) -> None:
        """Write an HF checkpoint that transformers, vLLM and llama.cpp read.

        The folder is replaced in one step: a save that is killed leaves the old one. Tokenizer
        and generation files come along from the checkpoint that was loaded; other files in the
        folder stay.

        Args: max_shard_size in bytes.
        Raises:
            SaveError: the disk is full or closed to us, or a projection is still wrapped.
        """
        checkpoints.save(self, folder, max_shard_size)

    # --- use -------------------------------------------------------------------------------------

    def generate(self, input_ids: Tensor | list[Any], **options: Any) -> Tensor:
        """Continue prompts, greedily unless asked; see `ligermodels.generation.generate`."""
        from ligermodels.generation.generate import generate

        return generate(self, input_ids, **options)

    def activation_checkpointing_enable(self) -> None:
        """Keep one tensor per block and compute the rest again in backward."""
        self.activation_checkpointing = True

    def activation_checkpointing_disable(self) -> None:
        """Keep what `DecoderBlock` lists for backward."""
        self.activation_checkpointing = False

    def kernels(self) -> dict[str, str]:
        """Which implementation each op takes on this model as it is now, and why.

        Returns: op -> "implementation (reason)"; swapped projections are listed by name.
        """
        return kernels_of(self)


def next_token_targets(
    labels: Tensor, documents: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Targets aligned with hidden states: each position's next label, none across a boundary.

    Args: labels (batch, seq); documents (batch or 1, seq), each token's document number.
    Returns: (batch, seq), the last of each row and of each document ignore_index.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    if documents is None:
        return targets
    ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
    return targets.masked_fill(ends, ignore_index)


def _check_ids(input_ids: Tensor) -> tuple[int, int]:
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids {tuple(input_ids.shape)}: expected (batch, seq)")
    batch, seq = input_ids.shape
    if batch == 0 or seq == 0:
        raise ValueError(f"input_ids {(batch, seq)}: nothing to compute on")
    return batch, seq
