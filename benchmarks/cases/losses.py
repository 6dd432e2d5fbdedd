"""Cross entropy, the heads that compute the logits themselves, and log-probabilities."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.base import (
    Absent,
    Case,
    Implementation,
    Op,
    Random,
    cce,
    compiled,
    liger,
    liger_ops,
    sizes,
)
from ligermodels import kernels


def cross_entropy(random: Random, rows: int, vocab: int, softcap: float | None = None) -> Case:
    targets = random.targets(rows, vocab)

    def eager(logits: Tensor) -> Tensor:
        wide = logits.float()
        if softcap is not None:
            wide = softcap * torch.tanh(wide / softcap)
        return F.cross_entropy(wide, targets)

    def liger_cross_entropy(logits: Tensor) -> Tensor:
        return liger.liger_cross_entropy(logits, targets, softcap=softcap)

    one_pass = rows * vocab * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, vocab)],
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger (copying)": lambda logits: liger_cross_entropy(logits.clone()),
            # Liger overwrites the logits with gradients, so this entry has its own logits.
            "liger (in place)": Implementation(
                liger_cross_entropy, lambda: [random.normal(rows, vocab)]
            ),
            "ligermodels": lambda logits: kernels.cross_entropy(logits, targets, softcap=softcap)[
                0
            ],
        },
        # Forward reads the logits; backward reads them again and writes their gradient.
        (one_pass, 3 * one_pass),
    )


def cross_entropy_softcap(random: Random, rows: int, vocab: int) -> Case:
    """Cross entropy with the soft cap of Gemma 2."""
    return cross_entropy(random, rows, vocab, softcap=30.0)


def _torch_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        raise Absent(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, reduction=reduction, options=options)


def _head_inputs(random: Random, rows: int, width: int, vocab: int) -> list[Tensor]:
    # The logits have a standard deviation near 1, as at the start of training.
    return [random.normal(rows, width), random.normal(vocab, width, scale=width**-0.5)]


def _linear_cross_entropy(random: Random, targets: Tensor, width: int, vocab: int) -> Case:
    rows = targets.numel()

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def liger_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return liger.liger_fused_linear_cross_entropy(hidden, weight, targets, **options)

    def cce_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return cce.linear_cross_entropy(hidden, weight, targets, impl="cce", **options)

    return Case(
        lambda: _head_inputs(random, rows, width, vocab),
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "torch linear_cross_entropy": lambda h, w: _torch_linear_cross_entropy(h, w, targets),
            "liger (bf16 sum)": liger_head,
            "liger (float32 sum)": lambda h, w: liger_head(h, w, accum_dtype=torch.float32),
            # By default cce skips tiles whose gradients are all below the precision of bf16.
            "cce (filtered)": cce_head,
            "cce (exact)": lambda h, w: cce_head(h, w, filter_eps=None),
            "ligermodels": lambda h, w: kernels.linear_cross_entropy(h, w, targets)[0],
        },
        products=(rows, width, vocab),
    )


def linear_cross_entropy(random: Random, rows: int, width: int, vocab: int) -> Case:
    return _linear_cross_entropy(random, random.targets(rows, vocab), width, vocab)


def linear_cross_entropy_ignored(
    random: Random, rows: int, width: int, vocab: int, ignored: float
) -> Case:
    """Linear cross entropy with ignored targets; `skip_ignored` skips their rows."""
    targets = random.targets(rows, vocab, ignored)
    valid = int((targets != -100).sum())
    case = _linear_cross_entropy(random, targets, width, vocab)
    names = ("eager", "torch.compile", "liger (float32 sum)", "cce (filtered)", "ligermodels")
    case.implementations = {name: case.implementations[name] for name in names} | {
        "ligermodels (skip_ignored)": lambda h, w: kernels.linear_cross_entropy(
            h, w, targets, skip_ignored=True, max_valid=valid
        )[0]
    }
    case.products = (valid, width, vocab)
    return case


def linear_cross_entropy_budget(
    random: Random, rows: int, width: int, vocab: int, max_scratch_bytes: int | None
) -> Case:
    """Ours with a budget for scratch memory; None is the default budget."""
    targets = random.targets(rows, vocab)
    case = _linear_cross_entropy(random, targets, width, vocab)
    case.implementations = {
        "ligermodels": lambda h, w: kernels.linear_cross_entropy(
            h, w, targets, max_scratch_bytes=max_scratch_bytes
        )[0]
    }
    return case


def linear_cross_entropy_none(random: Random, rows: int, width: int, vocab: int) -> Case:
    """The loss of each token, with a random upstream gradient."""
    targets = random.targets(rows, vocab)

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")

    def cce_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return cce.linear_cross_entropy(
            hidden, weight, targets, impl="cce", reduction="none", **options
        )

    return Case(
        lambda: _head_inputs(random, rows, width, vocab),
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "torch linear_cross_entropy": lambda h, w: _torch_linear_cross_entropy(
                h, w, targets, "none"
            ),
            "cce (filtered)": cce_head,
            "cce (exact)": lambda h, w: cce_head(h, w, filter_eps=None),
            "ligermodels": lambda h, w: kernels.linear_cross_entropy(
                h, w, targets, reduction="none"
            )[0],
        },
        products=(rows, width, vocab),
        forward_products=2,
    )


def linear_cross_entropy_stats(random: Random, rows: int, width: int, vocab: int) -> Case:
    """The mean loss, with each token's log-probability, entropy and whether its logit is largest.

    Only the loss is differentiated.
    """
    targets = random.targets(rows, vocab)

    def eager(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(hidden, weight).float()
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(-1, targets[:, None]).squeeze(-1)
        detached = log_probs.detach()
        entropy = -(detached.exp() * detached).sum(-1)
        return -chosen.mean(), chosen.detach(), entropy, logits.argmax(-1) == targets

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        out = kernels.linear_cross_entropy(hidden, weight, targets, return_token_stats=True)
        return out.loss, out.log_probs, out.entropy, out.correct

    return Case(
        lambda: _head_inputs(random, rows, width, vocab),
        {"eager": eager, "torch.compile": compiled(eager), "ligermodels": ours},
        products=(rows, width, vocab),
    )


def linear_log_probs(random: Random, rows: int, width: int, vocab: int, entropy: bool) -> Case:
    targets = random.targets(rows, vocab)

    def eager(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logp = F.linear(hidden, weight).float().log_softmax(-1)
        chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
        return (chosen, -(logp.exp() * logp).sum(-1)) if entropy else (chosen,)

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        outputs = kernels.linear_log_probs(hidden, weight, targets, entropy=entropy)
        return tuple(output for output in outputs if output is not None)

    # The log-probability of a token is its negated loss.
    def liger_scaled(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        function = liger_ops.LigerFusedLinearScaledCrossEntropyFunction
        # The last arguments are temperature, ignore_index, m_tiles_per_cluster, return_entropy.
        outputs = function.apply(hidden, weight, targets, 1.0, -100, 1, entropy)
        return (-outputs[0], outputs[1]) if entropy else (-outputs,)

    def torch_head(hidden: Tensor, weight: Tensor) -> Tensor:
        return -_torch_linear_cross_entropy(hidden, weight, targets, "none")

    def cce_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return -cce.linear_cross_entropy(
            hidden, weight, targets, impl="cce", reduction="none", **options
        )

    case = Case(
        lambda: _head_inputs(random, rows, width, vocab),
        {
            "eager": eager,
            "torch.compile": compiled(eager),
            "liger": liger_scaled,
            "ligermodels": ours,
        },
        products=(rows, width, vocab),
        forward_products=2,
    )
    if not entropy:  # these peers return only the loss
        case.implementations |= {
            "torch linear_cross_entropy": torch_head,
            "cce (filtered)": cce_head,
            "cce (exact)": lambda h, w: cce_head(h, w, filter_eps=None),
        }
    return case


_HEAD = "rows width vocab"
_SMALL = {"rows": 512, "width": 256, "vocab": 1024}
_MIB = 2**20

OPS = {
    "cross_entropy": Op(
        "cross entropy",
        cross_entropy,
        {"rows": 16, "vocab": 1024},
        sizes("rows vocab", (8192, 128256)),
        sizes(
            "rows vocab",
            *((8192, vocab) for vocab in (32000, 151936, 262208)),
            *((rows, 128256) for rows in (1, 1024, 4096, 32768, 131072)),
        ),
        scratch=True,
    ),
    "cross_entropy_softcap": Op(
        "cross entropy, soft cap",
        cross_entropy_softcap,
        {"rows": 16, "vocab": 1024},
        sizes("rows vocab", (8192, 128256)),
        [],
        host=False,
    ),
    "linear_cross_entropy": Op(
        "linear CE",
        linear_cross_entropy,
        _SMALL,
        sizes(
            _HEAD,
            (8192, 4096, 128256),
            (32768, 4096, 128256),
            (8192, 2304, 256000),
            (16384, 2048, 128256),
        ),
        sizes(
            _HEAD,
            *((8192, 2048, vocab) for vocab in (32000, 128256, 262208)),
            *((8192, width, 128256) for width in (576, 16384)),
            *((rows, 2048, 128256) for rows in (1, 1024, 4096, 131072)),
        ),
        scratch=True,
    ),
    "linear_cross_entropy_ignored": Op(
        "linear CE, ignored targets",
        linear_cross_entropy_ignored,
        _SMALL | {"ignored": 0.5},
        [],
        sizes(f"{_HEAD} ignored", *((8192, 4096, 128256, share) for share in (0.0, 0.5, 0.8, 0.9))),
        host=False,
    ),
    "linear_cross_entropy_budget": Op(
        "linear CE, scratch budget",
        linear_cross_entropy_budget,
        _SMALL | {"max_scratch_bytes": None},
        [],
        sizes(
            f"{_HEAD} max_scratch_bytes",
            *(
                (8192, 4096, 128256, budget)
                for budget in (32 * _MIB, 128 * _MIB, 512 * _MIB, 2048 * _MIB, None)
            ),
        ),
        host=False,
    ),
    "linear_cross_entropy_none": Op(
        "linear CE of each token",
        linear_cross_entropy_none,
        _SMALL,
        sizes(_HEAD, (8192, 4096, 128256)),
        [],
        scratch=True,
    ),
    "linear_cross_entropy_stats": Op(
        "linear CE, token statistics",
        linear_cross_entropy_stats,
        _SMALL,
        sizes(_HEAD, (8192, 4096, 128256)),
        [],
        scratch=True,
    ),
    "linear_log_probs": Op(
        "linear log-probs",
        linear_log_probs,
        _SMALL | {"entropy": False},
        sizes(f"{_HEAD} entropy", (8192, 4096, 128256, False), (8192, 4096, 128256, True)),
        [],
        scratch=True,
    ),
}
