"""Compare the tiled MLP with the MLP over all tokens at once, and count what each keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ligermodels.adapters import LoraLinear
from ligermodels.layers import GatedMLP, RMSNorm
from ligermodels.layers.fusion import PendingNorm
from ligermodels.layers.mlp import tiled
from tests.kernels.scratch import peak_scratch
from tests.layers.saved import SavedBytes
from tests.models.pairs import relative
from tests.pairwise import pairwise

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HIDDEN, INNER, TILE = 20, 27, 8
LEADING = (2, 37)  # the last tile is shorter, and one tile has tokens of both rows


class Sublayer(nn.Module):
    """The norm and the MLP of a block, tiled or not, with the residual connection."""

    def __init__(self, tile: int | None, normed: bool = True, mlp: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = GatedMLP(HIDDEN, INNER, bias=True) if mlp is None else mlp
        self.norm = RMSNorm(HIDDEN) if normed else None
        if self.norm is not None:
            nn.init.normal_(self.norm.weight, 1.0, 0.2)
        self.tile = tile
        self.calls = 0

    def rows(self, rows: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            self.calls += 1
        if self.norm is None:
            return self.mlp(rows), rows
        return self.mlp(PendingNorm(rows, None, *weight, self.norm.options))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = () if self.norm is None else (self.norm.weight,)
        if self.tile is None:
            return self.rows(x, *weight)
        return tiled(self.mlp, self.rows, x, self.tile, weight)

    def forward(self, x: Tensor) -> Tensor:
        out, total = self.parts(x)
        return out + total


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, upstream = torch.randn(2, *LEADING, HIDDEN, generator=generator)
    return x.to(dtype).requires_grad_(), upstream.to(dtype)


def results(sublayer: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor | None]:
    """Return the output and every gradient by name."""
    x = x.detach().requires_grad_(x.requires_grad)
    sublayer.zero_grad()
    out = sublayer(x)
    out.backward(upstream.to(out.dtype))
    grads = {name: p.grad for name, p in sublayer.named_parameters()}
    return {"out": out.detach(), "x": x.grad} | grads


def pair(**options) -> tuple[Sublayer, Sublayer]:
    return Sublayer(TILE, **options), Sublayer(None, **options)


def same(ours: dict[str, Tensor | None], expected: dict[str, Tensor | None], bound: float) -> None:
    assert ours.keys() == expected.keys()
    for name, want in expected.items():
        if want is None:
            assert ours[name] is None, name
        else:
            assert ours[name].dtype == want.dtype, name
            assert relative(ours[name], want) <= bound, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_without_tiles(dtype, normed, device) -> None:
    """Against float64, tiles add one rounding of the dtype, and one of float32 for each tile.

    Gradients of parameters are summed over the tiles in float32. A sum in bfloat16 would add a
    rounding of bfloat16 for each. On a GPU, products of one row have kernels of their own, whose
    rounding differs, so the tiles are larger there.
    """
    tile = 1 if device == "cpu" else TILE
    ours, whole = (made.to(device, dtype) for made in pair(normed=normed))
    ours.tile = tile
    exact = copy.deepcopy(whole).double()
    x, upstream = (made.detach().to(device) for made in inputs(dtype))
    x.requires_grad_()
    got, expected = results(ours, x, upstream), results(whole, x, upstream)
    right = results(exact, x.double(), upstream.double())
    tiles = -(-LEADING[0] * LEADING[1] // tile)
    rounding = torch.finfo(dtype).eps / 2 + tiles * torch.finfo(torch.float32).eps / 2
    for name, want in right.items():
        assert relative(got[name], want) <= relative(expected[name], want) + rounding, name
    assert ours.calls == 2 * tiles


@pairwise(x=[True, False], norm=[True, False], gate_up=[True, False], down=[True, False])
def test_frozen_inputs(x, norm, gate_up, down) -> None:
    given, upstream = inputs()
    given.requires_grad_(x)
    if not (x or norm or gate_up or down):
        assert not Sublayer(TILE).requires_grad_(False)(given).requires_grad
        return
    made = []
    for sublayer in pair():
        sublayer.norm.requires_grad_(norm)
        sublayer.mlp.gate_up_proj.requires_grad_(gate_up)
        sublayer.mlp.down_proj.requires_grad_(down)
        made.append(results(sublayer, given, upstream))
    same(*made, 1e-6)


def test_a_retained_graph_and_second_derivatives() -> None:
    x, upstream = inputs()
    sublayer = Sublayer(TILE)
    out = sublayer(x)
    leaves = [x, *sublayer.parameters()]
    first = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out, leaves, upstream, create_graph=True)
    again = torch.autograd.grad(out, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, upstream)


def test_hooks_run_once() -> None:
    """Each parameter's hooks see the sum over the tiles, and can change it."""
    x, upstream = inputs()
    expected = results(Sublayer(TILE), x, upstream)
    sublayer, seen = Sublayer(TILE), []
    for name, p in sublayer.named_parameters():
        p.register_hook(lambda grad, name=name: seen.append(name) or 2 * grad)
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    got = results(sublayer, x, upstream)
    assert sorted(seen) == sorted(2 * [name for name, _ in sublayer.named_parameters()])
    for name, _ in sublayer.named_parameters():
        assert torch.equal(got[name], 2 * expected[name])


