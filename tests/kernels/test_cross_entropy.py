"""Cross entropy of logits: its options, its mean, extreme logits and targets out of range.

`test_grid.py` tests sizes, layouts, frozen inputs and retained graphs.
"""

from __future__ import annotations

import pytest
import torch

from ligermodels import kernels
from ligermodels.kernels.dispatch import select
from ligermodels.kernels.loss_options import CrossEntropyOptions, OutputGrads
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import FLOAT32, FLOAT64, PLACES, places
from tests.pairwise import pairwise

ROWS, VOCAB = 7, 37


def cross_entropy(*args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return only the loss and the z-loss, as the formula does."""
    return kernels.cross_entropy(*args, **kwargs)[:2]


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "weights": {"class_weights": "weights"},
    "ignored in the vocabulary": {"ignore_index": 3},
    "everything": {
        "label_smoothing": 0.2,
        "z_loss": 0.02,
        "softcap": 4.0,
        "logit_scale": 1.7,
        "class_weights": "weights",
        "ignore_index": -1,
    },
}


def targets_for(shape: tuple[int, ...], vocab: int, ignore_index: int = -100) -> torch.Tensor:
    """Return random targets with the first and the last class; every third one is ignored."""
    generator = torch.Generator().manual_seed(11)
    targets = torch.randint(0, vocab, shape, generator=generator)
    flat = targets.view(-1)
    flat[:1], flat[1:2] = vocab - 1, 0
    flat[2::3] = ignore_index
    return targets


def options_for(name: str, vocab: int) -> dict:
    options = dict(OPTIONS[name])
    if "class_weights" in options:
        options["class_weights"] = random(vocab, seed=9).abs() + 0.1
    return options


def inputs(shape: tuple[int, ...], vocab: int, name: str = "plain") -> dict:
    options = options_for(name, vocab)
    return {
        "logits": random(*shape, vocab, seed=1, scale=2.0),
        "targets": targets_for(shape, vocab, options.get("ignore_index", -100)),
        **options,
    }


CONSTANT = ("class_weights",)


@pairwise(indirect=["place"], place=PLACES, name=OPTIONS, reduction=["none", "sum", "mean"])
def test_options_and_reductions(place, name, reduction) -> None:
    """Compare loss, z-loss and the gradient of the logits, for random upstream gradients."""
    made = inputs((ROWS,), VOCAB, name) | {"reduction": reduction}
    compare(cross_entropy, formulas.cross_entropy, made, place, constant=CONSTANT)


@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 5000])
def test_vocabularies_at_the_edges_of_a_block(float32_place, vocab) -> None:
    made = inputs((3,), vocab, "everything")
    compare(cross_entropy, formulas.cross_entropy, made, float32_place, constant=CONSTANT)


@pytest.mark.parametrize("normalizer", [3, torch.tensor(2.5)], ids=str)
def test_normalizer(float32_place, normalizer) -> None:
    made = inputs((ROWS,), VOCAB)
    if isinstance(normalizer, torch.Tensor):
        normalizer = normalizer.to(float32_place.device)
    compare(
        lambda **kwargs: cross_entropy(**kwargs, normalizer=normalizer),
        lambda **kwargs: formulas.cross_entropy(**kwargs, normalizer=float(normalizer)),
        made,
        float32_place,
    )


def test_all_ignored(place) -> None:
    targets = torch.full((3,), -100, device=place.device)
    for reduction in ("none", "sum", "mean"):
        logits = random(3, 8).to(place.dtype).to(place.device)
        logits[1, 2] = float("inf")  # the loss does not depend on the logits of ignored rows
        logits.requires_grad_()
        loss, z_loss = cross_entropy(logits, targets, reduction=reduction, z_loss=0.1)
        loss.sum().backward()
        for x in (loss, z_loss, logits.grad):
            assert torch.equal(x, torch.zeros_like(x)), reduction


def test_extreme_logits(place) -> None:
    """Large logits do not overflow; a class at -infinity has probability 0 and no gradient."""
    rows = [[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [float("-inf"), 1.0, 1.0]]
    logits = torch.tensor(rows, dtype=place.dtype, device=place.device, requires_grad=True)
    targets = torch.tensor([0, 1, 2], device=place.device)
    loss, _ = cross_entropy(logits, targets, reduction="none")
    loss.sum().backward()
    log2, log3 = torch.tensor([2.0, 3.0]).log().tolist()
    expected = torch.tensor([0.0, log3, log2], dtype=loss.dtype, device=place.device)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[2, 0] == 0


OUT_OF_RANGE = [-1, 5, 2**40, -(2**40), 2**62]


@pytest.mark.parametrize("weights", [False, True])
def test_rows_with_a_target_out_of_range_are_nan(float32_place, weights) -> None:
    """A GPU returns NaN and reads nothing out of bounds. This calls the kernel, not the op.

    The op itself raises an error on the CPU.
    """
    device = float32_place.device
    for target in OUT_OF_RANGE:
        logits = random(3, 5, seed=2).float().to(device)
        targets = torch.tensor([1, target, -100], device=device)
        grads = OutputGrads(torch.ones(1, device=device))
        class_weights = torch.ones(5, device=device) if weights else None
        loss, z, _, grad = select("cross_entropy", logits).cross_entropy_rows(
            logits, targets, grads, None, class_weights, CrossEntropyOptions(z_loss=0.1), False
        )
        for x in (loss, z):
            assert x[1].isnan() and x[0].isfinite() and x[2] == 0, target
        assert grad[1].isnan().all() and grad[0].isfinite().all(), target
        assert (grad[2] == 0).all(), target


def test_the_mean_omits_the_weight_of_a_target_out_of_range(float32_place) -> None:
    """The divisor sums the class weights of the targets within the vocabulary; the loss is NaN.

    The class weights lie between large numbers: a read out of bounds would change the divisor.
    """
    device = float32_place.device
    logits = random(4, 5, seed=2).float().to(device)
    class_weights = torch.tensor([1e6, 3.0, 0.5, 7.0, 7.0, 0.25, 1e6], device=device)[1:-1]
    ops = select("cross_entropy", logits)
    for target in OUT_OF_RANGE:
        targets = torch.tensor([1, target, -100, 4], device=device)
        loss, z_loss, *_ = ops.cross_entropy_rows(
            logits, targets, None, None, class_weights, CrossEntropyOptions(z_loss=0.1), False
        )
        *means, divisor = ops.mean_loss(loss, z_loss, None, targets, class_weights)
        assert divisor == 0.75, target
        assert all(mean.isnan() for mean in means), target


def test_target_out_of_range_is_an_error_on_the_cpu() -> None:
    for target in OUT_OF_RANGE:
        targets = torch.tensor([[1, 2], [-100, target]])
        error = rf"target {target} at flat position 3 .* vocabulary of 5"
        with pytest.raises(IndexError, match=error):
            cross_entropy(torch.zeros(2, 2, 5), targets)


@pytest.mark.parametrize("weights", [False, True])
def test_mean_over_more_rows_than_a_block(float32_place, weights) -> None:
    """One program computes the sums and the divisor of 5000 rows, some of which are ignored."""
    device = float32_place.device
    loss, z_loss = (random(5000, seed=seed).abs().float().to(device) for seed in (4, 5))
    targets = torch.arange(5000, device=device) % 4
    targets[targets == 3] = -100
    loss[targets == -100] = z_loss[targets == -100] = 0
    class_weights = torch.tensor([0.5, 0.0, 2.0], device=device) if weights else None
    ops = select("cross_entropy", loss.view(-1, 1))
    *means, divisor = ops.mean_loss(loss, z_loss, None, targets, class_weights)
    exact = 1250 * 2.5 if weights else 3750
    assert divisor == exact
    for mean, rows in zip(means, (loss, z_loss)):
        torch.testing.assert_close(mean.double(), rows.double().sum() / exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_may_be_changed_in_place(float32_place, reduction) -> None:
    """A training loop may run `loss /= steps`, which autograd forbids if an op returns views."""
    logits = random(3, 8).float().to(float32_place.device).requires_grad_()
    targets = torch.tensor([1, 2, 3], device=float32_place.device)
    loss, _ = cross_entropy(logits, targets, reduction=reduction)
    loss /= 2
    loss.sum().backward()
    expected = cross_entropy(logits, targets, reduction=reduction)[0].sum() / 2
    assert torch.equal(logits.grad, torch.autograd.grad(expected, logits)[0])


# In lower precision the logits themselves are rounded.
@pairwise(
    indirect=["place"],
    place=places(FLOAT32, FLOAT64, gpu=(FLOAT32,)),
    offset=[1e3, 1e4, 2.0**20, 3e38],
    smoothing=[0.0, 0.1],
)
def test_large_logits_keep_their_differences(place, offset, smoothing) -> None:
    """A constant added to all logits changes nothing, although the logsumexp grows with it."""
    spread = 0 if offset == 3e38 else torch.arange(40).view(4, 10) * 7 % 11
    logits = (torch.full((4, 10), offset) + spread).to(place.dtype).to(place.device)
    targets = torch.tensor([0, 3, 9, 5], device=place.device)
    made = []
    for x in (logits, logits - offset):
        x = x.clone().requires_grad_()
        loss, _ = cross_entropy(x, targets, label_smoothing=smoothing)
        loss.backward()
        made += [(loss.detach(), x.grad)]
    for large, small in zip(*made):
        torch.testing.assert_close(large, small, rtol=1e-6, atol=1e-7)


def test_refusals() -> None:
    logits, targets = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        cross_entropy(logits, targets[:1])
    with pytest.raises(ValueError, match=r"torch\.int32"):
        cross_entropy(logits, targets.int())
    with pytest.raises(ValueError, match="reduction='avg'"):
        cross_entropy(logits, targets, reduction="avg")
    with pytest.raises(ValueError, match="reduction='mean'"):
        cross_entropy(logits, targets, reduction="sum", normalizer=2)
    with pytest.raises(ValueError, match="label_smoothing"):
        cross_entropy(logits, targets, label_smoothing=1.5)
    with pytest.raises(ValueError, match="softcap"):
        cross_entropy(logits, targets, softcap=0.0)
    with pytest.raises(ValueError, match="class_weights"):
        cross_entropy(logits, targets, class_weights=torch.ones(4))


def test_scaled_rounds_the_product_but_not_the_scale(place) -> None:
    """A rounded scale would change all gradients by the same factor."""
    x = random(50, 7).to(place.device, place.dtype)
    scale = torch.tensor(1 / 3, dtype=torch.promote_types(place.dtype, FLOAT32)).to(place.device)
    made = select("cross_entropy", x).scaled(x, scale, place.dtype)
    assert torch.equal(made, (x.double() * scale.double()).to(place.dtype))
