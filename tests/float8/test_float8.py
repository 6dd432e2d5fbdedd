"""Float8 linears: their gradients, and that everything else stays as it was."""

from __future__ import annotations

import copy
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import (
    AutoLiger,
    CheckpointError,
    ConfigError,
    LayerPlan,
    LigerLlama,
    LlamaConfig,
    MemoryPlan,
    float8,
)
from ligermodels.adapters import LoraLinear, QuantizedLinear, add_adapters
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.converters.verify import compare, verify
from ligermodels.float8 import Float8Linear, delayed
from ligermodels.kernels import float8_linear as float8_linear_module
from ligermodels.kernels.float8_cast import absolute_maximum, float8_cast, float8_product
from ligermodels.kernels.float8_linear import RECIPES, float8_linear
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.simulate import simulate
from ligermodels.models.kernel_report import decoding_obstacle
from tests.layers.saved import SavedBytes
from tests.memory.step_bytes import error_of_prediction

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# The relative error of a gradient of the model below, in norm. Each value of e4m3 is 2.6% off in
# the mean of squares, and of e5m2 5%; bfloat16 0.17%. Errors of three products per layer add up.
BOUNDS = {"tensorwise": 0.16, "delayed": 0.16, "rowwise": 0.12, "blocks": 0.12}
DOWN = "model.layers.0.mlp.down_proj.weight"
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}  # for blocks


def every(name: str, linear: torch.nn.Linear) -> bool:
    return True


def model_of(dtype: torch.dtype = torch.bfloat16, **changes: int) -> LigerLlama:
    torch.manual_seed(0)
    return LigerLlama(LlamaConfig(**SIZES | changes)).to(dtype)


def tokens(rows: int = 2, length: int = 29) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (rows, length), generator=draw())


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients(recipe) -> None:
    """Against float64, and each beside the same in bfloat16."""
    blocks = recipe == "blocks"
    model, ids = model_of(**WIDE if blocks else {}), tokens()
    exact = gradients(copy.deepcopy(model).double(), ids)
    plain = gradients(model, ids)
    names = float8.convert(model, recipe, filter=every)
    assert len(names) == (4 if blocks else 8)
    assert all(isinstance(model.get_submodule(name), Float8Linear) for name in names)
    found = gradients(model, ids)
    if recipe == "delayed":  # the scales of the second step are from the first
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        found = gradients(model, ids)
    for name, grad in exact.items():
        assert error(plain[name], grad) < error(found[name], grad) < BOUNDS[recipe], name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(3, 7, 48), (1, 48), (0, 48)])
def test_products_of_one_linear(recipe, shape) -> None:
    """Rows that are no multiple of 16, biases, and an input that is kept as it is."""
    x = torch.randn(shape, generator=draw())
    weight, bias = torch.randn(64, 48, generator=draw()), torch.randn(64, generator=draw())
    upstream = torch.randn(*shape[:-1], 64, generator=draw())
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    out = torch.nn.functional.linear(*leaves)
    exact = out, *torch.autograd.grad(out, leaves, upstream)
    for keeps_input in (False, True):
        out = float8_linear(*leaves, RECIPES[recipe], keeps_input=keeps_input)
        found = out, *torch.autograd.grad(out, leaves, upstream)
        for one, other in zip(found, exact):
            torch.testing.assert_close(one.norm(), other.norm(), rtol=0.08, atol=1e-6)
            assert one.shape == other.shape and (one - other).norm() <= 0.08 * other.norm()


