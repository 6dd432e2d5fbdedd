"""Losses on what a head says of each token: preference, policy, distillation, several heads.

OPS has the one that is an op. `benchmarks.losses` measures all of LOSSES.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import Case, Op, Random, compiled, liger, liger_ops, peer, sizes
from ligermodels import kernels
from ligermodels.heads.medusa import MedusaHeads, draft_targets
from ligermodels.layers import LossHead

liger_losses = peer("liger_kernel.chunked_loss")
trl_log_probs = peer("trl.kernels.chunked_logprob")
trl_divergence = peer("trl.kernels.chunked_divergence")

SEQ = 1024  # tokens of a sequence
BETA = 0.1


def _inputs(random: Random, rows: int, width: int, vocab: int) -> list[Tensor]:
    return [random.normal(rows, width), random.normal(vocab, width, scale=width**-0.5)]


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    wide = logits.float()
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def _eager_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> Tensor:
    log_probs = _capped(F.linear(hidden, weight), softcap).log_softmax(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0]


def _trl_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> Tensor:
    function = trl_log_probs.ChunkedLogProbFunction
    # The last arguments are bias, temperature, chunk size, soft cap, scale and other outputs.
    return function.apply(hidden, weight, None, targets, 1.0, 32768, softcap, 1.0, ())[0]


def _of_sequences(
    random: Random,
    rows: int,
    width: int,
    vocab: int,
    softcap: float | None,
    group_size: int,
    loss_function: Callable[[Tensor, slice], Tensor],
    liger_loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    targets: Tensor,
) -> Case:
    """Return the case of a loss of (sequences, seq) log-probabilities, on sequences of a slice."""
    seq = targets.shape[1]
    everything = slice(0, len(targets))

    def of_log_probs(log_probs: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda hidden, weight: loss_function(
            log_probs(hidden, weight, targets.flatten(), softcap).view(-1, seq), everything
        )

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return kernels.linear_group_loss(
            hidden.view(-1, seq, width),
            weight,
            targets,
            lambda tokens, sequences: loss_function(tokens.log_probs, sequences),
            group_size=group_size,
            softcap=softcap,
        )

    def ours_apart(hidden: Tensor, weight: Tensor, flat: Tensor, cap: float | None) -> Tensor:
        return kernels.linear_log_probs(hidden, weight, flat, softcap=cap)[0]

    eager = of_log_probs(_eager_log_probs)
    return Case(
        lambda: _inputs(random, rows, width, vocab),
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger" if softcap is None else "liger (without the cap)": lambda h, w: liger_loss(
                h.view(-1, seq, width), w, targets
            ),
            "trl": of_log_probs(_trl_log_probs),
            "ligermodels": ours,
            "ligermodels (log_probs)": of_log_probs(ours_apart),
        },
        products=(rows, width, vocab),
    )


def dpo(random: Random, rows: int, width: int, vocab: int, softcap: float | None) -> Case:
    """DPO on pairs of sequences, with given log-probabilities of the reference."""
    seq = min(SEQ, rows // 4)
    targets = random.targets(rows, vocab).view(-1, seq)
    pairs = len(targets) // 2

    def loss_function(log_probs: Tensor, sequences: slice) -> Tensor:
        scores = log_probs.sum(-1)
        return -F.logsigmoid(BETA * (scores[::2] - scores[1::2])).sum() / pairs

    def liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss = liger_losses.LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=False)
        # Liger takes all chosen sequences, then all rejected ones.
        return loss(weight, *(torch.cat((x[::2], x[1::2])) for x in (hidden, labels)))[0]

    return _of_sequences(random, rows, width, vocab, softcap, 2, loss_function, liger_loss, targets)


def grpo(random: Random, rows: int, width: int, vocab: int, softcap: float | None) -> Case:
    """GRPO's clipped policy loss, one advantage for each sequence."""
    seq = min(SEQ, rows // 4)
    targets = random.targets(rows, vocab).view(-1, seq)
    advantages = torch.linspace(-1, 1, len(targets), device=targets.device)

    def loss_function(log_probs: Tensor, sequences: slice) -> Tensor:
        ratio = torch.exp(log_probs - log_probs.detach())
        gains = torch.minimum(
            ratio * advantages[sequences, None],
            ratio.clamp(0.8, 1.2) * advantages[sequences, None],
        )
        return -gains.sum() / rows

    def liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss = liger_losses.LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, loss_type="grpo"
        )
        return loss(hidden, weight, labels, torch.ones_like(labels), advantages)[0]

    return _of_sequences(random, rows, width, vocab, softcap, 1, loss_function, liger_loss, targets)


