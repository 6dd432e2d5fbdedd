"""Keys and values that layers share: the formula, and every plan beside a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ligermodels.layers as ll
from ligermodels import LlamaConfig
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory import offload
from ligermodels.memory.offload import Offloader
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.models.base import DecoderModel
from tests.layers.formulas import attended, rotated
from tests.memory.test_offload import LateCopies
from tests.models.pairs import gradients, relative, tokens
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("rows_at_once")
HIDDEN, LAYERS = 24, 6
# The layer whose keys and values each layer takes. Two owners run before the first taker.
KV_FROM = [None, None, 0, 1, None, 4]


class Sharing(DecoderModel):
    """Layers of two windows, of which half take the keys and values of another layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)

        def block(i: int) -> nn.Module:
            attention = ll.Attention(
                HIDDEN,
                4,
                2,
                6,
                sliding_window=5 if i % 2 else None,
                q_norm=ll.RMSNorm(6) if i == 3 else None,
                layer_index=i,
                kv_from=KV_FROM[i],
                shares_kv=i in KV_FROM,
            )
            mlp = ll.GatedMLP(HIDDEN, 40)
            return ll.DecoderBlock(attention, mlp, ll.RMSNorm(HIDDEN), ll.RMSNorm(HIDDEN))

        self.embed_tokens = nn.Embedding(config.vocab_size, HIDDEN)
        self.rotary_emb = ll.RotaryEmbedding(6)
        self.layers = nn.ModuleList(block(i) for i in range(LAYERS))
        self.norm = ll.RMSNorm(HIDDEN)
        self.head = ll.LossHead(HIDDEN, config.vocab_size)
        self.initialize_weights()


