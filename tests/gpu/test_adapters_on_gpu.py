"""Runs with adapters on a GPU: bf16-mixed and bf16, whole and quantised weights."""

from __future__ import annotations

import pytest
import torch

from ligermodels import LigerLlama
from ligermodels.adapters import QuantizedLinear
from ligermodels.adapters.adapted_model import add_adapters, quantize
from tests.training.tiny_run import (
    forget,
    make_checkpoint,
    make_text,
    run,
    same,
    tensors,
    tiny_config,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return make_checkpoint(folder / "tiny"), make_text(folder / "words.txt")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("load_in", [None, "4bit", "8bit"])
def test_a_resumed_run_is_the_same(inputs, tmp_path, load_in, precision) -> None:
    """The dropout follows from the step, also in blocks that are recomputed."""
    options = {
        "max_steps": 6,
        "save_steps": 3,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "load_in": load_in,
        "precision": precision,
        "learning_rate": 0.02,
        "device": "cuda",
        "activation_checkpointing": load_in == "4bit",
    }
    whole = run(*inputs, tmp_path / "whole", **options)
    cut = run(*inputs, tmp_path / "cut", **options)
    forget(cut.output_dir, 6)
    again = run(*inputs, tmp_path / "cut", resume=True, **options)
    assert same(tensors(whole.model_dir), tensors(again.model_dir))
    assert whole.eval_after["eval_perplexity"] < 0.9 * whole.eval_before["eval_perplexity"]


def test_the_gpu_converts_to_the_same_codes() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4096, 300, dtype=torch.bfloat16)
    for bits in (4, 8):
        here, there = (QuantizedLinear(linear, bits, device=place) for place in ("cpu", "cuda"))
        for name, value in here.state_dict().items():
            assert value.equal(there.state_dict()[name].cpu()), (bits, name)
        for dtype in (torch.float32, torch.bfloat16):
            assert here.dequantized(dtype).equal(there.dequantized(dtype).cpu())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_plan_and_compiled_layers_give_the_same_gradients(bits) -> None:
    torch.manual_seed(0)
    model = LigerLlama(tiny_config()).to("cuda", torch.bfloat16)
    quantize(model, bits, torch.device("cuda"))
    add_adapters(model, 4, 8.0)
    ids = torch.randint(258, (2, 128), device="cuda")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    plan = model.plan_memory(2, 128, "1GiB")
    model.set_memory_plan(plan)
    for ours, theirs in zip(gradients(), expected):
        assert torch.equal(ours, theirs)
    model.activation_checkpointing_enable()
    for ours, theirs in zip(gradients(), expected):
        assert torch.equal(ours, theirs)
    model.set_memory_plan(None)
    for layer in model.layers:
        layer.compile()
    for ours, theirs in zip(gradients(), expected):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())
