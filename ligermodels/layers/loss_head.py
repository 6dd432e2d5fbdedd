"""The loss head: it turns hidden states into a loss. Only its method `logits` returns logits.

A projection that is not a plain nn.Linear is called chunk by chunk (`replaced_loss`). For knowledge
distillation, the targets are a teacher's next-token distributions (`Teacher`).
"""

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from ligermodels import kernels
from ligermodels.kernels.cross_entropy import row_losses
from ligermodels.kernels.dispatch import compute_dtype, without_autocast
from ligermodels.kernels.linear_cross_entropy import chunk_plan
from ligermodels.kernels.linear_cross_entropy.chunk_plan import gather, scatter, valid_rows
from ligermodels.kernels.linear_cross_entropy.functions import (
    linear_loss,
    log_prob_options,
    token_log_probs,
)
from ligermodels.kernels.linear_cross_entropy.groups import (
    GROUP_OPTIONS,
    GroupLoss,
    checked_group_size,
    checked_loss,
    group_options,
)
from ligermodels.kernels.linear_cross_entropy.vocab_shard import (
    VocabShard,
    gather_classes,
    sum_gradient,
)
from ligermodels.kernels.loss_options import (
    HEAD_OPTIONS,
    LOG_PROB_OPTIONS,
    LOSS_OPTIONS,
    CrossEntropyOutput,
    LossKeywords,
    LossOptions,
    TokenRequest,
    check_classes,
    check_known,
    check_targets,
    checked_token_weights,
    loss_divisor,
    reduce_tokens,
    token_output,
)
from ligermodels.layers.experts import Routing
from ligermodels.layers.fusion import is_plain, is_sharded, local_tensor


class HeadParameters(NamedTuple):
    """The parameters of a head whose projection is a plain nn.Linear, for a divergence."""

    weight: Tensor  # (vocab, hidden)
    bias: Tensor | None  # (vocab)
    softcap: float | None
    logit_scale: float


class Teacher(NamedTuple):
    """A teacher's hidden states and head, for the option `teacher` of `LossHead.forward`.

    They are tensors and numbers and not a module, because tools move and cast the arguments of a
    forward.

    Attributes:
        hidden: (..., teacher's hidden), of the same tokens as the student's hidden states.
        weight, bias: of the teacher's head, (classes, teacher's hidden) and (classes). The student
            has the first of these classes; a teacher's vocabulary may be padded to more.
        softcap, logit_scale: of the teacher's logits, as in `linear_cross_entropy`.
        beta, temperature: as in `ligermodels.losses.distillation`.
        share: of the divergence in the loss, from 0 to 1; the rest is the loss of the targets.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    beta: float | None = 0.5
    temperature: float = 1.0
    share: float = 1.0

    def loss(
        self, hidden: Tensor, head: HeadParameters, targets: Tensor, options: LossOptions
    ) -> Tensor:
        """Return the divergence from this teacher at the targets that are not ignored.

        Args: hidden (..., hidden), targets (...) and options are those of `LossHead.forward`; head
            has the student's parameters.
        Raises:
            ValueError: a tensor of the teacher has a wrong shape, or its share is not in [0, 1].
        """
        if self.hidden.shape[:-1] != targets.shape or not 0 <= self.share <= 1:
            raise ValueError(
                f"LossHead: teacher.hidden {tuple(self.hidden.shape)} and teacher.share="
                f"{self.share}; expected {tuple(targets.shape)} + (hidden,) and a share in "
                "[0, 1]"
            )
        weight, bias, softcap, logit_scale = head
        vocab = len(weight)
        if len(self.weight) < vocab:
            raise ValueError(
                f"LossHead: the teacher has {len(self.weight)} classes and the head "
                f"{vocab}; expected at least as many"
            )
        index, row_targets = valid_rows(targets, options)
        rows, teacher_rows = (gather(x.flatten(0, -2), index) for x in (hidden, self.hidden))
        token_weights, ignore_index = options.token_weights, options.ignore_index
        if token_weights is not None:
            weights = checked_token_weights(token_weights, targets, ignore_index)
            token_weights = gather(weights.reshape(-1, 1), index).flatten()
        classes, chunk_size = slice(0, vocab), options.chunk_size
        if chunk_size is not None:  # a chunk also holds the teacher's logits of a third of it
            chunk_size = max(1, chunk_size * 3 // 4)
        loss = kernels.linear_divergence(
            rows,
            weight,
            teacher_rows,
            self.weight[classes],
            bias,
            None if self.bias is None else self.bias[classes],
            beta=self.beta,
            mask=row_targets != ignore_index,
            token_weights=token_weights,
            reduction=options.reduction,
            normalizer=options.normalizer,
            temperature=self.temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            teacher_softcap=self.softcap,
            teacher_scale=self.logit_scale,
            chunk_size=chunk_size,
            max_scratch_bytes=options.max_scratch_bytes,
        )
        return scatter(loss, index, targets, ignore_index) if loss.dim() else loss


# The options that a teacher's loss has as well.
_TAUGHT_OPTIONS = (
    *("reduction", "normalizer", "ignore_index", "softcap", "logit_scale", "token_weights"),
    *("chunk_size", "max_scratch_bytes", "skip_ignored", "max_valid"),
)


class HeadOptions(LossKeywords, total=False):
    """Keyword arguments of `LossHead.forward`, and of a model's forward if labels are given."""

    return_token_loss: bool
    num_items_in_batch: float | Tensor | None
    teacher: Teacher | None
    loss_function: GroupLoss | None
    group_size: int


