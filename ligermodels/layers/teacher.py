"""What a loss head learns from besides targets: a teacher's distribution of the next token."""

from typing import NamedTuple

from torch import Tensor


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
