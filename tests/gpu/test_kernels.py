"""The ops at the sizes they are for: real widths, real vocabularies."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from ligermodels.kernels import (
    add_layer_norm,
    add_rms_norm,
    cross_entropy,
    glu,
    glu_linear,
    layer_norm,
    linear_cross_entropy,
    norm_linear,
    norm_qkv_rope,
    qk_norm_rope,
    rms_norm,
    rope,
)
from ligermodels.kernels.glu import ACTIVATIONS
from tests.kernels import (
    formulas,
    test_fused_linear,
    test_layer_norm,
    test_linear_cross_entropy,
    test_qk_norm_rope,
    test_rope,
)
from tests.kernels.checks import compare, random
from tests.kernels.conftest import Place

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [576, 1024, 2048, 2304, 3072, 3584, 4096, 5120, 8192, 16384]
VOCABS = [32000, 128256, 151936, 256000, 262208]
CONSTANT = ("cos", "sin")


@pytest.fixture(params=DTYPES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    return Place("cuda", request.param)


def check(op, formula, made: dict, place: Place, **options) -> None:
    compare(op, formula, made, place, exact_place="cuda", **options)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("casting, offset", [("llama", 0.0), ("gemma", 1.0)])
def test_norm_widths(place, width, casting, offset) -> None:
    made = {
        "x": random(300, width, seed=1),
        "residual": random(300, width, seed=2),
        "weight": random(width, seed=3),
        "casting": casting,
        "offset": offset,
    }
    check(add_rms_norm, formulas.add_rms_norm, made, place)
    del made["residual"]
    check(rms_norm, formulas.rms_norm, made, place)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_widths(place, width) -> None:
    made = test_layer_norm.inputs((300, width), True)
    check(add_layer_norm, formulas.add_layer_norm, made, place)
    del made["residual"]
    check(layer_norm, formulas.layer_norm, made, place)


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(9, 3, 64), (32, 8, 128), (8, 4, 256)])
def test_rope_heads(place, heads, kv_heads, head_dim) -> None:
    made = test_rope.inputs(2, 130, heads, kv_heads, head_dim)
    check(rope, formulas.rope, made, place, constant=CONSTANT)


@pytest.mark.parametrize("casting, offset", [("llama", 0.0), ("gemma", 1.0)])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(4, 1, 256), (16, 8, 128), (32, 16, 128), (9, 3, 64), (5, 1, 20)]
)
def test_qk_norm_rope_heads(place, heads, kv_heads, head_dim, casting, offset) -> None:
    made = test_qk_norm_rope.inputs(2, 700, heads, kv_heads, head_dim)
    made |= {"casting": casting, "offset": offset}
    check(qk_norm_rope, formulas.qk_norm_rope, made, place, constant=CONSTANT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1536, 8192, 14336, 24576])
def test_glu_widths(place, width, activation) -> None:
    made = {"gate_up": random(100, 2 * width, scale=2.0), "activation": activation}
    check(glu, formulas.glu, made, place)


def test_fused_linears(place) -> None:
    made = test_fused_linear.norm_inputs((2, 200, 1024), 768)
    check(norm_linear, formulas.norm_linear, made, place)
    for activation in ACTIVATIONS:
        made = test_fused_linear.glu_inputs((2, 200, 2048), 768) | {"activation": activation}
        check(glu_linear, formulas.glu_linear, made, place)
    angles = random(1, 200, 32, seed=6)
    made = test_fused_linear.norm_inputs((2, 200, 1024), 24 * 64) | {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "num_heads": 16,
        "num_kv_heads": 4,
    }
    check(norm_qkv_rope, formulas.norm_qkv_rope, made, place, constant=CONSTANT)


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_vocabularies(place, vocab, name) -> None:
    shape = (70,)
    made = test_linear_cross_entropy.inputs(shape, 256, vocab, name)
    made["weight"] /= 16
    formula = test_linear_cross_entropy.formula
    for options in ({"chunk_size": 32}, {"reduction": "none"}):
        check(
            test_linear_cross_entropy.ours,
            formula,
            made | options,
            place,
            constant=("class_weights",),
        )
    made["logits"] = random(70, vocab, seed=8)
    for key in ("hidden", "weight", "bias"):
        del made[key]
    check(cross_entropy, formulas.cross_entropy, made, place, constant=("class_weights",))


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def head(rows: int, width: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    targets = torch.randint(vocab, (rows,), device="cuda")
    targets[::5] = -100
    return hidden, weight.requires_grad_(), targets


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"normalizer": 17},
        {"normalizer": torch.tensor(17.0)},
        {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "class_weights": True},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_no_host_synchronisation(options) -> None:
    hidden, weight, targets = head(512, 64, 1000)
    options = dict(options)
    if "class_weights" in options:
        options["class_weights"] = torch.rand(1000, device="cuda")
    for warm in (True, False):  # the first call compiles
        if warm:
            loss, *_ = linear_cross_entropy(hidden, weight, targets, chunk_size=100, **options)
            loss.sum().backward()
            continue
        with no_synchronisation():
            loss, *_ = linear_cross_entropy(hidden, weight, targets, chunk_size=100, **options)
            loss.sum().backward()


@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("budget", [None, 2**20 * 300, 2**20 * 700])
def test_scratch_stays_in_the_budget(budget, reduction, frozen) -> None:
    """Peak memory beyond inputs, outputs and gradients, forward and backward.

    Gradients made in forward are held until backward hands out scaled ones: that of hidden counts
    as a gradient, that of the weight as scratch where it is the float32 accumulator.
    """
    rows, width, vocab = 8192, 512, 128256
    hidden, weight, targets = head(rows, width, vocab)
    if frozen:
        {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    accumulator = 0 if frozen == "weight" else weight.numel() * 4

    def step() -> None:
        loss, *_ = linear_cross_entropy(
            hidden, weight, targets, reduction=reduction, max_scratch_bytes=budget
        )
        loss.sum().backward()

    for _ in range(2):  # the libraries' workspaces are made once
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
    gradients = sum(x.nbytes for x in (hidden, weight) if x.requires_grad)
    held = hidden.nbytes if hidden.requires_grad and reduction == "mean" else 0
    scratch = torch.cuda.max_memory_allocated() - before - gradients - held
    allowed = accumulator + 2**30 + 64 * rows if budget is None else budget
    assert scratch <= allowed, f"{scratch / 2**20:.0f} MiB of {allowed / 2**20:.0f}"


def test_captured_in_a_cuda_graph() -> None:
    hidden, weight, targets = head(256, 64, 1000)

    def step() -> torch.Tensor:
        loss, *_ = linear_cross_entropy(hidden, weight, targets, chunk_size=100)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            hidden.grad = weight.grad = None
            expected = step().detach().clone()
    torch.cuda.current_stream().wait_stream(side)
    expected_grad = weight.grad.clone()
    hidden.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(weight.grad, expected_grad)