class HeadOutput(NamedTuple):
    """The output of the head: tensors on the device of hidden.

    It is a tuple because DeepSpeed, FSDP2 and HF's Trainer look for tensors in tuples; the Trainer
    reads the loss from the first place.
    """

    loss: Tensor  # scalar, or in the shape of targets with reduction "none"; includes the z-loss
    z_loss: Tensor  # the z-loss that is part of the loss; not differentiable
    num_valid: Tensor  # exact number of targets that are not ignored, int64 scalar
    # Optional, in the order of CrossEntropyOutput and the shape of targets. The loss, the entropy
    # and log-probabilities are differentiable, only with reduction "none".
    token_loss: Tensor | None = None
    token_log_probs: Tensor | None = None  # log-probability of the target; 0 if it is ignored
    token_entropy: Tensor | None = None  # of the softmax, in nats; 0 if the target is ignored
    token_correct: Tensor | None = None  # bool: whether the target has the highest logit
    token_sum_sq_probs: Tensor | None = None  # sum of the squared probabilities
    token_mean_logits: Tensor | None = None  # mean of the logits over the vocabulary
    token_alternative_log_probs: Tensor | None = None  # (..., k) of the option `alternatives`
    token_top_ids: Tensor | None = None  # (..., top_k) int64, the likeliest classes
    token_top_log_probs: Tensor | None = None  # (..., top_k) their log-probabilities
    # What a model's layers add to the loss, such as the balance of experts. With reduction "mean"
    # the loss includes it.
    auxiliary_loss: Tensor | None = None
    hidden: Tensor | None = None  # (..., hidden) of a model that is asked for them
    routing: Routing | None = None  # of a model with experts that is asked for it

    def with_values(self, **values: Any) -> "HeadOutput":
        """Return the output with other values.

        A compiled function of torch 2.11 cannot return what `_replace` makes of an output.
        """
        return HeadOutput(**dict(zip(self._fields, self)) | values)

    @property
    def logits(self) -> Tensor:
        """Raise AttributeError: the loss is computed without a matrix of logits."""
        raise AttributeError(
            "this output has no logits, because the loss is computed without them; call "
            "model.head.logits(hidden), where hidden = model(input_ids)"
        )


def only_normalizer(
    normalizer: float | Tensor | None, num_items_in_batch: float | Tensor | None
) -> float | Tensor | None:
    """Return the one of two names of an option that is given, or None.

    Raises:
        ValueError: both are given.
    """
    if normalizer is not None and num_items_in_batch is not None:
        raise ValueError(
            "the loss head: normalizer and num_items_in_batch are two names of one option; pass "
            "only one of them"
        )
    return num_items_in_batch if normalizer is None else normalizer


