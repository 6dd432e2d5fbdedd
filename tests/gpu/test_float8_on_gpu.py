"""Float8 linears on a GPU that multiplies float8: real sizes, against the plain formulas there."""

from __future__ import annotations

import pytest
import torch

from ligermodels import LigerLlama, LlamaConfig, MemoryPlan, float8
from ligermodels.adapters import add_adapters
from ligermodels.adapters.adapted_model import quantize
from ligermodels.kernels import float8_linear as float8_linear_module
from ligermodels.kernels.float8_cast import absolute_maximum, float8_cast
from ligermodels.kernels.float8_linear import RECIPES, float8_linear
from ligermodels.kernels.reference import float8_cast as reference
from ligermodels.kernels.triton import float8_cast as triton
from tests.gpu.synchronisation import captured, no_synchronisation

OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OLD, reason="needs float8 products")]
SIZES = [(8192, 4096, 6144), (1000, 4096, 4096), (17, 1024, 28672), (4096, 14336, 4096)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=draw).bfloat16()


@pytest.mark.parametrize("rows, columns", [(8192, 4096), (1001, 14336), (3, 1040)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_have_the_bits_of_the_reference(rows, columns, dtype) -> None:
    x = normal(rows, columns)
    for axis, over in (("tensor", (0, 1)), ("rows", 1), ("columns", 0)):
        amax = absolute_maximum(x, axis)
        assert torch.equal(amax, x.float().abs().amax(over, keepdim=True))
        ways = axis != "columns", axis != "rows"
        made = float8_cast(x, amax, dtype, straight=ways[0], transposed=ways[1])
        expected = reference.float8_cast(x, amax, dtype, False, *ways)
        for found, pair in zip(made, expected):
            if found is not None:
                assert torch.equal(found.values.view(torch.uint8), pair[0].view(torch.uint8))
                assert torch.equal(found.scale, pair[1])
    one = torch.full((1, 1), torch.finfo(dtype).max, device="cuda")  # its scale is 1
    codes = reference.scaled(x, absolute_maximum(x), dtype)[0]
    _, turned = float8_cast(codes, one, dtype, straight=False, transposed=True)
    assert torch.equal(turned.values[:, :rows].t().view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_does_not_fit_saturates_and_infinities_do_not(dtype) -> None:
    x, amax = normal(64, 1024), torch.full((1, 1), 0.5, device="cuda")
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38])
    for each in float8_cast(x, amax, dtype, straight=True, transposed=True):
        found = each.values if each.values.shape == x.shape else each.values.t()
        expected = reference.scaled(x, amax, dtype)[0]
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        assert found[0, 3].float() == torch.finfo(dtype).max
        assert found.isnan().sum() == 3
    zeros = float8_cast(torch.zeros_like(x), torch.zeros_like(amax), dtype, transposed=True)
    assert not any(each.values.float().any() for each in zeros if each is not None)


@pytest.mark.parametrize("rows, columns", [(8192, 4096), (1001, 14336), (3, 1040), (4096, 6144)])
@pytest.mark.parametrize("square", [False, True])
def test_casts_of_blocks_have_the_bits_of_the_reference(rows, columns, square) -> None:
    x = normal(rows, columns)
    x[:, 5] *= 1000
    ways = None, torch.float8_e4m3fn, square, True, True
    made = triton.float8_cast(x, *ways)
    for found, expected in zip(made, reference.float8_cast(x, *ways)):
        assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(found[1][: len(expected[1])], expected[1]), (square, found[1].shape)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows, width, out", SIZES)
def test_products_against_float32(recipe, rows, width, out) -> None:
    x, weight, bias = normal(rows, width), normal(out, width, seed=1), normal(out, seed=2)
    upstream = normal(rows, out, seed=3)
    exact = [each.float().requires_grad_() for each in (x, weight, bias)]
    wanted = torch.nn.functional.linear(*exact)
    wanted = wanted, *torch.autograd.grad(wanted, exact, upstream.float())
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    for keeps_input in (False, True):
        found = float8_linear(*leaves, RECIPES[recipe], keeps_input=keeps_input)
        found = found, *torch.autograd.grad(found, leaves, upstream)
        for one, other in zip(found, wanted):
            assert (one.float() - other).norm() < 0.07 * other.norm()


def model_of(layers: int = 2) -> LigerLlama:
    torch.manual_seed(0)
    config = LlamaConfig.preset("llama-3-8b", num_hidden_layers=layers, vocab_size=2048)
    with torch.device("cuda"):
        return LigerLlama(config).bfloat16()


def gradients(model: LigerLlama, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model(recipe, monkeypatch) -> None:
    """Gradients are as near as with the plain casts, also where blocks run again.

    A step does not wait for the device.
    """
    ids = torch.randint(2048, (1, 2048), device="cuda")
    model = model_of()
    exact = gradients(model, ids)
    names = [name for name, _ in model.named_parameters()]

    def errors() -> dict[str, float]:
        found = gradients(model, ids)
        return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, found, exact)}

    assert len(float8.convert(model, recipe)) == 8
    with monkeypatch.context() as patch:
        patch.setenv("LIGERMODELS_BACKEND", "torch")
        plain = errors()
    for policy in ("no_gate_up", "input", "all"):
        model.set_memory_plan(MemoryPlan.uniform(2, policy))
        for name, error in errors().items():
            assert error < 1.3 * plain[name], (policy, name, error, plain[name])
    with no_synchronisation():
        model(ids, labels=ids).loss.backward()


def test_delayed_scales() -> None:
    """The second step has no pass for scales, and is as near as the first, under each policy."""
    ids = torch.randint(2048, (1, 2048), device="cuda")
    model = model_of()
    exact = gradients(model, ids)
    names = [name for name, _ in model.named_parameters()]

    def errors() -> dict[str, float]:
        found = gradients(model, ids)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, found, exact)}

    float8.convert(model, "delayed")
    first = errors()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(float8_linear_module, "absolute_maximum")
        for policy in ("all", "no_gate_up", "input"):
            model.set_memory_plan(MemoryPlan.uniform(2, policy))
            for name, error in errors().items():
                assert error < 1.1 * first[name] + 1e-3, (policy, name, error, first[name])
    with no_synchronisation():
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert not any(map(any, float8.overflows(model).values()))


@pytest.mark.parametrize("keeps_bfloat16", [True, False])
def test_lora_in_a_cuda_graph(keeps_bfloat16) -> None:
    """Frozen weights that were cast before it stay so."""
    model, ids = model_of(), torch.randint(2048, (1, 2048), device="cuda")
    float8.convert(model) if keeps_bfloat16 else quantize(model, "float8", torch.device("cuda"))
    add_adapters(model, 4, 8.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    for weight in trained:
        torch.nn.init.normal_(weight, 0, 0.02)

    def step() -> None:
        with float8.weights_cast_once(model):
            model(ids, labels=ids).loss.backward()

    graph, _ = captured(step, model.zero_grad)
    ids.random_(2048)
    graph.replay()
    replayed = [weight.grad.clone() for weight in trained]
    model.zero_grad()
    step()
    for weight, grad in zip(trained, replayed):
        assert (weight.grad - grad).norm() < 1e-2 * grad.norm()


def test_one_new_token() -> None:
    """Decoding multiplies single rows."""
    model = model_of().eval()
    prompt = torch.randint(2048, (1, 33), device="cuda")
    float8.convert(model)
    assert model.generate(prompt, max_new_tokens=4).shape == (1, 37)