def test_outliers_and_zeros() -> None:
    """A large value costs others their precision only where they share its scale."""
    weight = torch.randn(64, 256, generator=draw())
    start = weight[:, :64].contiguous()
    x = torch.randn(32, 256, generator=draw())

    def errors() -> dict[str, float]:
        exact = x[1:].double() @ weight.double().t()
        return {
            name: error(float8_linear(x, weight, None, recipe)[1:], exact)
            for name, recipe in RECIPES.items()
        }

    x[0, 5] = 1e6
    found = errors()
    assert max(found["rowwise"], found["blocks"]) < 0.06 and found["tensorwise"] > 0.5
    x[0, 5] = 0  # an outlier channel, which the weights barely read
    x[:, 3] *= 1e5
    weight[:, 3] *= 1e-5
    found = errors()
    assert found["blocks"] < 0.8 * found["rowwise"]
    for recipe in RECIPES.values():
        zeros, leaf = torch.zeros(32, 64, requires_grad=True), start.clone().requires_grad_()
        out = float8_linear(zeros, leaf, None, recipe)
        out.backward(torch.zeros_like(out))
        assert not out.any() and not zeros.grad.any() and not leaf.grad.any()
        x = torch.randn(32, 64, generator=draw())
        x[3, 3] = torch.nan
        assert float8_linear(x, start, None, recipe)[3].isnan().all()


def test_state_and_checkpoint_stay(tmp_path) -> None:
    plain, model = model_of(), model_of()
    before = dict(model.named_parameters())
    float8.convert(model, filter=every)
    assert all(before[name] is weight for name, weight in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.save_hf(tmp_path / "plain")
    model.save_hf(tmp_path / "float8")
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "float8" / file.name).read_bytes(), file.name
    loaded = LigerLlama.from_hf(tmp_path / "float8")
    float8.convert(loaded, filter=every)
    assert torch.equal(loaded(tokens()), model(tokens()))


def test_new_weights_count_at_once() -> None:
    """Whatever writes them, and inside of `weights_cast_once` an optimizer or load_state_dict."""
    model, ids = model_of(), tokens()
    float8.convert(model, filter=every)

    def fresh() -> torch.Tensor:
        other = model_of()
        other.load_state_dict(model.state_dict())
        float8.convert(other, filter=every)
        return other(ids)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for inside in (False, True):
        gradients(model, ids)
        if inside:
            with float8.weights_cast_once(model):
                before = model(ids)
                optimizer.step()
                assert not torch.equal(model(ids), before) and torch.equal(model(ids), fresh())
                model.load_state_dict(model_of().state_dict())
                assert torch.equal(model(ids), fresh())
        optimizer.step()
        assert torch.equal(model(ids), fresh())
        for weight in model.parameters():
            weight.data.mul_(2)
        assert torch.equal(model(ids), fresh())


@pytest.mark.parametrize("policy", ["input", pytest.param("all", marks=pytest.mark.long)])
def test_a_compiled_model_calls_its_linears(policy) -> None:
    """What is traced are the other parts."""
    model, ids = model_of(torch.float32, num_hidden_layers=1), tokens()
    float8.convert(model, filter=every)
    model.set_memory_plan(MemoryPlan.uniform(1, policy))
    expected = gradients(model, ids)
    found = gradients(torch.compile(model, backend="aot_eager"), ids)
    for name, grad in expected.items():
        assert error(found[f"_orig_mod.{name}"], grad) < 0.02, name


def test_few_rows_without_gradients() -> None:
    """They are multiplied as before the conversion, and many are not; casts that are kept count."""
    model, plain = model_of(), model_of()
    float8.convert(model, filter=every)
    ids, many = tokens(), tokens(36)
    with torch.no_grad():
        assert torch.equal(model(ids), plain(ids))
        assert not torch.equal(model(many), plain(many))
        with float8.weights_cast_once(model):
            assert not torch.equal(model(ids), plain(ids))
    assert not torch.equal(model(ids), plain(ids))


