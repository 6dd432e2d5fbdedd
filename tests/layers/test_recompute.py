"""Checkpointing policies: every family, bitwise the gradients of a model that keeps all."""

from __future__ import annotations

import gc
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ligermodels.adapters.lora import LoraLinear
from ligermodels.layers import GatedMLP, LinearBlock, attention, recompute
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.models.base import DecoderModel
from tests.families import OWN, sampled
from tests.models.pairs import gradients, relative
from tests.models.test_families import batch, make
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("rows_at_once")  # the head is not recomputed
RECOMPUTED = [policy for policy in POLICIES if policy != "all"]
MIXED = ("attention", "all", "no_gate_up")


def run(model: DecoderModel, plan: MemoryPlan | None, **inputs: Any) -> tuple[Tensor, dict]:
    ids, labels = batch()
    model.zero_grad()
    model.set_memory_plan(plan)
    torch.manual_seed(1)  # for dropout
    if "cache" in inputs:
        loss = model(ids, cache=KVCache(model.config, len(ids), 64)).pow(2).sum()
    else:
        loss = model(ids, labels=labels, **inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def packed() -> dict[str, Tensor]:
    return {"position_ids": torch.tensor([[*range(5), *range(6), *range(3)]] * 2)}


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[0, :4] = 0
    return {"attention_mask": mask}


def plain(model: DecoderModel) -> None:
    """Leave the model as it is."""


def lora_with_dropout(model: DecoderModel) -> None:
    model.requires_grad_(False)
    for layer in model.layers:
        mlp = layer.mlp
        if isinstance(layer, LinearBlock):
            places = [(layer.linear_attn, "in_proj"), (layer.linear_attn, "out_proj")]
        else:
            places = [(layer.self_attn, "qkv_proj"), (layer.self_attn, "o_proj")]
        if isinstance(mlp, GatedMLP):  # whose adapters have their own tests
            places += [(mlp, "gate_up_proj"), (mlp, "down_proj")]
        for parent, name in places:
            wrapped = LoraLinear(getattr(parent, name), rank=2, dropout=0.3)
            nn.init.normal_(wrapped.lora_b)
            setattr(parent, name, wrapped)


def frozen(part: str, model: DecoderModel) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)


PARTS = ["qkv_proj", "down_proj", "layers.0", "layers.", "embed_tokens"]
INPUTS: dict[str, Any] = {
    "alone": {},
    "packed": packed(),
    "padded": padded(),
    "cache": {"cache": 1},
}


def fits(inputs: str, model_is: Any) -> bool:
    """A frozen body leaves a cache nothing."""
    return inputs != "cache" or getattr(model_is, "args", None) != ("layers.",)


def freezes_a_kind_of_block(family: str, model_is: Any) -> bool:
    """Frozen parts meet one family of each kind of block."""
    kinds = ("llama", "gemma2", "gemma4_text", "gpt_oss", "qwen3_5_text", "qwen3_moe")
    return family in kinds or not hasattr(model_is, "args")


