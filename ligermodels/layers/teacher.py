"""Knowledge distillation in the loss head: the targets are a teacher's next-token distributions."""

from typing import NamedTuple

from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels.linear_cross_entropy.chunk_plan import gather, scatter, valid_rows
from ligermodels.kernels.loss_options import LossOptions, checked_token_weights


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
        self,
        hidden: Tensor,
        head: HeadParameters,
        targets: Tensor,
        options: LossOptions,
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