def test_gradient_accumulation(monkeypatch) -> None:
    """Casts that are made once give the same gradients as casts of each micro-batch."""
    model, ids = model_of(), tokens(4)
    float8.convert(model, filter=every)
    model.zero_grad()
    for rows in ids.split(2):
        model(rows, labels=rows).loss.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    with float8.weights_cast_once(model):
        for rows in ids.split(2):
            model(rows, labels=rows).loss.backward()
        with monkeypatch.context() as patch:
            patch.setenv("LIGERMODELS_BACKEND", "triton")
            assert "a graph would outlive" in str(decoding_obstacle(model))
    assert all(torch.equal(w.grad, expected[name]) for name, w in model.named_parameters())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_frozen_weights_are_cast_once_for_all_steps(recipe, monkeypatch) -> None:
    """And again after a change that PyTorch counts, or in another place."""
    model, ids = model_of(), tokens()
    float8.convert(model, recipe, filter=every)
    frozen = {m.weight.data_ptr() for m in model.modules() if isinstance(m, Float8Linear)}
    add_adapters(model, 4, 8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    made = []

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        made.extend([x] if x.data_ptr() in frozen else [])
        return float8_cast(x, *args, **options)

    monkeypatch.setattr(float8_linear_module, "float8_cast", counted)
    expected = gradients(model, ids)
    for _ in range(2):
        made.clear()
        for _ in range(3):
            with float8.weights_cast_once(model):
                found = gradients(model, ids)
            optimizer.step()
        # The input of the first linear needs no gradient.
        assert len(made) == 2 * 8 - (recipe == "tensorwise")
        if recipe == "tensorwise":
            assert all(torch.equal(found[name], grad) for name, grad in expected.items())
        with torch.no_grad():
            for weight in model.layers.parameters():
                weight.copy_(weight.clone())
    clone = copy.deepcopy(model)
    for weight in clone.layers.parameters():
        weight.data *= 2
    assert clone.layers[0].mlp.down_proj.base_layer._casts is None
    with float8.weights_cast_once(clone), float8.weights_cast_once(model):
        assert not torch.equal(clone(ids), model(ids))


def test_no_weight_is_multiplied_with_the_casts_of_another() -> None:
    """Of one that was trained meanwhile, that has its place, or that has moved."""
    model, memory = model_of(), torch.randn(128, 64).numpy()
    float8.convert(model, filter=every)
    model.requires_grad_(False)
    linear, x = model.layers[0].mlp.gate_up_proj, torch.randn(8, 64)

    def output(model: torch.nn.Module) -> torch.Tensor:
        with float8.weights_cast_once(model):
            return model.layers[0].mlp.gate_up_proj(x)

    for _ in range(2):  # both weights have the same address and version
        linear.weight = torch.nn.Parameter(torch.from_numpy(memory), requires_grad=False)
        assert torch.equal(output(model), output(copy.deepcopy(model)))
        memory *= 2
    linear.weight.requires_grad_(True)
    linear(x).sum().backward()
    torch.optim.AdamW([linear.weight], 1.0, fused=True).step()
    linear.weight.requires_grad_(False)
    assert torch.equal(output(model), output(copy.deepcopy(model)))
    assert linear._casts is not None and linear.to("meta")._casts is None


@pytest.mark.parametrize("policy", ["no_gate_up", "attention", "input"])
def test_recomputation(policy, monkeypatch) -> None:
    """Each policy computes the same gradients, bit for bit, and no block's last product again."""
    model, ids = model_of(), tokens()
    float8.convert(model, filter=every)
    expected = gradients(model, ids)
    model.set_memory_plan(MemoryPlan.uniform(2, policy))
    made = []

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        made.append(args)
        return float8_product(*args, **options)

    monkeypatch.setattr(float8_linear_module, "float8_product", counted)
    found = gradients(model, ids)
    assert len(made) == 2 * (12 + (1 if policy == "no_gate_up" else 3))
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_less_is_kept_for_backward() -> None:
    """The fused ops keep what they keep in bfloat16; a linear alone keeps half of its input."""
    ids = tokens(2, 32)
    kept = []
    for convert in (False, True):
        model = model_of()
        if convert:
            float8.convert(model, filter=every)
        with SavedBytes(model) as saved:
            model(ids, labels=ids)
        kept.append(saved.total)
    assert kept[1] == kept[0]
    linear, x = torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(32, 64).bfloat16()
    float8.convert(torch.nn.Sequential(linear), filter=every)
    with SavedBytes(linear, x) as saved:
        linear(x)
    assert saved.total == 32 * 64 + 4


@pytest.mark.parametrize("convert_first", [True, False])
def test_lora_on_top(convert_first) -> None:
    model, ids = model_of(), tokens()
    if convert_first:
        float8.convert(model, filter=every)
    add_adapters(model, 4, 8.0)
    if not convert_first:
        float8.convert(model, filter=every)
    assert isinstance(model.layers[0].mlp.down_proj.base_layer, Float8Linear)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_b.normal_(0, 0.02, generator=draw())
    found = gradients(model, ids)
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = torch.nn.Linear
    expected = gradients(exact, ids)
    assert found.keys() == expected.keys() and all("lora" in name for name in found)
    assert all(error(found[name], grad) < 0.25 for name, grad in expected.items())


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mx'; expected one of 'tensorwise', 'delayed', 'row"):
        float8.convert(model_of(), "mx")
    with pytest.raises(ConfigError, match="64 to 128 are not multiples of 512"):
        float8.convert(model_of(), "blocks", filter=every)
    with pytest.raises(ConfigError, match=r"o_proj is in float16.*bfloat16|float16"):
        float8.convert(model_of(torch.float16), filter=every)
    with pytest.raises(ConfigError, match="fewer than 1024 features"):
        float8.convert(model_of())
    model = model_of()
    model.layers[-1].mlp.down_proj.half()
    with pytest.raises(ConfigError, match="down_proj is in float16"):
        float8.convert(model, filter=every)
    assert not any(isinstance(m, float8.Float8Linear) for m in model.modules())
    model = model_of()
    layer = model.layers[0].self_attn
    layer.o_proj = QuantizedLinear(layer.o_proj, 8)
    layer.qkv_proj.weight = torch.nn.Parameter(layer.qkv_proj.weight[:120].clone())
    layer.qkv_proj.out_features = 120
    names = float8.convert(model, filter=lambda name, linear: not name.endswith("down_proj"))
    assert names == [
        "layers.0.mlp.gate_up_proj",
        *(f"layers.1.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj")),
        "layers.1.mlp.gate_up_proj",
    ]
    told = model.kernels()["linear"]
    assert told.startswith("float8 (gate_up_proj, o_proj, qkv_proj: 4 linears); not ")
    assert "layers.0.self_attn.qkv_proj (64 to 120 are not multiples of 16)" in told
    assert "linear" not in model_of().kernels()
    names = float8.convert(torch.nn.ModuleDict({"model": model_of()}), filter=every)
    assert len(names) == 8 and all(name.startswith("model.layers.") for name in names)
    linear = model_of().layers[0].mlp.down_proj
    float8.convert(torch.nn.Sequential(linear), filter=every)
    with pytest.raises(ConfigError, match="no plain linear of the model"):
        float8.convert(model)
    with pytest.raises(ConfigError, match="input in float16"):
        linear(torch.zeros(1, 128, dtype=torch.float16))


