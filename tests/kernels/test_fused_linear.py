"""The fused linears: unused outputs, saved tensors, frozen combinations and refusals.

`test_grid.py` tests sizes, layouts and inputs that are frozen alone.
"""

from __future__ import annotations

import re

import pytest
import torch

from ligermodels.kernels import glu_linear, norm_linear, norm_qkv_rope
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import INTERPRETING
from tests.kernels.scratch import peak_scratch

CONSTANT = ("cos", "sin")


def norm_inputs(shape, out: int, residual: bool = True, bias: bool = True) -> dict:
    width = shape[-1]
    return {
        "x": random(*shape, seed=1),
        "residual": random(*shape, seed=2) if residual else None,
        "norm_weight": random(width, seed=3),
        "weight": random(out, width, seed=4, scale=width**-0.5),
        "bias": random(out, seed=5) if bias else None,
        "eps": 1e-5,
    }


def qkv_inputs(residual: bool = True, bias: bool = True, batch: int = 2) -> dict:
    heads, kv_heads, head_dim, seq = 4, 2, 6, 5
    angles = random(1, seq, head_dim // 2, seed=6, scale=3.0)
    made = norm_inputs((batch, seq, 24), (heads + 2 * kv_heads) * head_dim, residual, bias)
    return made | {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }


def glu_inputs(shape, out: int, bias: bool = True) -> dict:
    width = shape[-1]
    return {
        "gate_up": random(*shape[:-1], 2 * width, seed=1),
        "weight": random(out, width, seed=2, scale=width**-0.5),
        "bias": random(out, seed=3) if bias else None,
    }


def test_casting_and_offset_of_gemma(place) -> None:
    made = qkv_inputs() | {"casting_mode": "gemma", "offset": 1.0}
    compare(norm_qkv_rope, formulas.norm_qkv_rope, made, place, constant=CONSTANT)


@pytest.mark.parametrize(
    "frozen",
    [
        ("x", "residual"),
        ("x", "residual", "norm_weight"),
        ("norm_weight", "weight", "bias"),
        ("x", "residual", "weight", "bias"),
    ],
    ids=str,
)
def test_several_frozen_inputs(compiled_place, frozen) -> None:
    place = compiled_place
    compare(norm_linear, formulas.norm_linear, norm_inputs((3, 8), 5), place, frozen=frozen)
    made = qkv_inputs()
    compare(norm_qkv_rope, formulas.norm_qkv_rope, made, place, frozen=frozen, constant=CONSTANT)


@pytest.mark.parametrize("pairs", [0, 2, 3])
def test_neighbouring_pairs_of_a_part_or_all_of_each_head(float32_place, pairs) -> None:
    made = qkv_inputs()
    made |= {name: made[name][..., :pairs] for name in CONSTANT} | {"interleaved": True}
    compare(norm_qkv_rope, formulas.norm_qkv_rope, made, float32_place, constant=CONSTANT)


@pytest.mark.parametrize("used", range(4))
def test_one_output_used(float32_place, used) -> None:
    """An output that nothing reads adds no gradient and raises no error."""
    made = qkv_inputs()
    frozen = ("norm_weight", "weight", "bias") if used == 3 else ()
    compare(
        lambda **kwargs: norm_qkv_rope(**kwargs)[used],
        lambda **kwargs: formulas.norm_qkv_rope(**kwargs)[used],
        made,
        float32_place,
        frozen=frozen,
        constant=CONSTANT,
    )


def saved_bytes(function) -> int:
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        keep = function()
    del keep
    return sum(storages.values())


def test_what_is_kept_for_backward(compiled_place) -> None:
    """Besides the parameters, the sum and 1 / rms of each row are kept, not the norm's output."""
    device, dtype = compiled_place
    rows, width, out = 64, 32, 16

    def make(value):
        return None if value is None else value.to(dtype).to(device).requires_grad_()

    made = norm_inputs((rows, width), out)
    eps = made.pop("eps")
    leaves = {name: make(value) for name, value in made.items()}
    size = leaves["x"].element_size()
    parameters = sum(leaves[name].nbytes for name in ("norm_weight", "weight"))
    kept = saved_bytes(lambda: norm_linear(**leaves, eps=eps)) - parameters
    assert kept <= rows * width * size + rows * 8

    leaves = {name: make(value) for name, value in glu_inputs((rows, width), out).items()}
    kept = saved_bytes(lambda: glu_linear(**leaves)) - leaves["weight"].nbytes
    assert kept == rows * 2 * width * size


def test_what_is_kept_with_frozen_inputs(compiled_place) -> None:
    """Only what a gradient that is wanted needs: nothing, or the linear's input."""
    device, dtype = compiled_place
    rows, width, out = 64, 32, 16

    def kept(op, inputs, *trained) -> int:
        made = {
            name: x.to(device, dtype).requires_grad_(name in trained)
            if isinstance(x, torch.Tensor)
            else x
            for name, x in inputs.items()
        }
        return saved_bytes(lambda: op(**made)) // dtype.itemsize

    norm, glu = norm_inputs((rows, width), out), glu_inputs((rows, width), out)
    assert kept(norm_linear, norm) == kept(glu_linear, glu) == 0
    assert kept(norm_linear, norm, "bias") == kept(glu_linear, glu, "bias") == 0
    assert kept(norm_linear, norm, "weight", "bias") == rows * width
    assert kept(glu_linear, glu, "weight", "bias") == rows * width
    assert kept(glu_linear, glu, "gate_up") == rows * 2 * width + out * width


def test_what_backward_makes_for_frozen_weights(place, monkeypatch) -> None:
    """No activation product and no norm output is made for a weight's gradient."""
    from ligermodels.kernels.dispatch import select

    device, dtype = place
    made: dict[str, list[torch.Tensor | None]] = {"glu": [], "rms_norm": []}
    for op, into in made.items():
        implementation = select(op, torch.empty(1, device=device, dtype=dtype))
        original = getattr(implementation, f"{op}_backward")

        def backward(*args, original=original, into=into):
            result = original(*args)
            into.append(result[-1])
            return result

        monkeypatch.setattr(implementation, f"{op}_backward", backward)
    for trained in (True, False):
        for op, inputs in (
            (norm_linear, norm_inputs((3, 8), 5)),
            (norm_qkv_rope, qkv_inputs()),
            (glu_linear, glu_inputs((3, 8), 5)),
        ):
            leaves = {k: x.to(device, dtype) for k, x in inputs.items() if torch.is_tensor(x)}
            for name in ("x", "gate_up", *(["weight"] if trained else [])):
                if name in leaves:
                    leaves[name].requires_grad_()
            out = op(**inputs | leaves)
            (out if torch.is_tensor(out) else out[0]).sum().backward()
        assert [x is not None for x in made["glu"]] == [trained]
        assert [x is not None for x in made["rms_norm"]] == [trained] * 2
        made["glu"].clear()
        made["rms_norm"].clear()


def test_the_peak_of_backward(float32_place) -> None:
    """The gradient of gate_up takes its memory, and the product that of the product's gradient."""
    rows, width, out = 64, 32, 16
    inputs = {
        k: x.float().to(float32_place.device) for k, x in glu_inputs((rows, width), out).items()
    }
    weight = inputs["weight"].requires_grad_()
    leaf = inputs["gate_up"].requires_grad_()

    def peak(consume: bool) -> int:
        def forward() -> torch.Tensor:
            return glu_linear(leaf * 1.0, weight, consume=consume)

        return peak_scratch(forward, (leaf, weight))[1]

    gate_up = rows * 2 * width * 4
    apart, inside = peak(False), peak(True)
    assert inside <= apart - gate_up
    if INTERPRETING:  # The reference makes tensors of its own.
        product = gate_up // 2  # The interpreter still holds the one of forward.
        assert inside <= gate_up + 2 * product + 8


def test_refusals() -> None:
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"expected \(4,\)"):
        norm_linear(x, None, torch.ones(3), w)
    with pytest.raises(ValueError, match="casting_mode='hf'"):
        norm_linear(x, None, torch.ones(4), w, casting_mode="hf")
    cos = torch.ones(1, 2, 4)
    with pytest.raises(ValueError, match="activation='relu'"):
        glu_linear(torch.ones(2, 8), w, activation="relu")
    with pytest.raises(ValueError, match="packed rows have 3 columns"):
        norm_qkv_rope(x[None], None, torch.ones(4), w, None, cos, cos, 2, 1)
    with pytest.raises(ValueError, match="rotates 8 elements of a head, but a head has 1"):
        norm_qkv_rope(x[None], None, torch.ones(4), w, None, cos, cos, 1, 1)


