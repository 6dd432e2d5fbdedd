"""LigerLlama beside transformers' Llama with the same weights, and what the model promises."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import ConfigError, LigerLlama, LlamaConfig
from ligermodels.layers import HeadOutput
from tests.layers.saved import SavedBytes
from tests.models.pairs import (
    PAD,
    gradients,
    native_gradients,
    relative,
    tiny_model,
    tiny_pair,
    tokens,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "no groups, head_dim from hidden": {"num_key_value_heads": None, "head_dim": None},
    "no padding token, other theta": {"pad_token_id": None, "rope_theta": 5e5},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "yarn rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}


def step(model: torch.nn.Module, ids: Tensor, **inputs: Any) -> Any:
    model.zero_grad()
    out = model(ids, **inputs)
    out.loss.backward()
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_transformers(variant: str) -> None:
    hf, ours = tiny_pair(**VARIANTS[variant])
    ids, labels = tokens()
    expected, out = step(hf, ids, labels=labels), step(ours, ids, labels=labels)
    assert relative(ours.head.logits(ours(ids)), expected.logits) <= 1e-5
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert out.num_valid.item() == (labels[:, 1:] != -100).sum().item()
    ours_grads, reference = gradients(ours), native_gradients(hf)
    assert ours_grads.keys() == reference.keys()
    for name in reference:
        assert relative(ours_grads[name], reference[name]) <= 1e-4, name
    if VARIANTS[variant] == {}:
        assert ours.embed_tokens.weight.grad[PAD].abs().sum() == 0


def test_loss_is_the_forward_loss() -> None:
    model = tiny_model()
    ids, labels = tokens()
    out = model(ids, labels=labels)
    assert isinstance(out, HeadOutput)
    assert torch.equal(model.loss(ids, labels), out.loss)
    smooth = model.loss(ids, labels, label_smoothing=0.1, z_loss=1e-3)
    logits = model.head.logits(model(ids))[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    z = 1e-3 * logits.logsumexp(-1).square()[targets != -100].mean()
    assert smooth.item() == pytest.approx((expected + z).item(), rel=1e-5)


def test_loss_of_num_items_in_batch() -> None:
    """As HF's Trainer passes it where steps accumulate gradients."""
    model = tiny_model()
    ids, labels = tokens()
    expected = model(ids, labels=labels, normalizer=50).loss
    for count in (50, torch.tensor(50)):
        assert torch.equal(model(ids, labels=labels, num_items_in_batch=count)[0], expected)
    with pytest.raises(ValueError, match="normalizer and num_items_in_batch"):
        model(ids, labels=labels, num_items_in_batch=50, normalizer=50)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_mask(side: str) -> None:
    """As in transformers, with position_ids 0, 1, 2, ... whatever the mask."""
    hf, ours = tiny_pair()
    ids, labels = tokens(3, 14)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 9)):
        where = slice(0, padding) if side == "left" else slice(14 - padding, 14)
        mask[row, where] = 0
    labels = labels.masked_fill(mask == 0, -100)
    expected = step(hf, ids, labels=labels, attention_mask=mask)
    out = step(ours, ids, labels=labels, attention_mask=mask)
    real = mask.bool()
    logits = ours.head.logits(ours(ids, attention_mask=mask))
    assert relative(logits[real], expected.logits[real]) <= 1e-5
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    ours_grads, reference = gradients(ours), native_gradients(hf)
    for name in reference:
        assert relative(ours_grads[name], reference[name]) <= 1e-4, name


@pytest.mark.parametrize("given", ["position_ids", "cu_seqlens"])
def test_packed_documents_equal_separate_runs(given: str) -> None:
    model = tiny_model()
    ids, labels = tokens(1, 24)
    parts = [slice(0, 9), slice(9, 10), slice(10, 24)]
    separate = [model(ids[:, part], labels=labels[:, part], reduction="sum") for part in parts]
    valid = sum(out.num_valid for out in separate)
    expected = sum(out.loss for out in separate) / valid
    expected.backward()
    reference = gradients(model)
    boundaries: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 9, 10, 24]), "max_seqlen": 14}
    if given == "position_ids":
        positions = torch.cat([torch.arange(part.stop - part.start) for part in parts])
        boundaries = {"position_ids": positions[None]}
    out = step(model, ids, labels=labels, **boundaries)
    assert out.num_valid == valid
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, grad in gradients(model).items():
        assert relative(grad, reference[name]) <= 1e-5, name
    hidden = model(ids, **boundaries)
    for part in parts:
        assert relative(hidden[:, part], model(ids[:, part])) <= 1e-5


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({"cu_seqlens": torch.tensor([0, 8])}, "batch must be 1"),
        ({"max_seqlen": 8}, "cu_seqlens, which is missing"),
        ({"attention_mask": torch.ones(2, 7)}, "attention_mask"),
        ({"position_ids": torch.arange(7)[None]}, "position_ids"),
        ({"labels": torch.zeros(2, 7, dtype=torch.int64)}, "differ in shape"),
        ({"normalizer": 3}, "need labels"),
        ({"labels": torch.zeros(2, 8, dtype=torch.int64), "reduction": "average"}, "reduction"),
    ],
)
def test_contradictory_inputs_are_refused(inputs: dict[str, Any], complaint: str) -> None:
    ids, _ = tokens(2, 8)
    with pytest.raises(ValueError, match=complaint):
        tiny_model()(ids, **inputs)


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 0), (1, 2, 3)])
def test_input_ids_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        tiny_model()(torch.zeros(shape, dtype=torch.int64))


