"""Float8 on a GPU beside what it meets: memory plans, frozen weights, decoding and runs."""

from __future__ import annotations

import gc
import sys
from itertools import product

import pytest
import torch

from ligermodels import LayerPlan, MemoryPlan, float8
from ligermodels.adapters import QuantizedLinear, add_adapters, quantize
from ligermodels.generation.decode_step import StepDecoder
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.simulate import simulate
from tests.gpu.test_float8_on_gpu import model_of, normal, pytestmark
from tests.training.tiny_run import forget, make_checkpoint, make_text, run, same, tensors

__all__ = ["pytestmark"]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blocks", "adapters"])
def test_predicted_memory(recipe) -> None:
    """Of a plan: within 0.5%, beside what other tests of the process have left."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # the first product allocates its own
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    model, ids = model_of(3), torch.randint(2048, (1, 4096), device="cuda")
    if recipe == "adapters":
        quantize(model, "float8", CUDA)
        add_adapters(model, 16, 32.0, dtype=torch.bfloat16)
    else:
        float8.convert(model, recipe)
    found = {}
    levels = [*product((False, True), POLICIES)][: 4 if recipe in ("rowwise", "adapters") else 8]
    for in_float8, policy in levels:
        model.set_memory_plan(MemoryPlan.uniform(3, LayerPlan(policy, float8=in_float8)))
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            model(ids, labels=ids).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()  # scales move on
        peak = torch.cuda.max_memory_allocated() - left
        model.zero_grad(set_to_none=True)
        found[policy, in_float8] = simulate(model, 1, 4096, device=CUDA).peak_bytes / peak
    assert all(0.995 < ratio < 1.005 for ratio in found.values()), found


def test_frozen_weights() -> None:
    """Output and gradient are as near as e4m3 allows, and decoding runs in a graph."""
    linear = torch.nn.Linear(4096, 6144, device="cuda", dtype=torch.bfloat16)
    frozen = QuantizedLinear(linear, "float8")
    x = normal(1000, 4096).requires_grad_()
    grad = normal(1000, 6144, seed=1)
    for ours, theirs in zip(*([y(x)] for y in (frozen, linear))):
        assert (ours - theirs).norm() < 0.06 * theirs.norm()
        one, other = (torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs))
        assert (one - other).norm() < 0.07 * other.norm()
    model = model_of().eval()
    prompt = torch.randint(2048, (2, 33), device="cuda")
    with torch.no_grad():
        exact = model(prompt)
        quantize(model, "float8", CUDA)
        found = model(prompt)
    assert (found - exact).norm() < 0.2 * exact.norm()
    assert model.kernels()["decoding"].startswith("CUDA graph"), model.kernels()
    logits = {}
    with torch.no_grad():
        for captures in (False, True):
            cache = KVCache.of(model, 2, 33)
            model(prompt[:, :25], cache=cache)
            decoder = StepDecoder(model, cache, None, None, captures)
            steps = [decoder(prompt[:, at : at + 1]).clone() for at in range(25, 33)]
            logits[captures] = torch.stack(steps)
    assert decoder.graph is not None and torch.equal(logits[True], logits[False])


@pytest.mark.parametrize(
    "changes",
    [{"float8": "tensorwise"}, {"float8": "delayed"}, {"load_in": "float8", "lora_r": 4}],
    ids=str,
)
def test_a_run(changes, tmp_path, monkeypatch) -> None:
    """It learns, and a resumed run is the same."""
    monkeypatch.setattr(sys.modules[float8.convert.__module__], "SMALL", 16)
    base, text = make_checkpoint(tmp_path / "base"), make_text(tmp_path / "text.txt")
    changes = {**changes, "device": "cuda", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = run(base, text, tmp_path / "whole", **changes)
    assert whole.eval_after["eval_perplexity"] < 0.97 * whole.eval_before["eval_perplexity"]
    run(base, text, tmp_path / "killed", **changes)
    forget(tmp_path / "killed", 6)
    again = run(base, text, tmp_path / "killed", **changes, resume=True)
    assert same(tensors(whole.model_dir), tensors(again.model_dir))
