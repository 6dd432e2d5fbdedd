"""The head: hidden states in, a loss out, logits only where they are asked for by name."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from ligermodels import kernels
from ligermodels.kernels.cross_entropy import (
    CrossEntropyOutput,
    reduce_tokens,
    token_cross_entropy,
)
from ligermodels.kernels.dtypes import compute_dtype
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.valid_rows import (
    gather,
    gather_targets,
    scatter,
    valid_rows,
)
from ligermodels.kernels.loss_options import (
    LOG_PROB_OPTIONS,
    LOSS_OPTIONS,
    LogProbOptions,
    LossOptions,
    check_classes,
    loss_divisor,
    split_options,
)
from ligermodels.layers.fusion import is_plain, is_sharded


class HeadOptions(LossOptions, total=False):
    """What `LossHead.forward` takes by keyword, and with labels the forward of a model."""

    return_token_loss: bool
    num_items_in_batch: float | Tensor | None


class HeadOutput(NamedTuple):
    """What the head returns; tensors on hidden's device.

    A tuple with the loss first: DeepSpeed, FSDP2 and HF's Trainer look for tensors in one.
    """

    loss: Tensor  # scalar, or targets' shape with reduction "none"; z-loss included
    z_loss: Tensor  # the z-loss within it, not differentiable
    num_valid: Tensor  # exact count of the targets that are not ignored, int64 scalar
    # On request, in targets' shape; differentiable with reduction "none" alone.
    token_loss: Tensor | None = None
    token_log_probs: Tensor | None = None  # log-probability of the target, 0 where ignored
    token_entropy: Tensor | None = None  # of the softmax, in nats, 0 where ignored
    token_correct: Tensor | None = None  # bool: the target has the highest logit


class LossHead(nn.Module):
    """A linear head fused with cross entropy, chunk by chunk.

    Args:
        hidden_size, vocab_size: shape of the projection.
        bias: whether the projection has one.
        tied_to: an embedding whose weight serves as the projection; then the head has no
            parameter of its own. It is looked up at every call: tie again after replacing it.
        loss_options: defaults for what `ligermodels.kernels.linear_cross_entropy` takes by
            keyword (reduction, label_smoothing, z_loss, softcap, logit_scale, class_weights,
            ignore_index, chunk_size, max_scratch_bytes, skip_ignored, max_valid,
            return_token_stats); any call may override them. class_weights become a buffer that is
            not in the state_dict.

    A projection that is no plain `nn.Linear` (LoRA, float8, with hooks, sharded) is called chunk by
    chunk, and again in backward. max_scratch_bytes then holds the logits, what the loss makes of
    them, and, where several chunks are needed, three times the gradients of the projection's
    parameters, which autograd sums out of place. What the projection takes within a call is not
    known here, nor counted.

    Raises:
        TypeError: an unknown option.
        ValueError: an option that no call could take, a bias for a tied head, or an embedding of
            another shape than (vocab_size, hidden_size).
    """

    class_weights: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        tied_to: nn.Embedding | None = None,
        **loss_options: Unpack[LossOptions],
    ) -> None:
        super().__init__()
        _check_known("LossHead", loss_options, LOSS_OPTIONS)
        split_options(loss_options)  # checks them
        class_weights = loss_options.pop("class_weights", None)
        check_classes(vocab_size, class_weights)
        self.vocab_size = vocab_size
        # A buffer follows the head from device to device.
        self.register_buffer("class_weights", class_weights, False)
        self.loss_options = loss_options
        if tied_to is None:
            self.proj = nn.Linear(hidden_size, vocab_size, bias=bias)
            self._tied: tuple[nn.Embedding, ...] = ()
        else:
            if bias:
                raise ValueError("LossHead: a tied head has no bias")
            if tied_to.weight.shape != (vocab_size, hidden_size):
                raise ValueError(
                    f"LossHead: tied_to has a weight of {tuple(tied_to.weight.shape)}; expected "
                    f"({vocab_size}, {hidden_size})"
                )
            self.tie(tied_to)

    def tie(self, embedding: nn.Embedding) -> None:
        """Use the embedding's weight (vocab, hidden) as the projection."""
        # In a tuple, so that the embedding is not registered as a child of the head.
        self._tied = (embedding,)

    @property
    def weight(self) -> Tensor:
        """The projection's weight (vocab, hidden): its own, or that of the tied embedding."""
        return self._tied[0].weight if self._tied else self.proj.weight

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        return_token_loss: bool = False,
        num_items_in_batch: float | Tensor | None = None,
        **loss_options: Unpack[LossOptions],
    ) -> HeadOutput:
        """Loss of targets aligned with hidden: no shift here.

        Args:
            hidden: (..., hidden).
            targets: (...) int64.
            return_token_loss: whether to fill the output's token_loss. The option
                `return_token_stats` fills all of its token_*. Neither costs a second pass over the
                vocabulary.
            num_items_in_batch: another name of the option `normalizer`, which HF's Trainer uses.
            loss_options: as in the constructor, and `normalizer`, a number >= 0 (0 counts as 1) or
                0-d tensor that divides the summed loss. (FSDP2's mixed precision rounds float
                arguments: give it an integer tensor or a number there.)
        Raises: what `ligermodels.kernels.linear_cross_entropy` raises; TypeError for an unknown
            option; ValueError for both names of the normalizer; RuntimeError for a tied head under
            FSDP2 outside the model's forward.
        """
        _check_known("LossHead", loss_options, LOSS_OPTIONS)
        if num_items_in_batch is not None:
            if loss_options.get("normalizer") is not None:
                raise ValueError(
                    "LossHead: normalizer and num_items_in_batch are two names of one option; give "
                    "one of them"
                )
            loss_options["normalizer"] = num_items_in_batch
        options: LossOptions = {
            **self.loss_options,
            "class_weights": self.class_weights,
            **loss_options,
        }
        if self.is_linear:
            weight, bias = self._parameters_here(hidden)
            made = kernels.linear_cross_entropy(hidden, weight, targets, bias, **options)
        else:
            made = self._module_loss(hidden, targets, **options)
        num_valid = (targets != options.get("ignore_index", -100)).sum()
        loss, z_loss, token_loss, *stats = made
        if not return_token_loss and made.log_probs is None:
            return HeadOutput(loss, z_loss, num_valid)
        return HeadOutput(loss, z_loss, num_valid, token_loss, *stats)

    def log_probs(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        entropy: bool = False,
        **options: Unpack[LogProbOptions],
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of targets aligned with hidden, and the entropy: no shift here.

        What preference and policy losses stand on. Under FSDP2 call the wrapped model instead:
        `model(ids, labels=labels, reduction="none", return_token_stats=True)` gives the same,
        differentiable too, as token_log_probs and token_entropy.

        Args: hidden (..., hidden), targets (...) int64; entropy, whether to give it; options as
            in `ligermodels.kernels.linear_log_probs`, defaults from the constructor's.
        Returns: log-probabilities (...) and entropy (...) or None: float32, 0 where ignored, both
            differentiable.
        Raises: what `linear_log_probs` raises; TypeError for an unknown option; RuntimeError for
            a tied head under FSDP2 outside the model's forward.
        """
        _check_known("LossHead.log_probs", options, LOG_PROB_OPTIONS)
        defaults = {k: v for k, v in self.loss_options.items() if k in LOG_PROB_OPTIONS}
        options = {**defaults, **options}  # type: ignore[typeddict-item]
        if self.is_linear:
            weight, bias = self._parameters_here(hidden)
            return kernels.linear_log_probs(
                hidden, weight, targets, bias, entropy=entropy, **options
            )
        made = self._module_loss(
            hidden, targets, reduction="none", return_token_stats=True, **options
        )
        assert made.log_probs is not None
        return made.log_probs, made.entropy if entropy else None

    def logits(self, hidden: Tensor) -> Tensor:
        """softcap(logit_scale * projection of hidden): (..., hidden) -> (..., vocab).

        Works on a sharded model too, outside its forward: every rank must call it.
        """
        if self._tied or is_sharded(getattr(self.proj, "weight", None)):
            weight = _whole(self.weight).to(hidden.dtype)
            bias = None if self._tied or self.proj.bias is None else _whole(self.proj.bias)
            logits = F.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))
        else:
            logits = self.proj(hidden)
        logits = logits * self.loss_options.get("logit_scale", 1.0)
        softcap = self.loss_options.get("softcap")
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    @property
    def is_linear(self) -> bool:
        """Whether the projection does just what its weight says, so that the weight will do."""
        # Not bool(self._tied): torch 2.11's Dynamo does not trace that.
        return len(self._tied) == 1 or is_plain(self.proj, nn.Linear)

    def _parameters_here(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the projection, for the fused ops."""
        weight = self.weight
        if self._tied and weight.is_meta and not hidden.is_meta:
            raise RuntimeError(
                "the tied head's weight is offloaded: keep embed_tokens in memory, in accelerate's "
                "device_map on the device of the head"
            )
        if is_sharded(weight):
            raise RuntimeError(
                "the tied head's weight is sharded here: call the wrapped model with labels, "
                "model(input_ids, labels=labels), rather than model.head(...)"
            )
        return weight, None if self._tied else self.proj.bias

    def _module_loss(
        self, hidden: Tensor, targets: Tensor, **given: Unpack[LossOptions]
    ) -> CrossEntropyOutput:
        """`linear_cross_entropy` of a projection that was swapped: the module is called by chunks.

        The strategy is that of autograd: backward makes the logits of a chunk again, the
        projection's gradients are its own affair, and autograd accumulates them. The rows that
        count are gathered at once.
        """
        # Made out here: compiled, a checkpoint cannot take a number from the one before it.
        options, chunking = split_options(given)
        ignore_index, with_stats = options.ignore_index, given.get("return_token_stats", False)
        reduction, class_weights = given.get("reduction", "mean"), given.get("class_weights")
        if hidden.dim() == 0 or targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"loss head: targets {tuple(targets.shape)} do not fit hidden {tuple(hidden.shape)}"
            )
        row_targets = targets.flatten()
        index = valid_rows(row_targets, ignore_index, chunking)
        rows = gather(hidden.reshape(-1, hidden.shape[-1]), index)
        row_targets = gather_targets(row_targets, index, ignore_index)
        chunk_size = chunking.chunk_size
        if chunk_size is None:
            token_bytes = chunk_plan.TOKEN_BYTES * (1 + with_stats + chunking.skip_ignored)
            copied = chunking.skip_ignored or not hidden.is_contiguous()
            fixed_bytes = rows.numel() * rows.element_size() if copied else 0
            fixed_bytes += token_bytes * targets.numel()
            sizes = self._sizes(rows, fixed_bytes, with_stats, chunking.max_scratch_bytes)
            chunk_size = chunk_plan.plan_chunks(sizes, chunking.max_scratch_bytes).chunk_size

        def chunk_outputs(
            chunk: Tensor, chunk_targets: Tensor, class_weights: Tensor | None
        ) -> tuple[Tensor | None, ...]:
            logits = self.proj(chunk)
            made = token_cross_entropy(logits, chunk_targets, class_weights, options, with_stats)
            stats = (made.log_probs, made.entropy, made.correct) if with_stats else ()
            return made.token_loss, made.z_loss, *stats

        made = [
            # Every tensor an argument: one changed before backward is then noticed.
            checkpoint(
                chunk_outputs, rows[chunk], row_targets[chunk], class_weights, use_reentrant=False
            )
            for chunk in chunk_plan.chunks(len(rows), chunk_size)
        ]
        tokens = [scatter(torch.cat(x), index, targets, ignore_index) for x in zip(*made)]
        loss, z_loss, *stats = tokens
        out = CrossEntropyOutput(loss, z_loss.detach(), loss, *stats)
        if reduction == "none":
            return out
        divisor = loss_divisor(
            targets, reduction, given.get("normalizer"), class_weights, ignore_index, loss.dtype
        )
        return reduce_tokens(out, divisor)

    def _sizes(
        self, rows: Tensor, fixed_bytes: int, with_stats: bool, max_scratch_bytes: int | None
    ) -> chunk_plan.Sizes:
        """What the calls of a swapped projection with rows (rows, hidden) take memory for."""
        narrow = rows.element_size()
        wide = compute_dtype(rows).itemsize
        copies, row_copies = chunk_plan.wide_copies(rows, with_stats)
        sums = 0
        if torch.is_grad_enabled() and max_scratch_bytes is not None:
            # Autograd adds the parameters' gradients of a chunk to their sum, out of place.
            sums = sum(3 * _local(p).nbytes for p in self.proj.parameters() if p.requires_grad)
            if rows.requires_grad:  # and joins those of the chunks' rows
                fixed_bytes += rows.numel() * narrow
        return chunk_plan.Sizes(
            len(rows),
            self.vocab_size,
            # The projection's result, its gradient and float32 copies of either, or the loss's.
            logit_bytes=max(2 * narrow + 16, narrow + wide * copies),
            accumulator_bytes=sums,
            fixed_bytes=fixed_bytes + row_copies * wide * self.vocab_size,
            vocab_loop=False,
        )


def _check_known(caller: str, options: Iterable[str], known: Collection[str]) -> None:
    # A list: torch 2.11's Dynamo does not take one set of names from another.
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{caller}: unknown options {sorted(unknown)}; known: {sorted(known)}")


def _local(tensor: Tensor) -> Tensor:
    """The tensor itself, or this rank's part of it where it is sharded (a DTensor)."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of it where it is sharded (a DTensor)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