def test_label_outside_the_vocabulary_is_refused() -> None:
    ids, labels = tokens(1, 8)
    labels[0, 4] = 131
    with pytest.raises(IndexError):
        tiny_model()(ids, labels=labels)


def test_meta_device_allocates_nothing() -> None:
    with torch.device("meta"):
        model = LigerLlama(LlamaConfig.preset("llama-3.1-405b"))
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert not any(tensor.untyped_storage().data_ptr() for tensor in tensors)


def test_meta_model_materialises_with_exact_frequencies() -> None:
    model = tiny_model()
    with torch.device("meta"):
        empty = LigerLlama(model.config)
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    ids, _ = tokens()
    assert torch.equal(empty(ids), model(ids))


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("llama-1-7b", 6_738_415_616),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("codellama-7b", 6_738_546_688),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.3-70b", 70_553_706_496),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_presets_have_the_published_parameter_counts(preset: str, published: int) -> None:
    with torch.device("meta"):
        model = LigerLlama(LlamaConfig.preset(preset))
    assert sum(p.numel() for p in model.parameters()) == published


def test_every_preset_is_counted() -> None:
    counted = test_presets_have_the_published_parameter_counts.pytestmark[0].args[1]
    assert {name for name, _ in counted} == set(LlamaConfig.presets)


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-9b.*llama-3-8b"):
        LlamaConfig.preset("llama-3-9b")
    assert LlamaConfig.preset("llama-3-8b", num_hidden_layers=2).num_hidden_layers == 2


def test_activation_checkpointing() -> None:
    """Same gradients; between blocks one hidden state is kept and nothing within them."""
    model = tiny_model()
    ids, labels = tokens()
    with SavedBytes(model) as plain:
        step(model, ids, labels=labels)
    reference = gradients(model)
    model.activation_checkpointing_enable()
    model.zero_grad()
    with SavedBytes(model) as checkpointed:
        out = model(ids, labels=labels)
    out.loss.backward()
    for name, grad in gradients(model).items():
        assert relative(grad, reference[name]) <= 1e-6, name
    per_block = model.config.hidden_size * 4 * ids.numel()
    blocks = model.config.num_hidden_layers
    shallow = tiny_model(num_hidden_layers=1)
    shallow.activation_checkpointing_enable()
    with SavedBytes(shallow) as rest:
        shallow(ids, labels=labels)
    assert checkpointed.total - rest.total == (blocks - 1) * per_block
    assert checkpointed.total < 0.5 * plain.total
    model.activation_checkpointing_disable()
    with SavedBytes(model) as again:
        model(ids, labels=labels)
    assert again.total == plain.total


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("inputs", ["plain", "packed", "options", "tied"])
def test_compiled_equals_eager(inputs: str, checkpointing: bool) -> None:
    model = tiny_model(num_hidden_layers=2, tie_word_embeddings=inputs == "tied")
    ids, labels = tokens()
    assert (labels == -100).any()
    options: dict[str, Any] = {}
    if inputs == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(13)])
        options = {"position_ids": positions.expand(2, -1)}
    elif inputs == "options":
        options = {"label_smoothing": 0.1, "z_loss": 1e-3, "normalizer": 17, "chunk_size": 16}
    expected = step(model, ids, labels=labels, **options)
    reference = gradients(model)
    if checkpointing:
        model.activation_checkpointing_enable()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    out = compiled(ids, labels=labels, **options)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert out.num_valid == expected.num_valid
    for name, grad in gradients(model).items():
        assert relative(grad, reference[name]) <= 1e-5, name


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager() -> None:
    model = tiny_model(num_hidden_layers=1)
    ids, labels = tokens()
    expected = step(model, ids, labels=labels)
    reference = gradients(model)
    torch._dynamo.reset()
    model.zero_grad()
    out = torch.compile(model, fullgraph=True)(ids, labels=labels)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    for name, grad in gradients(model).items():
        assert relative(grad, reference[name]) <= 1e-5, name