def test_gpus_without_float8_are_refused(monkeypatch) -> None:
    module = sys.modules[float8.convert.__module__]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, recipe in (((8, 6), "tensorwise"), ((8, 9), "blocks")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        words = rf"a GPU has compute capability {capability[0]}\.{capability[1]}; products in"
        for device in ("cuda", "meta"):
            with pytest.raises(ConfigError, match=words):
                module.check_device(torch.device(device), recipe)
    module.check_device(torch.device("cuda"), "rowwise")


def test_the_scales_that_kernels_record(monkeypatch) -> None:
    """The fused ops hand on the largest value of what they write, forward and backward.

    What is left are the weights, attention's output, and two of the four upstream gradients.
    """
    model, ids = model_of(), tokens()
    float8.convert(model, filter=every)
    seen = []

    def counted(x: torch.Tensor, axis: str = "tensor") -> torch.Tensor:
        seen.append(x.shape)
        return absolute_maximum(x, axis)

    monkeypatch.setattr(float8_linear_module, "absolute_maximum", counted)
    found = gradients(model, ids)
    recorded = len(seen)
    products = float8_linear_module.Float8Products
    monkeypatch.setattr(products, "new_grad_amax", lambda self, x: None)
    expected = gradients(model, ids)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert (recorded, len(seen) - recorded) == (2 * (4 + 1 + 3), 2 * (4 + 4 + 4))


def step_of(model: LigerLlama, ids: torch.Tensor, labels: torch.Tensor | None = None) -> list:
    """Take a step without changing a weight; return the gradients."""
    model.zero_grad()
    model(ids, labels=ids if labels is None else labels).loss.backward()
    found = [weight.grad.clone() for weight in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    return found


def test_delayed_scales() -> None:
    """The first step is exact, later ones do without a pass for scales, and a run resumes."""
    ids = tokens()
    exact, model, resumed = model_of(), model_of(), model_of()
    float8.convert(exact, filter=every)
    for each in (model, resumed):
        float8.convert(each, "delayed", filter=every)
    first = step_of(model, ids)
    assert all(map(torch.equal, first, step_of(exact, ids)))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(float8_linear_module, "absolute_maximum")
        second = step_of(model, ids)
    # Twice the range leaves the values what they were, but for those that become subnormal.
    names = [name for name, _ in model.named_parameters()]
    assert all(error(*pair) < 0.03 for pair in zip(second, first)), names
    state = {name: rows.clone() for name, rows in float8.scales(model).items()}
    float8.load_scales(resumed, state)
    for labels in (tokens(2, 29), torch.full_like(ids, -100), ids):
        assert all(map(torch.equal, step_of(model, ids, labels), step_of(resumed, ids, labels)))
    assert not any(map(any, float8.overflows(model).values()))
    with torch.no_grad():  # evaluation has scales of its own
        assert torch.equal(model(ids), exact(ids))
    cut = {name: rows[:2] for name, rows in state.items()}
    rounded = {name: rows.bfloat16() for name, rows in state.items()}
    for other, wrong in ((exact, state), (model, {}), (model, cut), (model, rounded)):
        with pytest.raises(CheckpointError, match=r"other linears.*: layers\.0\.mlp\.down_proj, l"):
            float8.load_scales(other, wrong)


def test_operands_that_kernels_write_in_float8(monkeypatch) -> None:
    """With known scales, a norm's and the activation's output, and the gradient of gate_up.

    They have the bits that casts would have.
    """
    cast: list[tuple[int, ...]] = []

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        cast.append(x.shape)
        return float8_cast(x, *args, **options)

    monkeypatch.setattr(float8_linear_module, "float8_cast", counted)
    found, products = [], float8_linear_module.Float8Products
    for direct in (True, False):
        model, ids = model_of(), tokens()
        float8.convert(model, "delayed", filter=every)
        step_of(model, ids)
        if not direct:
            monkeypatch.setattr(products, "offer", lambda *_: None)
            monkeypatch.setattr(products, "target", lambda *_: (None, None))
        cast.clear()
        found.append(step_of(model, ids))
        # Eight weights and their transposes are cast, and in each layer the x of o_proj, the turned
        # x of three linears and three gradients.
        assert len(cast) == 2 * 8 + 2 * (1 + 3 + 3) + (0 if direct else 2 * 4)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("policy", ["no_gate_up", "attention", "input"])
def test_delayed_scales_of_blocks_that_run_again(policy) -> None:
    found = []
    for plan in (None, MemoryPlan.uniform(2, policy)):
        model, ids = model_of(), tokens()
        float8.convert(model, "delayed", filter=every)
        if plan is not None:
            model.set_memory_plan(plan)
        found.append([step_of(model, ids), step_of(model, ids), [*float8.scales(model).values()]])
    for one, other in zip(*found):
        assert all(map(torch.equal, one, other))


def test_delayed_scales_of_models_made_elsewhere(monkeypatch) -> None:
    """A model from another process follows its optimizers; `to_empty` leaves no values."""
    model, file = model_of(), io.BytesIO()
    float8.convert(model, "delayed", filter=every)
    step_of(model, tokens())
    torch.save(model, file)
    file.seek(0)
    hook = Mock()
    monkeypatch.setattr(delayed, "register_optimizer_step_post_hook", hook)
    delayed.follow_optimizers.cache_clear()  # a new process has none
    torch.load(file, weights_only=False)(tokens())
    hook.assert_called_once()
    model.to("meta")._apply(lambda x: torch.full_like(x, 7, device="cpu"))
    assert not any(rows.any() for rows in float8.scales(model).values())


def test_delayed_scales_of_unusual_steps() -> None:
    """Steps without a gradient, with NaN, and with gradients that explode and vanish."""
    model, ids = model_of(), tokens()
    float8.convert(model, "delayed", filter=every)
    ignored = torch.full_like(ids, -100)
    for _ in range(2):  # a scale of zeros would be no scale
        assert not any(grad.any() for grad in step_of(model, ids, ignored))
    exact = step_of(model, ids)
    before = {name: rows[2, :2].clone() for name, rows in float8.scales(model).items()}
    assert all(error(*pair) < 0.03 for pair in zip(step_of(model, ids), exact))
    step_of(model, ids, ignored)
    for name, rows in float8.scales(model).items():
        assert torch.equal(rows[2, :2], before[name]), name

    def scaled_step(factor: float) -> list[torch.Tensor]:
        model.zero_grad()
        (model(ids, labels=ids).loss * factor).backward()
        found = [weight.grad / factor for weight in model.parameters()]
        other = torch.zeros(1, requires_grad=True)  # no weight may become NaN
        torch.optim.SGD([other]).step()
        return found

    for factor in (1e4, 1e-4):
        jump = scaled_step(factor)  # saturates, or becomes small numbers
        assert all(grad.isfinite().all() for grad in jump)
        assert any(each[2] for each in float8.overflows(model).values())
        assert all(error(*pair) < 0.15 for pair in zip(scaled_step(factor), exact)), factor
    scaled_step(1.0)
    assert all(grad.isnan().any() for grad in scaled_step(float("nan")))
    assert all(error(*pair) < 0.15 for pair in zip(scaled_step(1.0), exact))


def test_float8_checkpoint(tmp_path: Path) -> None:
    """Weights are rounded to e4m3, and transformers finds them with compressed-tensors."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2}
    model = model_of(**sizes, num_key_value_heads=1)
    with pytest.raises(ConfigError, match="no linear computes in float8"):
        model.save_hf(tmp_path, float8=True)
    float8.convert(model, filter=lambda name, linear: not name.startswith("layers.1.mlp"))
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[3] = 0
    model.save_hf(tmp_path, float8=True, max_shard_size="100kB")
    model.save_hf(tmp_path / "plain")
    files = [*tmp_path.glob("*.safetensors")]
    assert len(files) > 2
    stored = {name: x for file in files for name, x in load_file(file).items()}
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for name, weight in plain.items():
        if name.endswith("proj.weight") and not name.startswith("model.layers.1.mlp"):
            values, scale = stored[name].float(), stored.pop(f"{name}_scale").float()
            assert scale.shape == (len(weight), 1) and values.abs().max() == 448
            off = (values * scale - weight.float()).abs()  # half a step, which is 2^-9 near zero
            assert (off <= weight.float().abs() / 16 + scale / 1024).all(), name
            stored[name] = (values * scale).bfloat16()
        else:
            assert torch.equal(stored[name], weight), name
    assert stored.keys() == plain.keys()
    loaded = AutoLiger.from_hf(tmp_path)
    assert loaded.dtype == torch.bfloat16 and verify(tmp_path, LigerLlama).ok
    loaded.save_hf(tmp_path / "loaded")
    again = load_file(tmp_path / "loaded" / "model.safetensors")
    assert all(torch.equal(again[name], x) for name, x in stored.items())
    assert compare(tmp_path, tmp_path / "loaded", LigerLlama).ok
    wide = LigerLlama.from_hf(tmp_path, dtype=torch.float32)
    assert torch.equal(wide.layers[0].mlp.down_proj.weight, stored[DOWN].float())
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=config
    )
    found = dict(theirs.named_parameters())
    assert all(torch.equal(found[name], x) for name, x in stored.items())


def test_parts_of_a_float8_checkpoint(tmp_path, monkeypatch) -> None:
    """A rank reads its rows or columns, and the scales; a wrong scale is named."""
    model = model_of(hidden_size=256, intermediate_size=384)
    float8.convert(model, filter=every)
    model.save_hf(tmp_path, float8=True)
    entries = {entry.name: entry for entry in LigerLlama.weight_map(model.config)}
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.plan(LigerLlama.weight_map(model.config)).keys() == entries.keys()
    fill = Mock(wraps=SafetensorsFile._fill)
    monkeypatch.setattr(SafetensorsFile, "_fill", lambda *args: fill(*args))
    entry = entries["layers.0.mlp.down_proj.weight"]
    whole = torch.empty(256, 384)
    checkpoint.read(entry, whole)
    for first, column in ((0, 0), (128, 0), (0, 192)):
        fill.reset_mock()
        out = torch.empty(256, 192) if column else torch.empty(128, 384)
        checkpoint.read(entry, out, first, column)
        assert torch.equal(out, whole[first : first + len(out), column : column + out.shape[1]])
        read = sum(len(call.args[-1]) for call in fill.call_args_list)
        assert read == out.numel() + 2 * 256
    held = load_file(tmp_path / "model.safetensors")
    scale = held.pop(f"{DOWN}_scale")
    for wrong in ({}, {f"{DOWN}_scale": scale[:1]}):
        save_file(held | wrong, tmp_path / "model.safetensors")
        words = f"model.safetensors: '{DOWN}' is in float8, but '{DOWN}_scale' has no scale for ea"
        with pytest.raises(CheckpointError, match=words):
            LigerLlama.from_hf(tmp_path)
    file = tmp_path / "config.json"
    for wrong in ({"format": "pack-quantized"}, {"transform_config": {"config_groups": {}}}):
        config = json.loads(file.read_text())
        config["quantization_config"] |= wrong
        file.write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="quantised checkpoints \\('compressed-tensors'\\)"):
            LigerLlama.from_hf(tmp_path)


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("recipe", RECIPES)
def test_predicted_memory(recipe) -> None:
    """A plan knows what float8 linears keep, and that their products take half of the time."""
    model = model_of(torch.float32, **WIDE if recipe == "blocks" else {})
    device = torch.device("cuda")
    flops = [simulate(model, 1, 64, device=device).work("forward").product_flops]
    float8.convert(model, recipe, filter=every)
    flops.append(simulate(model, 1, 64, device=device).work("forward").product_flops)
    head = 2 * 64 * model.head.weight.numel()
    assert flops[1] - head == (flops[0] - head) / 2
    for policy in ("no_gate_up", "input") if recipe == "delayed" else ("all",):
        model.set_memory_plan(MemoryPlan.uniform(len(model.layers), policy))
        assert abs(error_of_prediction(model, seq=16)) < 0.005
        simulate(model, 1, 64, device=device, autocast=torch.bfloat16)


def kept_bytes(model: LigerLlama) -> int:
    """Return what the layers keep of a step with 1 x 64 tokens on a GPU."""
    phases = simulate(model, 1, 64, device=torch.device("cuda")).phases
    layers = (phase for name, phase in phases.items() if name.startswith("forward of layer"))
    return sum(phase.after - phase.before for phase in layers)


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("policy", POLICIES)
def test_activations_kept_in_float8(policy) -> None:
    """They take fewer bytes than in bfloat16, and gradients are hardly farther from float64's."""
    model, ids = model_of(num_hidden_layers=1), tokens()
    exact = gradients(copy.deepcopy(model).double(), ids)
    model.set_memory_plan(MemoryPlan.uniform(1, policy))
    plain = kept_bytes(model)
    with pytest.raises(ConfigError, match="no linear of the model computes in float8"):
        model.set_memory_plan(MemoryPlan.uniform(1, LayerPlan(policy, float8=True)))
    for recipe in ("delayed", "tensorwise", "rowwise")[: 3 if policy == "all" else 1]:
        model = model_of(num_hidden_layers=1)
        float8.convert(model, recipe, filter=every)
        before = [step_of(model, ids), step_of(model, ids)][-1]
        model.set_memory_plan(MemoryPlan.uniform(1, LayerPlan(policy, float8=True)))
        assert kept_bytes(model) < plain
        assert abs(error_of_prediction(model, seq=16)) < 0.005
        found = step_of(model, ids)
        assert not all(map(torch.equal, found, before))
        for name, one, other in zip(exact, found, before):
            assert error(one, exact[name]) < 1.2 * error(other, exact[name]), (recipe, name)