def linear_divergence(
    random: Random, rows: int, width: int, vocab: int, softcap: float | None
) -> Case:
    """The Jensen-Shannon divergence from a teacher of the same size."""
    teacher = [x.detach() for x in _inputs(random, rows, width, vocab)]
    targets = random.targets(rows, vocab)

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p, log_q = (
            _capped(F.linear(*head), softcap).log_softmax(-1)
            for head in ((hidden, weight), teacher)
        )
        log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log().item()
        kls = (F.kl_div(log_m, x, reduction="sum", log_target=True) for x in (log_p, log_q))
        return sum(kls) / (2 * rows)

    def liger_triton(hidden: Tensor, weight: Tensor) -> Tensor:
        function = liger_ops.LigerFusedLinearJSDFunction
        # The last arguments are beta, ignore_index, temperature and the dtype of the sums.
        return function.apply(hidden, weight, *teacher, targets, 0.5, -100, 1.0, torch.float32)

    def liger_chunked(hidden: Tensor, weight: Tensor) -> Tensor:
        loss = liger_losses.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)
        return loss(hidden, weight, *teacher, targets)

    def trl(hidden: Tensor, weight: Tensor) -> Tensor:
        function = trl_divergence.ChunkedDivergenceFunction
        # Both heads with their biases, then beta, temperature, and scale and soft cap of each.
        arguments = (hidden, weight, None, *teacher, None, 0.5, 1.0, 1.0, softcap, 1.0, softcap)
        return function.apply(*arguments)[0].mean()

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return kernels.linear_divergence(
            hidden, weight, *teacher, softcap=softcap, teacher_softcap=softcap
        )

    cap = "" if softcap is None else " without the cap"
    return Case(
        lambda: _inputs(random, rows, width, vocab),
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            f"liger (kernel{cap})": liger_triton,
            f"liger (chunked{cap})": liger_chunked,
            "trl": trl,
            "ligermodels": ours,
        },
        products=(rows, width, vocab),
        forward_products=2,  # the student's and the teacher's
    )


def medusa(
    random: Random, rows: int, width: int, vocab: int, softcap: float | None, heads: int = 4
) -> Case:
    """Medusa heads with projections of their own, on a frozen body. Every head has a block."""
    seq = min(SEQ, rows // 4)
    with torch.device("meta"):
        head = LossHead(width, vocab, softcap=softcap)
    head = head.to_empty(device=random.device).to(random.dtype)
    head.proj.weight.data = random.normal(vocab, width, scale=width**-0.5).detach()
    module = MedusaHeads(head, heads).to(random.device, random.dtype)
    labels = random.targets(rows, vocab).view(-1, seq)
    targets = [draft_targets(labels, i + 1, None, -100).flatten() for i in range(heads)]

    def each(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def function(hidden: Tensor, *_: Tensor) -> Tensor:
            parts = (
                module.decay ** (i + 1) * loss(block(hidden), module.head(i).weight, targets[i])
                for i, block in enumerate(module.blocks)
            )
            return torch.stack([*parts]).sum()

        return function

    def eager(hidden: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(_capped(F.linear(hidden, weight), softcap), y)

    def liger_head(hidden: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return liger.liger_fused_linear_cross_entropy(
            hidden, weight, y, softcap=softcap, accum_dtype=torch.float32
        )

    return Case(
        lambda: [random.normal(rows, width), *module.parameters()],
        {
            "eager": each(eager),
            "torch.compile": compiled(each(eager)),
            "liger": each(liger_head),
            "ligermodels": lambda hidden, *_: module(hidden.view(-1, seq, width), labels).loss,
        },
        products=(rows, width, vocab),
    )


def _linear_cross_entropy(
    random: Random, rows: int, width: int, vocab: int, softcap: float | None
) -> Case:
    """The loss of the next token, to compare with. The table of ops has its peers."""
    targets = random.targets(rows, vocab)
    return Case(
        lambda: _inputs(random, rows, width, vocab),
        {
            "ligermodels": lambda hidden, weight: kernels.linear_cross_entropy(
                hidden, weight, targets, softcap=softcap
            )[0]
        },
        products=(rows, width, vocab),
    )


_NAMES = "rows width vocab softcap"
_SMALL = {"rows": 512, "width": 256, "vocab": 1024, "softcap": None}
# The heads of Llama-3-8B and of Gemma-2-9B.
SIZES = sizes(
    _NAMES,
    *((rows, 4096, 128256, None) for rows in (8192, 32768)),
    *((rows, 3584, 256000, 30.0) for rows in (8192, 32768)),
)


def _entry(label: str, build: Callable[..., Case], **options: Any) -> Op:
    return Op(label, build, _SMALL, [], SIZES, host=False, **options)


OPS = {"linear_divergence": _entry("JSD from a teacher", linear_divergence)}
LOSSES = {
    "linear_cross_entropy": _entry("linear CE", _linear_cross_entropy),
    "dpo": _entry("DPO", dpo),
    "grpo": _entry("GRPO", grpo),
    "jsd": OPS["linear_divergence"],
    "medusa": _entry("four Medusa heads", medusa),
}
OURS = ("ligermodels", "ligermodels (log_probs)")
# The products of a loss, in units of (logits, gradient of hidden, gradient of weight).
PRODUCTS = {"jsd": (2, 1, 1), "medusa": (4, 4, 4)}