class Lowered(torch.nn.Module):
    """A copy of a model that computes in bfloat16: its weights converted, or under autocast."""

    def __init__(self, model: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.inner = copy.deepcopy(model)
        self.autocast = how == "autocast"
        if not self.autocast:
            self.inner.to(torch.bfloat16)
            if hasattr(model, "lm_head"):
                # `to` rounds rope's frequencies, which `from_pretrained(dtype=...)` does not.
                self.inner.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.inner(*args, **kwargs)

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.inner.head.logits(self.inner(ids))


def check_ratios(what: str, ratios: list[float]) -> None:
    """Ours over transformers': no worse on average, nor much worse on any input."""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert mean <= 1.05, f"{what}: geometric mean {mean:.3f} of {ratios}"
    assert max(ratios) <= 1.3, f"{what}: {ratios}"


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_low_precision_error_beside_transformers(how: str) -> None:
    hf, ours = tiny_pair()
    hf_low, ours_low = Lowered(hf, how), Lowered(ours, how)
    logits, grads = [], []
    for seed in range(12):
        ids, labels = tokens(2, 32, seed=seed)
        exact = step(hf, ids, labels=labels)
        theirs = step(hf_low, ids, labels=labels)
        step(ours_low, ids, labels=labels)
        reference = native_gradients(hf)

        def distance(low: dict[str, Tensor], reference: dict[str, Tensor] = reference) -> float:
            return math.hypot(*(relative(low[name], reference[name]) for name in reference))

        ours_grads = gradients(ours_low.inner)
        assert {g.dtype for g in ours_grads.values()} == {ours_low.inner.norm.weight.dtype}
        grads.append(distance(ours_grads) / distance(native_gradients(hf_low.inner)))
        error = relative(ours_low.logits(ids), exact.logits)
        logits.append(error / relative(theirs.logits, exact.logits))
    check_ratios("logits", logits)
    check_ratios("gradients", grads)


def test_kernels_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    report = model.kernels()
    assert report["rms_norm"] == "torch (cpu tensors use plain PyTorch)"
    assert report["linear_cross_entropy"].startswith("chunked torch")
    monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    assert model.kernels()["glu"] == "triton (LIGERMODELS_BACKEND=triton)"
    monkeypatch.setenv("LIGERMODELS_BACKEND", "torch")
    ids, _ = tokens()
    assert model.kernels()["rope"] == "torch (LIGERMODELS_BACKEND=torch)"
    model(ids)
    monkeypatch.setenv("LIGERMODELS_BACKEND", "cuda")
    with pytest.raises(ValueError, match="LIGERMODELS_BACKEND='cuda'"):
        model.kernels()
    with pytest.raises(ValueError, match="LIGERMODELS_BACKEND='cuda'"):
        model(ids)


LORA_TARGETS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "proj"]


def test_lora() -> None:
    """peft's wrappers are called in every projection and in the head, train, and merge back."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = tiny_model()
    ids, labels = tokens()
    before = model(ids, labels=labels).loss.item()
    config = peft.LoraConfig(target_modules=LORA_TARGETS, r=4)
    lora = peft.get_peft_model(model, config)
    assert lora(input_ids=ids, labels=labels).loss.item() == pytest.approx(before, rel=1e-6)
    swapped = model.kernels()["norm + linear, linear + rope, glu + linear"]
    assert "layers.0.self_attn.qkv_proj" in swapped
    assert "chunk by chunk" in model.kernels()["linear_cross_entropy"]

    trained = {name: p for name, p in lora.named_parameters() if p.requires_grad}
    # a and b for four projections in each of three blocks, and for the head.
    assert len(trained) == 2 * (4 * 3 + 1)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = lora(input_ids=ids, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.2
    assert all(p.detach().abs().sum() > 0 for name, p in trained.items() if "lora_B" in name)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    logits = model.head.logits(model(ids))
    merged = lora.merge_and_unload()
    assert merged.kernels()["norm + linear, linear + rope, glu + linear"] == "fused"
    assert relative(merged.head.logits(merged(ids)), logits) <= 1e-5


@pytest.mark.slow
def test_smollm2_parity(smollm2: Any) -> None:
    """The real checkpoint in float32: logits, loss, every gradient, the padding token included."""
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ours = LigerLlama.from_hf(smollm2, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 49152, (2, 24), generator=generator)
    ids[:, 5] = ids[1, 11] = hf.config.pad_token_id
    labels = ids.clone()
    labels[0, :4] = -100
    expected, out = step(hf, ids, labels=labels), step(ours, ids, labels=labels)
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    with torch.no_grad():
        assert relative(ours.head.logits(ours(ids)), expected.logits) <= 1e-5
    ours_grads, reference = gradients(ours), native_gradients(hf)
    assert ours_grads.keys() == reference.keys()
    for name in reference:
        assert relative(ours_grads[name], reference[name]) <= 1e-4, name


@pytest.mark.slow
def test_smollm2_bfloat16_error(smollm2: Any) -> None:
    from transformers import LlamaForCausalLM

    from ligermodels import Tokenizer

    exact = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    ours = LigerLlama.from_hf(smollm2, dtype=torch.bfloat16)
    # Passages of a hundred tokens and more: of a sentence the ratio depends on the kind of CPU.
    text = (EXAMPLES / "persuasion-heldout.txt").read_text()
    tokens = torch.tensor(Tokenizer.from_hf(smollm2).encode(text))
    ratios = []
    with torch.no_grad():
        for ids in tokens[: 10 * 128].view(10, 1, 128):
            reference = exact(ids).logits
            error = relative(ours.head.logits(ours(ids)), reference)
            ratios.append(error / relative(theirs(ids).logits, reference))
    check_ratios("logits", ratios)
