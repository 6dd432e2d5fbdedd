"""Tests of every model's contract, on LigerLlama: losses, inputs, meta device, compilation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig as LlamaConfigHF
from transformers import LlamaForCausalLM

from ligermodels import DecoderModel, KVCache, LigerLlama, LlamaConfig, MemoryPlan
from ligermodels.converters.hf_config import to_hf
from ligermodels.layers import (
    Attention,
    AttentionMask,
    CrossAttention,
    HeadOutput,
    RMSNorm,
    pre_norm,
)
from ligermodels.layers.recompute import POLICIES
from tests.models.pairs import PAD, TINY, gradients, relative, step, tiny_model, tokens


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return the targets of rows of one document."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def test_loss_is_the_forward_loss() -> None:
    model = tiny_model()
    ids, labels = tokens()
    out = step(model, ids, labels=labels)
    assert isinstance(out, HeadOutput)
    assert out.num_valid.item() == (labels[:, 1:] != -100).sum().item()
    assert model.embed_tokens.weight.grad[PAD].abs().sum() == 0
    assert torch.equal(model.loss(ids, labels), out.loss)
    smooth = model.loss(ids, labels, label_smoothing=0.1, z_loss=1e-3)
    logits = model.head.logits(model(ids))[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    z = 1e-3 * logits.logsumexp(-1).square()[targets != -100].mean()
    assert smooth.item() == pytest.approx((expected + z).item(), rel=1e-5)


def test_a_forward_in_steps_equals_it() -> None:
    """Also packed, and with a cache, which advances."""
    model, (ids, _) = tiny_model(), tokens(2, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    context = model.prepare_context(ids, position_ids=positions)
    hidden, _ = model.run_layers(model.embed_tokens(ids), context)
    assert torch.equal(hidden, model(ids, position_ids=positions))
    cache, again = (KVCache.of(model, 2, 8) for _ in range(2))
    for part in ids.split(4, 1):
        context = model.prepare_context(part, cache=cache)
        hidden, _ = model.run_layers(model.embed_tokens(part), context)
        assert torch.equal(hidden, model(part, cache=again))
    assert cache.length == again.length == 8


def test_an_output_says_where_the_logits_are() -> None:
    ids, labels = tokens()
    out = tiny_model()(ids, labels=labels)
    with pytest.raises(AttributeError, match=r"call model\.head\.logits\(hidden\), where"):
        _ = out.logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_has_the_names_of_transformers(tied: bool) -> None:
    config = LlamaConfig(**TINY | {"tie_word_embeddings": tied})
    model = LigerLlama(config).bfloat16()
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    with torch.device("meta"):
        assert LigerLlama(config).device.type == "meta"
    model.layers[0].requires_grad_(False)
    theirs = LlamaForCausalLM(LlamaConfigHF(**to_hf(config)))
    theirs.model.layers[0].requires_grad_(False)
    for embeddings in (False, True):
        for trainable in (False, True):
            options = {"only_trainable": trainable, "exclude_embeddings": embeddings}
            assert model.num_parameters(**options) == theirs.num_parameters(**options), options


def test_embeddings_in_the_place_of_tokens() -> None:
    model = tiny_model()
    ids, labels = tokens()
    expected = step(model, ids, labels=labels)
    reference = gradients(model)
    model.zero_grad()
    out = model(inputs_embeds=model.embed_tokens(ids), labels=labels)
    out.loss.backward()
    assert torch.equal(out.loss, expected.loss)
    assert all(torch.equal(grad, reference[name]) for name, grad in gradients(model).items())
    embeds = model.embed_tokens(ids).detach().requires_grad_()
    model.activation_checkpointing_enable()
    model.loss(None, labels, inputs_embeds=embeds).backward()
    assert embeds.grad is not None and embeds.grad.count_nonzero() > 0


def test_a_prefix_sees_both_directions() -> None:
    model = tiny_model()
    ids, _ = tokens(2, 8)
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 100 + 3
    prefix = torch.tensor([5, 3])
    differs = (model(ids, prefix_lengths=prefix) != model(changed, prefix_lengths=prefix)).any(-1)
    assert differs.tolist() == [[True] * 8, [False] * 4 + [True] * 4]


class Third(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        x, residual = self.block(*inputs)
        return x, residual, 1e-3 * (x + residual).square().mean()


class WithThird(LigerLlama):
    """A Llama whose layers also return a scalar, from the mean square of their output."""

    def make_block(self, layer_index: int) -> torch.nn.Module:
        return Third(super().make_block(layer_index))


def with_third() -> WithThird:
    torch.manual_seed(0)
    return WithThird(LlamaConfig(**TINY, initializer_range=0.2))


def test_a_traced_model_computes_other_shapes() -> None:
    model, (first, _) = tiny_model(), tokens()
    traced = torch.jit.trace(model, (first,), check_trace=False)
    ids = torch.randint(3, TINY["vocab_size"], (3, 5), generator=torch.Generator().manual_seed(1))
    expected = model(ids)
    expected.sum().backward()
    used = [p for p in model.parameters() if p.grad is not None]  # all but the head
    want = [p.grad for p in used]
    model.zero_grad()
    found = traced(ids)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    for parameter, gradient in zip(used, want, strict=True):
        assert relative(parameter.grad, gradient) <= 1e-6


def test_transforms_of_functions_are_refused() -> None:
    """torch refuses them; without one, torch.func.functional_call works."""
    model, (ids, labels) = tiny_model(), tokens()
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (ids,), {"labels": labels}).loss

    torch.testing.assert_close(loss(weights), model.loss(ids, labels))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(loss)(weights)


def test_layers_may_return_an_auxiliary_loss() -> None:
    model = with_third()
    ids, labels = tokens()
    out = model(ids, labels=labels)
    assert out.auxiliary_loss is not None and out.auxiliary_loss > 1e-3
    alone = model.head(model(ids), shifted(labels))
    torch.testing.assert_close(out.loss, alone.loss + out.auxiliary_loss)
    for reduction in ("sum", "none"):
        apart = model(ids, labels=labels, reduction=reduction)
        assert torch.equal(apart.auxiliary_loss, out.auxiliary_loss)
        expected = model.head(model(ids), shifted(labels), reduction=reduction).loss
        assert torch.equal(apart.loss, expected)
    assert tiny_model()(ids, labels=labels).auxiliary_loss is None


def test_the_auxiliary_loss_of_accumulated_steps_is_a_mean() -> None:
    model = with_third()
    ids, labels = tokens(4)
    count = (labels[:, 1:] != -100).sum()
    parts = [model(i, labels=x, normalizer=count) for i, x in zip(ids.split(2), labels.split(2))]
    shares = [part.num_valid / count for part in parts]
    main = [part.loss - s * part.auxiliary_loss for part, s in zip(parts, shares)]
    torch.testing.assert_close(
        sum(main), model.head(model(ids), shifted(labels)).loss, rtol=1e-5, atol=1e-6
    )
    assert sum(shares).item() == pytest.approx(1)


def test_parameters_that_a_module_holds_itself_are_initialised() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.full((50, 40), float("nan")))
            self.scale = torch.nn.Parameter(torch.full((3,), 7.0))

    class Itself(Own):
        def reset_parameters(self) -> None:
            torch.nn.init.constant_(self.matrix, 2.0)

    model = tiny_model(tie_word_embeddings=False)
    model.embed_tokens.to("meta")  # as offloading leaves it
    model.layers[0].own, model.layers[1].own = Own(), Itself()
    model.initialize_weights()
    assert model.layers[0].own.matrix.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.layers[0].own.scale, torch.full((3,), 7.0))
    assert torch.equal(model.layers[1].own.matrix, torch.full((50, 40), 2.0))


def test_a_mask_of_ones_on_the_cpu_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), tokens()[0]

    def dense(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask of every pair is made")

    expected = model(ids)
    monkeypatch.setattr(AttentionMask, "dense", dense)
    for dtype in (torch.int64, torch.bool):
        mask = torch.ones(ids.shape, dtype=dtype)
        assert torch.equal(model(ids, attention_mask=mask), expected)
        mask[0, 0] = 0
        with pytest.raises(AssertionError, match="of every pair"):
            model(ids, attention_mask=mask)


class Crossing(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        hidden, heads = TINY["hidden_size"], TINY["num_attention_heads"]
        self.self_attn = Attention(hidden, heads, layer_index=index)
        self.cross_attn = CrossAttention(hidden, heads, memory_size=10)
        self.norm = RMSNorm(hidden)

    def forward(self, x: Any, residual: Any, context: Any) -> tuple[Any, Any]:
        x, residual = self.self_attn(pre_norm(self.norm, x, residual), context)
        x = x + residual
        return x, self.cross_attn(x, context.memory, context.memory_mask)


class WithMemory(DecoderModel):
    def __init__(self) -> None:
        super().__init__(LlamaConfig(**TINY | {"head_dim": 8}))
        self.build(norm=RMSNorm(TINY["hidden_size"]))

    def make_block(self, layer_index: int) -> torch.nn.Module:
        return Crossing(layer_index)


def with_memory() -> tuple[WithMemory, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = WithMemory()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, tokens()[0], torch.randn(2, 6, 10, requires_grad=True)


def test_a_memory_that_does_not_fit_is_refused() -> None:
    model, ids, memory = with_memory()
    for taken, given, complaint in (
        (model, {}, "memory is None; pass memory= to the model"),
        (model, {"memory": memory[:1]}, r"memory has shape \(1, 6, 10\) .* shape \(2, keys"),
        (model, {"memory_mask": torch.ones(2, 6)}, "memory_mask: it needs a memory"),
        (
            model,
            {"memory": memory, "memory_mask": torch.ones(2, 5).bool()},
            r"memory_mask has shape \(2, 5\) .* of shape \(2, 6\)",
        ),
        (
            model,
            {"memory": memory, "memory_mask": torch.ones(2, 6)},
            "float32; expected bool or in",
        ),
        (model, {"memory": memory.double()}, "memory is .*64, but the model's weights are .*32; p"),
        (model, {"memory": memory[..., 1:]}, r"memory has shape \(2, 6, 9\); expected .* 10\)"),
        (model, {"memory": [1.0]}, "memory is a list; expected a tensor"),
        (model, {"memory": memory, "prefix_lengths": 3}, "prefix_lengths is a int; expected a ten"),
        (tiny_model(), {"memory": memory}, "no layer of LigerLlama attends to one"),
    ):
        with pytest.raises(ValueError, match=complaint):
            taken(ids, **given)


def test_build_trains_the_padding_token_if_asked() -> None:
    class Trained(LigerLlama):
        def __init__(self, config: LlamaConfig) -> None:
            DecoderModel.__init__(self, config)
            self.build(norm=RMSNorm(config.hidden_size), trains_padding=True)

    config = LlamaConfig.small()
    ids = torch.full((1, 4), config.pad_token_id)
    for cls, trained in ((LigerLlama, False), (Trained, True)):
        model = cls(config)
        model(ids, labels=ids).loss.backward()
        assert bool(model.embed_tokens.weight.grad[config.pad_token_id].any()) == trained
        assert bool(model.embed_tokens.weight[config.pad_token_id].any()) == trained


@dataclass(kw_only=True)
class LoopedConfig(LlamaConfig):
    model_type = "looped"


class Looped(DecoderModel):
    """A decoder that runs all of its layers twice, arXiv:1807.03819."""

    config_class = LoopedConfig
    make_block = LigerLlama.make_block

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.build(norm=RMSNorm(config.hidden_size))
        self.layers = torch.nn.ModuleList([*self.layers, *self.layers])


def looped() -> Looped:
    torch.manual_seed(0)
    return Looped(LoopedConfig(**TINY, initializer_range=0.2))


@pytest.mark.parametrize("kind", ["auxiliary loss", "memory", "layers that run twice"])
def test_every_memory_plan_has_the_same_gradients(kind: str) -> None:
    options: dict[str, Any] = {}
    (ids, labels), model = tokens(), looped() if "twice" in kind else with_third()
    leaves = [*model.parameters()]
    if kind == "memory":
        model, ids, memory = with_memory()
        options = {"memory": memory, "memory_mask": torch.tensor([[1] * 4 + [0] * 2] * 2)}
        leaves = [memory, *model.parameters()]
    expected = None
    plans = [MemoryPlan.uniform(len(model.layers), policy) for policy in POLICIES]
    if "twice" in kind:
        plans.append(model.plan_memory(*ids.shape, "1GiB"))
    for plan in (None, *plans):
        model.set_memory_plan(plan)
        found = torch.autograd.grad(model(ids, labels=labels, **options).loss, leaves)
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    if kind == "memory":
        assert (found[0][:, :4] != 0).any() and (found[0][:, 4:] == 0).all()
        shorter = model(ids, labels=labels, memory=memory[:, :4]).loss
        torch.testing.assert_close(model(ids, labels=labels, **options).loss, shorter)


@pytest.mark.parametrize("kind", ["memory", "layers that run twice", "with a window, twice"])
def test_generation_continues_as_one_pass_would(kind: str) -> None:
    options: dict[str, Any] = {}
    ids, model = tokens()[0][:, :8], looped()
    if kind == "memory":
        model, _, memory = with_memory()
        mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
        options = {"memory": memory.detach(), "memory_mask": mask}
    for layer in model.layers if "window" in kind else ():
        layer.self_attn.sliding_window = 3
    found = model.generate(ids, max_new_tokens=6, eos_token_id=[], **options)
    for _ in range(6):
        logits = model.head.logits(model(ids, **options)[:, -1])
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, ids)


def test_layers_that_run_several_times_are_saved_once(tmp_path: Path) -> None:
    model, ids = looped(), tokens()[0]
    model.save_hf(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}
    again = Looped.from_hf(tmp_path)
    assert again.layers[0] is again.layers[3] and torch.equal(again(ids), model(ids))
