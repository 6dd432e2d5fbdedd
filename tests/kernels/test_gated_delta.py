"""The gated delta rule: documents, continued states and lengths, beside the recurrence."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ligermodels.kernels import gated_delta, gated_delta_layer
from ligermodels.kernels.gated_delta_decode import gated_delta_decode
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import INTERPRETING, Place
from tests.kernels.ops_table import gated_delta as inputs_of
from tests.kernels.ops_table import gated_delta_layer as inputs_of_a_layer
from tests.kernels.ops_table import gradients, outputs_and_gradients

FLOAT64 = Place("cpu", torch.float64)


def placed(place: Place, tokens: int, **options) -> dict[str, torch.Tensor]:
    made = inputs_of((1, tokens), 24, given=False, **options)
    return {name: x.to(*place) for name, x in made.items()}


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_lengths(place, tokens) -> None:
    """Whole chunks, parts of them, and several documents of which one has no token."""
    if INTERPRETING and tokens != 65:
        pytest.skip("the interpreter takes seconds for each length")
    made = inputs_of((1, tokens), 24, given=False)
    made["cu_seqlens"] = torch.tensor([0, tokens // 3, tokens // 3, tokens])
    made["initial_state"] = random(3, 2, 16, 24, seed=5)
    compare(gated_delta, formulas.gated_delta, made, place)


@pytest.mark.parametrize("seed", range(20))
def test_packed_documents_are_separate_ones(seed) -> None:
    """For any cuts, outputs, states and gradients are those of each document alone."""
    draw = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, 151, (4,), generator=draw).sort().values.tolist()
    ends = torch.tensor([0, *cuts, 150])
    made = placed(Place("cpu", torch.float32), 150)
    for x in made.values():
        x.requires_grad_()
    packed = outputs_and_gradients(lambda **x: gated_delta(**x, cu_seqlens=ends), made)
    parts = []
    upstream = random(1, 150, 2, 24, seed=20).float(), random(5, 2, 16, 24, seed=21).float()
    for i, (first, end) in enumerate(pairwise(ends)):
        outputs = gated_delta(**{name: x[:, first:end] for name, x in made.items()})
        given = [upstream[0][:, first:end], upstream[1][i : i + 1]]
        parts.append((*(x.detach() for x in outputs), gradients(outputs, made, given)))
    expected = [torch.cat([x[0] for x in parts], 1), torch.cat([x[1] for x in parts])]
    expected += [sum(each) for each in zip(*(x[2] for x in parts))]
    for ours, alone in zip(packed, expected, strict=True):
        assert (ours - alone).norm() <= 1e-6 * alone.norm()


@pytest.mark.parametrize("cut", [1, 40, 64, 99])
def test_a_state_continues_a_document(cut) -> None:
    """Of two parts, or of single tokens as in decoding."""
    made = placed(FLOAT64, 100)
    out, state = gated_delta(**made)
    first, middle = gated_delta(**{name: x[:, :cut] for name, x in made.items()})
    rest = [first]
    for i in range(cut, 100) if cut == 99 else [slice(cut, 100)]:
        part = {name: x[:, i : i + 1] if cut == 99 else x[:, i] for name, x in made.items()}
        more, middle = gated_delta(**part, initial_state=middle)
        rest.append(more)
    torch.testing.assert_close(torch.cat(rest, 1), out)
    torch.testing.assert_close(middle, state)


def test_the_gradient_of_a_decay_that_forgets_nearly_all(float32_place) -> None:
    """It is far smaller than what tokens read of themselves, which the decay does not reach."""
    place, exact = float32_place, FLOAT64
    made = {dtype: placed(dtype, 65) for dtype in (place, exact)}
    found = []
    for at, tensors in made.items():
        tensors["g"] = (tensors["g"].double() - 6).to(*at)
        given = {name: x.requires_grad_() for name, x in tensors.items()}
        upstream = (random(1, 65, 2, 24, seed=20).to(*at),)
        found.append(gradients(gated_delta(**given)[:1], given, upstream)[3].cpu().double())
    assert (found[0] - found[1]).norm() <= 3e-5 * found[1].norm()


def test_a_layer_with_packed_documents(place) -> None:
    """Neither the convolution nor its backward reads another document's tokens."""
    made = inputs_of_a_layer((1, 70), 24)
    made["cu_seqlens"] = torch.tensor([0, 1, 3, 3, 40, 70])
    compare(gated_delta_layer, formulas.gated_delta_layer, made, place)