class LossHead(nn.Module):
    """A linear projection fused with cross entropy, computed chunk by chunk.

    Args:
        hidden_size, vocab_size: shape of the projection.
        bias: whether the projection has a bias.
        tied_to: an embedding whose weight is also the weight of the projection. The head then has
            no parameter of its own. It reads the embedding's weight at every call. If the embedding
            module is replaced, call `tie` again.
        loss_options: defaults for the keyword arguments of
            `ligermodels.kernels.linear_cross_entropy` (reduction, label_smoothing, z_loss, softcap,
            logit_scale, temperature, class_weights, ignore_index, chunk_size, max_scratch_bytes,
            skip_ignored, max_valid, weight_grad_in_forward, return_token_stats, top_k). Any call
            may override them. class_weights become a buffer that is not in the state_dict.

    If the projection is not a plain `nn.Linear` (LoRA, float8, hooks, sharded), the head calls the
    module for each chunk, in forward and again in backward. max_scratch_bytes then covers the
    logits and the loss's temporary tensors. With several chunks it also covers three times the
    gradients of the projection's parameters, because autograd sums them out of place. It does not
    cover memory that the projection itself allocates, because the head does not know how much
    that is.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option's value is not valid for any call, a tied head is given a bias, or
            the embedding's weight is not of shape (vocab_size, hidden_size).
    """

    class_weights: Tensor | None
    # The chunk of a memory plan, unless chunk_size or max_scratch_bytes is given.
    planned_chunk_size: int | None = None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        tied_to: nn.Embedding | None = None,
        **loss_options: Unpack[LossKeywords],
    ) -> None:
        super().__init__()
        check_known("LossHead", loss_options, HEAD_OPTIONS)
        LossOptions.of(**loss_options)  # called for its checks only
        class_weights = loss_options.pop("class_weights", None)
        check_classes(vocab_size, class_weights)
        self.vocab_size = vocab_size
        # Set by tensor parallelism: the classes of this rank, of which the weight consists.
        self.vocab_shard: VocabShard | None = None
        # As a buffer, class_weights move to another device together with the head.
        self.register_buffer("class_weights", class_weights, False)
        self.loss_options = loss_options
        if tied_to is None:
            self.proj = nn.Linear(hidden_size, vocab_size, bias=bias)
            self._tied: tuple[nn.Embedding, ...] = ()
        else:
            if bias:
                raise ValueError("LossHead: a tied head has no bias; leave out bias or tied_to")
            if tied_to.weight.shape != (vocab_size, hidden_size):
                raise ValueError(
                    f"LossHead: tied_to has a weight of {tuple(tied_to.weight.shape)}; expected "
                    f"({vocab_size}, {hidden_size}), the vocab_size and the hidden_size"
                )
            self.tie(tied_to)

    def tie(self, embedding: nn.Embedding) -> None:
        """Use the embedding's weight (vocab, hidden) as the weight of the projection."""
        # The tuple keeps nn.Module from registering the embedding as a child of the head.
        self._tied = (embedding,)

    @property
    def is_tied(self) -> bool:
        """Whether the head computes with an embedding's weight."""
        return len(self._tied) == 1

    @property
    def weight(self) -> Tensor:
        """The projection's weight (vocab, hidden): the head's own or the tied embedding's."""
        return self._tied[0].weight if self._tied else self.proj.weight

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        return_token_loss: bool = False,
        num_items_in_batch: float | Tensor | None = None,
        teacher: Teacher | None = None,
        loss_function: GroupLoss | None = None,
        group_size: int = 1,
        **loss_options: Unpack[LossKeywords],
    ) -> HeadOutput:
        """Compute the loss. Targets are aligned with hidden: the head does not shift them.

        Args:
            hidden: (..., hidden).
            targets: (...) int64.
            return_token_loss: whether to return token_loss. The option `return_token_stats` returns
                it as well, with token_log_probs, token_entropy and token_correct, or with the
                fields that it names ("log_probs", "entropy", "correct", "sum_sq_probs",
                "mean_logits"). None of them needs a second pass over the vocabulary.
            token_weights: (...) factors of the tokens' losses.
            alternatives: (..., k) int64 classes, whose log-probabilities are returned as
                token_alternative_log_probs. They are aligned with hidden, like the targets.
            num_items_in_batch: another name of the option `normalizer`. HF's Trainer uses it.
            teacher: learn from its distributions of the tokens whose target is not ignored: the
                loss is the divergence from them, as in `ligermodels.losses.distillation`.
            loss_function, group_size: the loss is what `from_log_probs` returns for them. All other
                fields of the output but num_valid are then empty.
            loss_options: the constructor's options, and `normalizer`: a number >= 0 (0 counts as 1)
                or a 0-d tensor. The loss is the sum over tokens divided by it. (FSDP2's mixed
                precision rounds float tensors: pass a number or an integer tensor there.)
        Raises:
            TypeError: an option is unknown.
            ValueError: both normalizer and num_items_in_batch are given; an option cannot be
                combined with a teacher or a loss_function; or group_size is given without one.
            RuntimeError: the head is tied, and it is called under FSDP2 outside the model's forward
                or its weight is offloaded.
            Also everything that `ligermodels.kernels.linear_cross_entropy` raises.
        """
        if num_items_in_batch is not None:
            given_normalizer = loss_options.get("normalizer")
            loss_options["normalizer"] = only_normalizer(given_normalizer, num_items_in_batch)
        given = self._with_defaults("", loss_options, LOSS_OPTIONS)
        if loss_function is not None:
            asked = {**loss_options, "teacher": teacher}
            _check_combined("loss_function", asked, return_token_loss, sorted(GROUP_OPTIONS))
            of_function: Any = {k: x for k, x in loss_options.items() if k in GROUP_OPTIONS}
            loss = self.from_log_probs(
                hidden, targets, loss_function, group_size=group_size, **of_function
            )
            num_valid = (targets != given.get("ignore_index", -100)).sum()
            return HeadOutput(loss, torch.zeros_like(loss).detach(), num_valid)
        if group_size != 1:
            raise ValueError(f"LossHead: group_size={group_size} is only for a loss_function")
        given.setdefault("class_weights", self.class_weights)
        options = LossOptions.of(**given)
        num_valid = (targets != options.ignore_index).sum()
        if options.reduction == "mean" and options.normalizer is options.class_weights is None:
            options = options._replace(normalizer=num_valid)  # the op need not count them again
        if teacher is not None:
            _check_combined("teacher", loss_options, return_token_loss, _TAUGHT_OPTIONS)
            return self._taught(hidden, targets, teacher, options, num_valid)
        made = self._cross_entropy(hidden, targets, options)
        return _head_output(made, num_valid, return_token_loss)

    def _with_defaults(
        self, method: str, options: LossKeywords, known: frozenset[str]
    ) -> LossKeywords:
        """Return the known options, as a call, the constructor or a memory plan gives them."""
        check_known(f"LossHead{method}", options, known)
        given: Any = {k: x for k, x in self.loss_options.items() if k in known} | options
        if given.get("chunk_size") is None and given.get("max_scratch_bytes") is None:
            given["chunk_size"] = self.planned_chunk_size
        return given  # type: ignore[no-any-return]

    def _taught(
        self,
        hidden: Tensor,
        targets: Tensor,
        teacher: Teacher,
        options: LossOptions,
        num_valid: Tensor,
    ) -> HeadOutput:
        """Return the output of a head that learns from a teacher."""
        parameters = self.plain_parameters(hidden, "head")
        loss = teacher.loss(hidden, parameters, targets, options)
        if teacher.share == 1:
            return HeadOutput(loss, torch.zeros_like(loss).detach(), num_valid)
        own = _head_output(self._cross_entropy(hidden, targets, options), num_valid, False)
        return own.with_values(loss=teacher.share * loss + (1 - teacher.share) * own.loss)

    def _cross_entropy(
        self, hidden: Tensor, targets: Tensor, options: LossOptions
    ) -> CrossEntropyOutput:
        """Return the cross entropy, by the fused op or by calls of the projection."""
        if self.is_linear:
            weight, bias = self.parameters_here(hidden)
            return linear_loss(hidden, weight, targets, bias, options, self.vocab_shard)
        if self.vocab_shard is not None:
            raise ValueError(
                "loss head: its vocabulary is split over ranks, and its projection is a "
                f"{type(self.proj).__name__} or has hooks; only a plain nn.Linear can be split"
            )
        return replaced_loss(self.proj, self.vocab_size, hidden, targets, options)

    def plain_parameters(self, hidden: Tensor, name: str) -> HeadParameters:
        """Return what a divergence reads of the head.

        Raises:
            ValueError: the projection is not a plain nn.Linear, or its vocabulary is split. `name`
                says in the message which head it is.
        """
        if not self.is_linear:
            raise ValueError(
                f"distillation: the projection of {name} is a {type(self.proj).__name__}; expected "
                "a plain nn.Linear. Merge adapters into it, or leave it out of the quantization"
            )
        if self.vocab_shard is not None:
            raise ValueError(
                f"distillation: the vocabulary of {name} is split over ranks (tensor "
                "parallelism); shard the model without it"
            )
        weight, bias = self.parameters_here(hidden)
        options = self.loss_options
        softcap, logit_scale = options.get("softcap"), options.get("logit_scale", 1.0)
        return HeadParameters(weight, bias, softcap, logit_scale)

    def log_probs(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        entropy: bool = False,
        **options: Unpack[LossKeywords],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each target, and on request the entropy, without a shift.

        Preference and policy losses are computed from them. Under FSDP2 call the wrapped model
        instead: `model(ids, labels=labels, reduction="none", return_token_stats=True)` returns the
        same values, also differentiable, as token_log_probs and token_entropy.

        Args: hidden (..., hidden); targets (...) int64, aligned with hidden; entropy, whether to
            return it; options of `ligermodels.kernels.linear_log_probs`, whose defaults are the
            constructor's.
        Returns: log-probabilities (...) and entropy (...) or None. Both are float32, 0 for ignored
            targets, and differentiable.
        Raises: what `linear_log_probs` raises. TypeError if an option is unknown. RuntimeError if
            the head is tied, and it is called under FSDP2 outside the model's forward or its weight
            is offloaded.
        """
        given = self._with_defaults(".log_probs", options, LOG_PROB_OPTIONS)
        checked = log_prob_options(entropy, **given)
        return token_log_probs(self._cross_entropy(hidden, targets, checked))

    def from_log_probs(
        self,
        hidden: Tensor,
        targets: Tensor,
        loss_function: GroupLoss,
        *,
        group_size: int = 1,
        **options: Unpack[LossKeywords],
    ) -> Tensor:
        """Return a loss that `loss_function` computes from the tokens of whole sequences.

        This costs three matrix products, where a loss of `log_probs` costs four, if the budget
        holds the logits of whole groups of sequences. `ligermodels.kernels.linear_group_loss`
        explains the arguments and what loss_function may do. With max_valid, nothing waits for the
        GPU, and it costs four; so it does where the projection is not a plain nn.Linear, or the
        vocabulary is split over ranks. A wrapped model is called with the option `loss_function`.

        Args: hidden (batch, seq, hidden); targets (batch, seq) int64, aligned with hidden.
        Raises: as `linear_group_loss` and `log_probs`.
        """
        given = self._with_defaults(".from_log_probs", options, GROUP_OPTIONS)
        if self.is_linear:
            weight, bias = self.parameters_here(hidden)
            return kernels.linear_group_loss(
                *(hidden, weight, targets, loss_function, bias),
                group_size=group_size,
                vocab_shard=self.vocab_shard,
                **given,
            )
        checked_group_size(hidden, group_size)
        made = self._cross_entropy(hidden, targets, group_options(**given))
        return checked_loss(loss_function(made, slice(0, len(targets))))

    def logits(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return softcap(logit_scale * projection(hidden)): (..., hidden) -> (..., vocab).

        It also works on a sharded model outside the model's forward. Every rank must then call it.

        Args: dtype: the dtype of the logits, such as float32. A plain projection then computes
            in this dtype, also under autocast; another one computes in its own, and its logits are
            cast. The default is what the projection returns.
        The option `temperature` does not change what this returns.
        """
        if self.vocab_shard is not None:
            hidden = sum_gradient(hidden, self.vocab_shard.group)
        sharded = is_sharded(getattr(self.proj, "weight", None)) if not self._tied else False
        if self._tied or sharded or (dtype is not None and self.is_linear):
            weight = _whole(self.weight)
            bias = None if self._tied or self.proj.bias is None else _whole(self.proj.bias)
            kept = hidden.dtype if dtype is None else dtype
            with nullcontext() if dtype is None else without_autocast(hidden):
                bias = None if bias is None else bias.to(kept)
                logits = F.linear(hidden.to(kept), weight.to(kept), bias)
        else:
            logits = self.proj(hidden)
            logits = logits if dtype is None else logits.to(dtype)
        if self.vocab_shard is not None:
            logits = gather_classes(logits, self.vocab_shard)
        logits = logits * self.loss_options.get("logit_scale", 1.0)
        softcap = self.loss_options.get("softcap")
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    @property
    def is_linear(self) -> bool:
        """Whether the fused ops may use the projection's weight instead of calling the module."""
        # torch 2.11's Dynamo does not trace bool(self._tied).
        return len(self._tied) == 1 or is_plain(self.proj, nn.Linear)

    def parameters_here(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the weight (vocab, hidden) and bias (vocab) of the projection for the fused ops.

        Raises:
            RuntimeError: the weight of a tied head is offloaded, or is sharded outside of the
                model's forward.
        """
        weight = self.weight
        if self._tied and weight.is_meta and not hidden.is_meta:
            raise RuntimeError(
                "the tied head's weight is offloaded; keep embed_tokens in memory: in accelerate's "
                "device_map, put embed_tokens on the device of the head"
            )
        if is_sharded(weight):
            raise RuntimeError(
                "the tied head's weight is sharded outside the model's forward; instead of "
                "model.head(...), call the wrapped model with labels: "
                "model(input_ids, labels=labels)"
            )
        return weight, None if self._tied else self.proj.bias


def _head_output(
    made: CrossEntropyOutput, num_valid: Tensor, return_token_loss: bool
) -> HeadOutput:
    loss, z_loss, token_loss = made[:3]
    stats: list[Any] = [*made[3:]]
    if not return_token_loss and all(x is None for x in stats):
        return HeadOutput(loss, z_loss, num_valid)
    return HeadOutput(loss, z_loss, num_valid, token_loss, *stats)


def _check_combined(
    with_what: str, given: Mapping[str, Any], return_token_loss: bool, known: Collection[str]
) -> None:
    odd = [name for name, x in given.items() if x is not None and name not in known]
    if odd or return_token_loss:
        raise ValueError(
            f"LossHead: {', '.join(odd) or 'return_token_loss'} cannot be combined with a "
            f"{with_what}, whose loss has only the options {', '.join(known)}"
        )


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the full tensor if it is a DTensor."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def replaced_loss(
    proj: nn.Module, vocab_size: int, hidden: Tensor, targets: Tensor, options: LossOptions
) -> CrossEntropyOutput:
    """Compute `linear_cross_entropy` with a projection that is called for each chunk.

    Each chunk runs under `torch.utils.checkpoint`, so backward recomputes its logits. Autograd
    computes and accumulates the projection's gradients. The valid rows of all chunks are
    gathered before the first one.
    """
    class_weights, ignore_index = options.class_weights, options.ignore_index
    shape = hidden.shape[:-1]
    check_targets(targets, shape, vocab_size, class_weights, ignore_index, hidden.device)
    request = options.request_of(targets, vocab_size)
    index, row_targets = valid_rows(targets, options)
    rows = gather(hidden.reshape(-1, hidden.shape[-1]), index)
    chunk_size = options.chunk_size
    if chunk_size is None:
        copied = options.skip_ignored or not hidden.is_contiguous()
        chunk_size = _chunk_size(proj, vocab_size, rows, targets.numel(), copied, request, options)
    alternatives = request.alternatives
    if alternatives is not None and index is not None:
        alternatives = alternatives[index.clamp(max=max(targets.numel() - 1, 0))]

    def chunk_outputs(
        chunk: Tensor, chunk_targets: Tensor, chunk_alternatives: Tensor | None
    ) -> tuple[Tensor, ...]:
        asked = request._replace(alternatives=chunk_alternatives)
        return row_losses(proj(chunk), chunk_targets, options, asked)

    # The capture of a CUDA graph may not read the random state, which only dropout needs again.
    keeps_random_state = not _is_captured(rows) or any(map(_drops, proj.modules()))
    made = [
        # Autograd detects in-place changes before backward only in tensors that are arguments
        # of the checkpointed function.
        checkpoint(
            chunk_outputs,
            rows[chunk],
            row_targets[chunk],
            None if alternatives is None else alternatives[chunk],
            use_reentrant=False,
            preserve_rng_state=keeps_random_state,
        )
        for chunk in chunk_plan.chunks(len(rows), chunk_size)
    ]
    loss, z_loss, *stats = (scatter(torch.cat(x), index, targets, ignore_index) for x in zip(*made))
    if options.token_weights is not None:
        weights = checked_token_weights(options.token_weights, targets, ignore_index)
        loss, z_loss = loss * weights, z_loss * weights
    out = token_output(loss, z_loss.detach(), loss, request, stats)
    if options.reduction == "none":
        return out
    return reduce_tokens(out, loss_divisor(targets, options, loss.dtype))


def _drops(module: nn.Module) -> bool:
    """Return whether a module applies dropout to its inputs."""
    # Its public subclasses are Dropout, Dropout1d to 3d, AlphaDropout and FeatureAlphaDropout.
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def _is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph records the operations on x."""
    return (
        not torch.compiler.is_compiling() and x.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def _chunk_size(
    proj: nn.Module,
    vocab_size: int,
    rows: Tensor,
    tokens: int,
    copied: bool,
    request: TokenRequest,
    options: LossOptions,
) -> int:
    """Return how many of the rows (rows, hidden) of all tokens the projection is called with.

    Args: copied: whether the rows are a copy.
    """
    narrow = rows.element_size()
    wide = compute_dtype(rows).itemsize
    copies, row_copies = chunk_plan.wide_copies(rows, request)
    # The larger of two peaks: in backward the logits, their gradient and float32 copies of
    # both; in the loss the logits and the copies that the loss makes.
    logit_bytes = max(2 * narrow + 16, narrow + wide * copies)
    one_row = narrow + wide * (copies + row_copies)
    token_bytes = chunk_plan.TOKEN_BYTES * (1 + options.skip_ignored)
    token_bytes += request.bytes_per_token(chunk_plan.TOKEN_BYTES)
    fixed_bytes = token_bytes * tokens + (rows.numel() * narrow if copied else 0)
    sums = 0
    if torch.is_grad_enabled() and options.max_scratch_bytes is not None:
        # Autograd adds a chunk's parameter gradients to the running sum out of place: the sum,
        # the new gradient and their total exist at the same time.
        sums = sum(3 * local_tensor(p).nbytes for p in proj.parameters() if p.requires_grad)
        if rows.requires_grad:  # Autograd joins the gradients of all chunks' rows.
            fixed_bytes += rows.numel() * narrow
    sizes = chunk_plan.Sizes(
        len(rows),
        vocab_size,
        logit_bytes=logit_bytes,
        accumulator_bytes=sums,
        fixed_bytes=fixed_bytes + max(0, one_row - logit_bytes) * vocab_size,
        vocab_loop=False,
    )
    return chunk_plan.plan_chunks(sizes, options.max_scratch_bytes).chunk_size