def test_weights_that_do_not_fit_are_refused() -> None:
    """The error names the weight and both shapes; it does not come from the matrix product."""
    made, packed, glu = norm_inputs((3, 8), 5), qkv_inputs(), glu_inputs((3, 8), 5)
    complaint = r"{}: weight {} does not fit {} {}; expected \(out, {}\)"
    for op, inputs, name, width in (
        (norm_linear, made, "x", 8),
        (norm_qkv_rope, packed, "x", 24),
        (glu_linear, glu, "gate_up", 8),
    ):
        for weight in (inputs["weight"][:, 1:], inputs["weight"][:, 0]):
            shapes = re.escape(str(tuple(weight.shape))), re.escape(str(tuple(inputs[name].shape)))
            message = complaint.format(op.__name__, shapes[0], name, shapes[1], width)
            with pytest.raises(ValueError, match=message):
                op(**inputs | {"weight": weight})


def test_biases_that_do_not_fit_are_refused() -> None:
    """A bias of one element, which PyTorch would broadcast, is refused, and so is another dtype."""
    made, glu = norm_inputs((3, 8), 5), glu_inputs((3, 8), 5)
    for op, inputs in ((norm_linear, made), (glu_linear, glu)):
        name, weight = op.__name__, inputs["weight"]
        for bias in (weight.new_ones(1), weight.new_ones(6), torch.ones(5, dtype=torch.float16)):
            with pytest.raises(ValueError, match=rf"{name}: bias \({len(bias)},\) .*; expected"):
                op(**inputs | {"bias": bias})
        with pytest.raises(ValueError, match=rf"{name}: weight is torch.int64"):
            op(**inputs | {"weight": weight.long()})


def test_a_residual_of_another_shape_is_refused() -> None:
    """PyTorch would broadcast it, and a kernel would read out of bounds."""
    made = norm_inputs((2, 3, 8), 6)
    made["residual"] = made["residual"][:1]
    with pytest.raises(ValueError, match="differ in shape"):
        norm_linear(**made)


@pytest.mark.parametrize("kind", ["norm", "glu"])
def test_the_gradient_of_the_weight_alone(kind) -> None:
    """Forward keeps the input of the op before, and backward asks for one gradient of several."""
    if kind == "norm":
        op, made = norm_linear, norm_inputs((3, 8), 6)
        leaves = [made[name].requires_grad_() for name in ("weight", "x", "norm_weight")]
    else:
        op, made = glu_linear, glu_inputs((3, 8), 6)
        leaves = [made[name].requires_grad_() for name in ("weight", "gate_up")]
    out = op(**made)
    out = out if isinstance(out, torch.Tensor) else out[0]
    upstream = random(*out.shape, seed=9)
    (alone,) = torch.autograd.grad(out, leaves[:1], upstream, retain_graph=True)
    together = torch.autograd.grad(out, leaves, upstream)
    torch.testing.assert_close(alone, together[0])