@pytest.fixture
def model() -> Sharing:
    torch.manual_seed(0)
    return Sharing(
        LlamaConfig(
            vocab_size=131,
            hidden_size=HIDDEN,
            intermediate_size=40,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
    )


def step(model: Sharing, plan: MemoryPlan | None = None, **inputs: Any) -> tuple[Tensor, dict]:
    ids, labels = tokens()
    model.zero_grad()
    model.apply_memory_plan(plan)
    loss = model(ids, labels=labels, **inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


def test_values_and_gradients_are_those_of_the_formula(model: Sharing) -> None:
    """A layer with the owner's rows for keys and values, applied to the owner's normed input."""
    rows = [layer.self_attn.qkv_proj.out_features for layer in model.layers]
    assert rows == [24 if owner is not None else 48 for owner in KV_FROM]
    ids, labels = tokens()
    loss, found = step(model)
    wide = model.double()
    model.zero_grad()
    context = ll.AttentionContext(*model.rotary_emb(torch.arange(ids.shape[1])[None]))
    angles = context.cos.double(), context.sin.double()
    x, kept = wide.embed_tokens(ids), {}
    position = torch.arange(ids.shape[1])
    for i, layer in enumerate(wide.layers):
        attention = layer.self_attn
        rows = attention.qkv_proj(layer.input_layernorm(x)).unflatten(-1, (-1, 6))
        q = rows[..., :4, :]
        q = rotated(q if attention.q_norm is None else attention.q_norm(q), *angles)
        if KV_FROM[i] is None:
            kept[i] = rotated(rows[..., 4:6, :], *angles), rows[..., 6:, :]
        heads = (y.transpose(1, 2) for y in (q, *kept[i if KV_FROM[i] is None else KV_FROM[i]]))
        distance = position[:, None] - position
        sees = (distance >= 0) & (distance < (attention.sliding_window or 99))
        out = attended(*heads, sees, 6**-0.5)
        x = x + attention.o_proj(out.transpose(1, 2).flatten(-2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    exact = wide.head(wide.norm(x)[:, :-1], labels[:, 1:]).loss
    exact.backward()
    assert relative(loss, exact) < 1e-6
    for name, grad in gradients(wide).items():
        assert relative(found[name], grad) < 1e-5, name


PLANS = [
    *(MemoryPlan.uniform(LAYERS, policy) for policy in POLICIES),
    MemoryPlan.of(["input", "all", "attention", "input", "no_gate_up", "all"]),
    MemoryPlan.of(["all", "input", "input", "attention", "input", "input"]),
]


@pairwise(
    inputs=["plain", "packed", "padded"],
    frozen=[None, "layers.0.", "layers.2.", "qkv_proj"],
    host=[False, True],
)
def test_every_plan_has_the_gradients_of_none(
    model: Sharing, inputs: str, frozen: str | None, host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_LEAST_BYTES", 1)
    given: dict[str, Tensor] = {}
    if inputs == "packed":
        given = {"position_ids": torch.arange(20)[None] % 8}
    elif inputs == "padded":
        given = {"attention_mask": (torch.arange(20) > torch.tensor([[3], [-1]])).long()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    loss, expected = step(model, **given)
    for plan in PLANS:
        if host:
            layers = (LayerPlan(layer.policy, i != 3) for i, layer in enumerate(plan.layers))
            plan = MemoryPlan(tuple(layers), host_budget=64 * 2**20)
            store = Offloader("cpu", plan.host_budget, copies=LateCopies())
            model._offloaders[torch.device("cpu")] = store
        found_loss, found = step(model, plan, **given)
        assert not host or store.stats().peak > 0
        assert torch.equal(found_loss, loss), plan
        assert all(torch.equal(found[name], expected[name]) for name in expected), plan


def test_two_forwards_before_their_backwards(model: Sharing) -> None:
    """A forward in between must not change what the recomputation of the first one reads."""
    first, second = (tokens(seed=seed) for seed in (0, 1))
    for plan in PLANS:
        expected = []
        model.apply_memory_plan(None)
        for ids, labels in (first, second):
            model.zero_grad()
            model(ids, labels=labels).loss.backward()
            expected.append(gradients(model))
        model.apply_memory_plan(plan)
        losses = [model(ids, labels=labels).loss for ids, labels in (first, second)]
        for loss, wanted in zip(losses, expected):
            model.zero_grad()
            loss.backward(retain_graph=True)
            model.zero_grad()
            loss.backward()
            assert all(torch.equal(g, wanted[name]) for name, g in gradients(model).items()), plan


@pytest.mark.parametrize(
    ("per_block", "policy"),
    [(False, "attention"), pytest.param(True, "input", marks=pytest.mark.long)],
)
def test_compiled(model: Sharing, per_block: bool, policy: Any) -> None:
    model.layers = nn.ModuleList([model.layers[0], model.layers[2]])
    ids, labels = tokens()
    _, expected = step(model)
    model.zero_grad()
    model.set_memory_plan(MemoryPlan.uniform(2, policy))
    torch._dynamo.reset()
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    if per_block:
        for layer in model.layers:
            layer.compile(**options)
        model(ids, labels=labels).loss.backward()
    else:
        torch.compile(model, **options)(ids, labels=labels).loss.backward()
    for name, grad in gradients(model).items():
        assert relative(grad, expected[name]) < 1e-5, name


def test_what_cannot_be_right_is_refused() -> None:
    x, angles = torch.randn(1, 3, 24), ll.RotaryEmbedding(6)(torch.arange(3)[None])
    taker = ll.Attention(24, 4, 2, 6, layer_index=3, kv_from=1)
    with pytest.raises(ValueError, match=r"layer 3 takes .* layer 1, .* set shares_kv=True there"):
        taker(x, ll.AttentionContext(*angles))
    context = ll.AttentionContext(*angles)
    ll.Attention(24, 4, 4, 6, layer_index=1, shares_kv=True)(x, context)
    with pytest.raises(ValueError, match="layer 1 has 4 key heads of size 6, but layer 3"):
        taker(x, context)
    for wrong in ({"shares_kv": True}, {"k_norm": ll.RMSNorm(6)}):
        with pytest.raises(ValueError, match=r"kv_from=1 .* leave out shares_kv and k_norm"):
            ll.Attention(24, 4, 2, 6, kv_from=1, **wrong)