def with_lora(dropout: float) -> GatedMLP:
    torch.manual_seed(3)
    mlp = GatedMLP(HIDDEN, INNER, bias=True)
    for name in ("gate_up_proj", "down_proj"):
        adapted = LoraLinear(getattr(mlp, name).requires_grad_(False), rank=3, dropout=dropout)
        nn.init.normal_(adapted.lora_b)
        setattr(mlp, name, adapted)
    return mlp


def test_dropout_is_drawn_again() -> None:
    """Its gradient is that of the forward that ran, whatever is drawn between both passes."""
    x, upstream = inputs(torch.float64)
    sublayer = Sublayer(TILE, mlp=with_lora(0.5)).double()

    def out(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return sublayer(x)

    def parallel(x: Tensor) -> Tensor:
        """The same tiles in plain autograd, with the same random numbers."""
        torch.manual_seed(5)
        parts = [sublayer.rows(rows, sublayer.norm.weight) for rows in x.flatten(0, 1).split(TILE)]
        return torch.cat([a + b for a, b in parts]).view_as(x)

    found = []
    for function in (out, parallel):
        made = function(x)
        torch.rand(100)
        state = torch.get_rng_state()
        found.append(torch.autograd.grad(made, x, upstream)[0])
        assert torch.equal(torch.get_rng_state(), state)
    assert relative(*found) <= 1e-12


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(lora, backward_inside) -> None:
    """The cast weights of one tile are not used for another, whose graph has been freed."""
    x, upstream = inputs()
    made = []
    for tile in (TILE, None):
        sublayer = Sublayer(tile, mlp=with_lora(0.0) if lora else None)
        with torch.autocast("cpu", torch.bfloat16):
            out = sublayer(x)
            if backward_inside:
                out.backward(upstream.to(out.dtype))
        if not backward_inside:
            out.backward(upstream.to(out.dtype))
        grads = {name: p.grad for name, p in sublayer.named_parameters()}
        made.append({"out": out, "x": x.grad} | grads)
        x.grad = None
    same(*made, 1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_kept_and_the_peak(device) -> None:
    """Forward keeps x; neither pass makes gate_up, the norm's output or a copy for all tokens."""
    hidden, inner, tokens, tile = 16, 128, 512, 32
    torch.manual_seed(0)
    x = torch.randn(1, tokens, hidden, device=device, requires_grad=True)
    size = x.nbytes
    peaks = {}
    for tiles in (tile, None):
        sublayer = Sublayer(tiles, mlp=GatedMLP(hidden, inner))
        sublayer.norm = RMSNorm(hidden)
        sublayer.to(device)
        with SavedBytes(sublayer, x) as saved:
            sublayer.parts(x)
        assert (saved.total == 0) == (tiles is not None)
        peaks[tiles] = peak_scratch(lambda s=sublayer: s(x), (x, *sublayer.parameters()))
    one_tile = tile * inner * 2 * 4
    sums = 2 * sum(p.nbytes for p in sublayer.parameters())  # a tile's gradients and their sum
    forward, backward = peaks[tile]
    assert forward <= 2 * size + 4 * one_tile  # the output and its sum with x
    assert backward <= 2 * size + 5 * one_tile + sums
    assert backward < peaks[None][1] / 4


def test_torch_compile() -> None:
    x, upstream = inputs()
    torch._dynamo.reset()
    ours, whole = pair()
    ours.tile = 32  # each tile takes long to trace
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    got = {k.removeprefix("_orig_mod."): v for k, v in results(compiled, x, upstream).items()}
    same(got, results(whole, x, upstream), 1e-6)