@pairwise(
    fits,
    freezes_a_kind_of_block,
    family=sampled(OWN),
    inputs=INPUTS,
    model_is=[plain, lora_with_dropout, *(partial(frozen, part) for part in PARTS)],
    autocast=[False, True],
)
def test_gradients_are_bitwise_those_of_no_plan(
    family: str, inputs: str, model_is: Any, autocast: bool
) -> None:
    torch.manual_seed(0)
    model = make(family)
    model_is(model)
    draw = random.Random(f"{family} {inputs} {autocast}")
    plans = [MemoryPlan.uniform(3, draw.choice(RECOMPUTED)), MemoryPlan.of(MIXED)]
    plans.append(MemoryPlan.of(draw.choices(POLICIES, k=3)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, expected = run(model, None, **INPUTS[inputs])
        for plan in plans:
            found_loss, found = run(model, plan, **INPUTS[inputs])
            assert torch.equal(found_loss, loss) and found.keys() == expected.keys(), plan
            assert all(torch.equal(found[name], expected[name]) for name in expected), plan


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_a_plan_holds_from_the_next_forward_on(family: str) -> None:
    """Backward computes a layer again with the plan of its forward; tiles only reorder a sum."""
    model = make(family).double()
    _, expected = run(model, None)
    ids, labels = batch()
    plans = [None, *(MemoryPlan.uniform(3, policy) for policy in POLICIES)]
    plans += [MemoryPlan.uniform(3, LayerPlan(policy, tile=5)) for policy in POLICIES]
    for then, now in zip(plans, plans[1:] + plans[:1]):
        model.zero_grad()
        model.set_memory_plan(then)
        loss = model(ids, labels=labels).loss
        model.set_memory_plan(now)
        loss.backward()
        for name, grad in gradients(model).items():
            assert relative(grad, expected[name]) <= 1e-13, (then, now, name)


def calls_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    calls: list[int] = []
    original = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


class Products(TorchDispatchMode):
    """Counts the products x W^T that are really computed, by the name of the projection."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.names = {p.untyped_storage()._cdata: n for n, p in layers.named_parameters()}
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            weight = args[-1]
            name = self.names.get(weight.untyped_storage()._cdata)
            if name is not None and weight.stride(0) == 1:  # W^T; backward uses W
                self.count[name.rsplit(".", 2)[-2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_what_backward_computes_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the calls of attention, and the products of a layer's first and last projection."""
    model = make(family)
    attends = calls_of(monkeypatch, attention, "attend")
    # The norm after the MLP needs the last product in backward.
    last = 2 if family == "gemma2" else 1
    for policy, attention_calls, qkv, gate_up, down in (
        ("all", 1, 1, 1, 1),
        ("no_gate_up", 1, 1, 2, 1),
        ("attention", 1, 2, 2, last),
        ("input", 2, 2, 2, last),
    ):
        attends.clear()
        with Products(model.layers) as products:
            run(model, MemoryPlan.uniform(3, policy))
        assert len(attends) == 3 * attention_calls, policy
        found = tuple(products.count[f"{name}_proj"] / 3 for name in ("qkv", "gate_up", "down"))
        assert found == (qkv, gate_up, down), policy


def test_backward_twice_and_no_backward() -> None:
    model = make("llama")
    ids, labels = batch()
    _, expected = run(model, None)
    for policy in RECOMPUTED:
        model.set_memory_plan(MemoryPlan.uniform(3, policy))
        model.zero_grad()
        model(ids, labels=labels)  # without backward
        loss = model(ids, labels=labels).loss
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert all(torch.equal(g, expected[name]) for name, g in gradients(model).items()), policy
        assert recompute._active.kept is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_without_backward_leaves_nothing(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    model.set_memory_plan(MemoryPlan.uniform(3, policy))
    ids, labels = batch()
    outputs = []
    attend = attention.attend

    def seen(*args: Any, **kwargs: Any) -> Tensor:
        out = attend(*args, **kwargs)
        outputs.append(StorageWeakRef(out.untyped_storage()))
        return out

    monkeypatch.setattr(attention, "attend", seen)
    loss = model(ids, labels=labels).loss
    # This backward does not reach attention.
    torch.autograd.grad(loss, [model.layers[2].mlp.down_proj.weight])
    model(ids)
    assert len(outputs) >= 6
    del loss
    gc.collect()
    assert all(output.expired() for output in outputs)


# A compilation takes seconds. test_attention_shared.py and tests/models/test_families.py compile a
# model that recomputes its layers in every run.
@pytest.mark.long
@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("family", sampled(OWN))
def test_compiled(per_block: bool, family: str) -> None:
    plan = MemoryPlan.of(RECOMPUTED)
    model = make(family)
    _, expected = run(model, None)
    ids, labels = batch()
    model.zero_grad()
    model.set_memory_plan(plan)
    torch._dynamo.reset()
    if per_block:
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        model(ids, labels=labels).loss.backward()
    else:
        torch.compile(model, backend="aot_eager", fullgraph=True)(
            ids, labels=labels
        ).loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "lora"])
def test_selective_checkpointing_may_keep_products(family: str) -> None:
    """PyTorch's second forward gets the stored tensor again, so the first one leaves it alone."""
    model = make("llama" if family == "lora" else family)
    if family == "lora":
        lora_with_dropout(model)
        model.eval()
    ids, labels = batch()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(model(ids, labels=labels).loss, trained)
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default]
    for layer in model.layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, kept),
        )
    found = torch.autograd.grad(model(ids, labels=labels).loss, trained)
    assert all(map(torch.equal, found, expected))


class Returns(nn.Module):
    """A block that returns what it is told to."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, x: Tensor, residual: Tensor | None, context: Any) -> Any:
        return self.out(x)


@pytest.mark.parametrize("policy", ["all", "input"])
def test_a_block_that_returns_no_pair_is_told_what_to_return(policy: Any) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    for out, complaint in (
        (lambda x: x, r"Returns returned a tensor \(2, 3, 4\); a block returns a pair \(x, resid"),
        (lambda x: (x, 3.0), r"a tensor \(2, 3, 4\), float; a block returns a pair"),
        (lambda x: (x, x[:, :1]), r"a tensor \(2, 1, 4\); .* of tensors \(2, 3, 4\)"),
        (lambda x: None, "NoneType; a block returns"),
        (lambda x: (x, None, 0.5), "NoneType, float; .* and a third tensor is for the model's aux"),
        (lambda x: (), r"Returns returned nothing; a block returns"),
    ):
        with pytest.raises(ValueError, match=complaint):
            recompute.run_layer(Returns(out), x, None, None, policy)
    out, residual = recompute.run_layer(Returns(lambda x: (x, None)), x, None, None, policy)
    assert torch.equal(out, x) and residual is None
