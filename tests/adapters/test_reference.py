"""Reference models: adapters off, frozen copies, and what a frozen body keeps for backward."""

from __future__ import annotations

import pytest
import torch

from ligermodels.adapters import quantize
from ligermodels.adapters.reference import (
    WithoutAdapters,
    adapters_off,
    frozen_copy,
    token_log_probs,
)
from ligermodels.errors import ConfigError
from ligermodels.memory.plan import MemoryPlan
from tests.tiny_models import VOCAB, random_model


def some_ids() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def test_token_log_probs() -> None:
    model, ids = random_model("llama"), some_ids()
    labels = ids.clone()
    labels[:, :4] = -100
    found = token_log_probs(model, ids, labels)
    every = torch.log_softmax(model.head.logits(model(ids)), -1)
    expected = every[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert found.requires_grad and found.shape == ids.shape
    torch.testing.assert_close(found[:, 3:-1], expected[:, 3:])
    assert found[:, :3].eq(0).all() and found[:, -1].eq(0).all()
    assert not torch.signbit(found[:, :3]).any()


def test_adapters_off() -> None:
    peft = pytest.importorskip("peft")
    model, ids = random_model("llama"), some_ids()
    before = model(ids)
    config = peft.LoraConfig(target_modules=["qkv_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model)
    assert not torch.allclose(adapted(ids), before, atol=1e-3)
    with pytest.raises(KeyError), adapters_off(adapted):
        torch.testing.assert_close(adapted(ids), before)
        raise KeyError
    assert torch.equal(WithoutAdapters(adapted)(ids), before)
    assert not torch.allclose(adapted(ids), before, atol=1e-3)
    layer = next(m for m in adapted.modules() if hasattr(m, "enable_adapters"))
    layer.enable_adapters(False)  # one that was off before stays off
    with adapters_off(adapted):
        pass
    assert layer.disable_adapters
    with (
        pytest.raises(ConfigError, match="no adapters to switch off"),
        adapters_off(random_model("llama")),
    ):
        pass


def test_a_frozen_copy_has_8_bits_in_experts() -> None:
    model, ids = random_model("gpt_oss"), some_ids()
    frozen, exact = frozen_copy(model), token_log_probs(model, ids, ids)
    quantize(frozen, 8, torch.device("cpu"))
    assert not any(p.requires_grad for p in frozen.parameters())
    error = (token_log_probs(frozen, ids, ids) - exact).abs().mean()
    assert 0 < error < 0.1 * exact.abs().mean()


def test_frozen_copies() -> None:
    model, ids = random_model("gemma2"), some_ids()  # which has a tied head
    model.set_memory_plan(MemoryPlan.uniform(3, "input"))
    exact = token_log_probs(model, ids, ids)
    scale = exact.abs().mean()
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.05)):
        frozen = frozen_copy(model, dtype)
        assert type(frozen) is type(model) and not frozen.training
        assert not any(p.requires_grad for p in frozen.parameters())
        assert frozen.memory_plan is None and model.memory_plan is not None
        found = token_log_probs(frozen, ids, ids)
        assert not found.requires_grad
        assert (found - exact).abs().mean() < bound * scale
        shared = {p.data_ptr() for p in model.parameters()}
        assert shared.isdisjoint(x.data_ptr() for x in frozen.state_dict().values())
        assert frozen.head.weight is frozen.embed_tokens.weight