@pytest.mark.parametrize(("tokens", "key_dim"), [(1, 8), (5, 16)])
def test_decoding(place, tokens, key_dim) -> None:
    """Outputs and states are those of the three ops that it stands for, after four tokens."""
    made = inputs_of_a_layer((2, 4 + tokens), 24, key_heads=2, heads=4, key_dim=key_dim)
    z, norm = random(2, 4 + tokens, 4 * 24, seed=40), random(24, seed=41)
    wide = [x.to("cpu", torch.float64) for x in (*list(made.values())[:6], z, norm)]
    qkv, b, a, *weights, z, norm = wide
    memory = torch.zeros(2, 4, key_dim, 24, dtype=torch.float64)
    inputs = formulas.gated_delta_inputs(qkv, b, a, *weights, 2, key_dim)
    middle = formulas.gated_delta(*(x[:, :4] for x in inputs))[1]
    out, memory = formulas.gated_delta(*inputs)
    gate = z.unflatten(-1, (4, 24))
    expected = formulas.output_gate(out, gate, norm, "silu").flatten(2)[:, 4:]
    rows, state = qkv[:, 1:4].to(*place).clone(), middle.to(place.device)
    state = state if place.dtype == torch.float64 else state.float()
    given = [x[:, 4:].to(*place) for x in (qkv, z, b, a)] + [x.to(*place) for x in weights]
    tokens, weights = torch.cat(given[:4], -1), (*given[4:], norm.to(*place))
    with torch.autocast(place.device, dtype=torch.bfloat16):  # which changes nothing
        found = gated_delta_decode(tokens, weights, (rows, state), 2, key_dim)
    bound = {torch.float64: 1e-6, torch.float32: 1e-5}.get(place.dtype, 2e-2)
    for ours, theirs in ((found, expected), (state, memory), (rows, qkv[:, -3:])):
        assert (ours.cpu().double() - theirs).norm() <= bound * theirs.norm()


def test_a_layer_saves_its_inputs_alone() -> None:
    made = inputs_of_a_layer((1, 50), 12)
    tensors = [x.requires_grad_() for x in made.values() if hasattr(x, "to")]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gated_delta_layer(**made)
    assert sum(x.numel() for x in saved) <= sum(x.numel() for x in tensors) + 2


def test_refusals() -> None:
    made = placed(FLOAT64, 5)
    q, v, g = made["q"], made["v"], made["g"]
    for wrong in (
        {"k": q[:, 1:]},
        {"q": q.expand(1, 5, 3, 16), "k": q.expand(1, 5, 3, 16)},
        {"v": v.float()},
        {"g": g[..., :1]},
        {"initial_state": v},
    ):
        with pytest.raises(ValueError, match="expected \\("):
            gated_delta(**{**made, **wrong})
    rows = inputs_of_a_layer((1, 5), 24)
    for wrong in ([0.0, 5.0], [0, 4], [0, 6], [1, 5], [0, 3, 2, 5], []):
        for op, given in ((gated_delta, made), (gated_delta_layer, rows)):
            with pytest.raises(ValueError, match=r"cu_seqlens .* rising from 0 to 5, the tokens"):
                op(**{**given, "cu_seqlens": torch.tensor(wrong)})
    for wrong in ({"a": rows["a"][:, 1:]}, {"key_heads": 3}, {"weight": rows["weight"][1:]}):
        with pytest.raises(ValueError, match="expected \\(batch, seq, channels\\)"):
            gated_delta_layer(**{**rows, **wrong})
    with pytest.raises(ValueError, match=r"initial_state .* expected \("):
        gated_delta_layer(**{**rows, "initial_state": v})
