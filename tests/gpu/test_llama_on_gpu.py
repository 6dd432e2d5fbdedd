"""Llama on a GPU: the fused path against plain PyTorch, transformers, and itself compiled."""

import math

import pytest
import torch

from ligermodels import LigerLlama, LlamaConfig
from ligermodels.layers.masks import DocumentMask, VarlenMask

pytestmark = pytest.mark.gpu

CONFIG = {
    "vocab_size": 32003,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "max_position_embeddings": 2048,
}


def make(dtype: torch.dtype = torch.float32, **changes) -> LigerLlama:
    torch.manual_seed(0)
    return LigerLlama(LlamaConfig(**{**CONFIG, **changes})).to("cuda", dtype)


def batch(rows: int = 2, seq: int = 200, vocab: int = 32003) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, vocab, (rows, seq), device="cuda")
    ids[:, 7] = CONFIG["pad_token_id"]
    labels = ids.clone()
    labels[0, :50] = -100
    return ids, labels


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


def gradients(model: torch.nn.Module, forward, *args, **kwargs):
    model.zero_grad()
    output = forward(*args, **kwargs)
    output.loss.backward()
    return output.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("tied", [False, True])
def test_triton_equals_plain_pytorch(tied, monkeypatch):
    model = make(tie_word_embeddings=tied)
    ids, labels = batch()
    assert model.kernels()["rms_norm"].startswith("triton")
    loss, grads = gradients(model, model, ids, labels=labels)
    monkeypatch.setenv("LIGERMODELS_BACKEND", "torch")
    assert model.kernels()["rms_norm"].startswith("torch")
    plain_loss, plain_grads = gradients(model, model, ids, labels=labels)
    assert abs(loss - plain_loss) < 1e-5 * plain_loss
    for name, grad in plain_grads.items():
        assert relative(grads[name], grad) < 1e-4, name


def test_packed_documents_equal_separate_ones():
    lengths = [70, 1, 129]
    ids, labels = batch(1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        model = make(dtype)
        separate = torch.cat([model(part) for part in ids.split(lengths, dim=1)], 1)
        calls = [{"position_ids": positions}, {"cu_seqlens": ends}]
        if dtype == torch.bfloat16:
            calls.append({"cu_seqlens": ends, "max_seqlen": max(lengths)})
        for options in calls:
            assert relative(model(ids, **options), separate) < bound, (dtype, options.keys())
            _loss, grads = gradients(model, model, ids, labels=labels, **options)
            pieces = zip(ids.split(lengths, 1), labels.split(lengths, 1))
            model.zero_grad()
            outputs = [model(i, labels=t, reduction="sum") for i, t in pieces]
            valid = sum(output.num_valid for output in outputs)
            (sum(output.loss for output in outputs) / valid).backward()
            for name, parameter in model.named_parameters():
                assert relative(grads[name], parameter.grad) < bound, (dtype, name)


def test_no_dense_mask_for_packed_rows():
    model = make(torch.bfloat16)
    ids, _ = batch(1)
    positions = torch.arange(200, device="cuda")[None] % 100
    ends = torch.tensor([0, 100, 200], device="cuda")
    by_position, _ = model._context(ids, positions, None, None, None, None)
    assert isinstance(by_position.mask, DocumentMask)
    by_length, _ = model._context(ids, None, ends, 100, None, None)
    assert isinstance(by_length.mask, VarlenMask)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_equals_eager(packed):
    model = make()
    ids, labels = batch()
    options = {"position_ids": (torch.arange(200, device="cuda") % 77)[None]} if packed else {}
    loss, grads = gradients(model, model, ids, labels=labels, **options)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    compiled_loss, compiled_grads = gradients(model, compiled, ids, labels=labels, **options)
    assert abs(loss - compiled_loss) < 1e-5 * loss
    for name, grad in grads.items():
        assert relative(compiled_grads[name], grad) < 1e-4, name


def test_training_step_in_a_cuda_graph():
    model = make(torch.bfloat16)
    ids, labels = batch()

    def step():
        loss = model(ids, labels=labels).loss
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    fresh, fresh_labels = batch()
    ids.copy_(fresh)
    labels.copy_(fresh_labels)
    graph.replay()
    replayed = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss, grads = gradients(model, model, ids, labels=labels)
    assert torch.equal(captured, loss)
    for name, grad in grads.items():
        # The embedding's gradient is a sum of atomics, whose order may differ.
        assert relative(replayed[name], grad) < 1e-2, name


def test_no_host_synchronisation():
    model = make(torch.bfloat16)
    ids, labels = batch()
    gradients(model, model, ids, labels=labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(ids, labels=labels, label_smoothing=0.1, z_loss=1e-4).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_target_outside_the_vocabulary_is_nan_in_its_row():
    model = make(torch.bfloat16)
    hidden = torch.randn(4, 576, device="cuda", dtype=torch.bfloat16)
    targets = torch.tensor([1, 32003, -5, -100], device="cuda")
    loss = model.head(hidden, targets, reduction="none").loss
    assert loss.isnan().tolist() == [False, True, True, False]


def test_bfloat16_errors_beside_transformers():
    transformers = pytest.importorskip("transformers")
    ratios = []
    for seed in range(8):
        torch.manual_seed(seed)
        hf_config = transformers.LlamaConfig(**CONFIG, tie_word_embeddings=False)
        exact = transformers.LlamaForCausalLM(hf_config).cuda().float()
        for parameter in exact.parameters():
            parameter.data = parameter.data.bfloat16().float()
        rounded = transformers.LlamaForCausalLM(hf_config).cuda().to(torch.bfloat16)
        rounded.model.rotary_emb = exact.model.rotary_emb
        rounded.load_state_dict(exact.state_dict())
        ours = make(torch.bfloat16)
        native = ours.state_dict()
        hf = exact.state_dict()
        for name in native:
            parts = {
                "qkv_proj": ("q_proj", "k_proj", "v_proj"),
                "gate_up_proj": ("gate_proj", "up_proj"),
            }
            packed = next((key for key in parts if key in name), None)
            source = "lm_head.weight" if name == "head.proj.weight" else f"model.{name}"
            if packed:
                value = torch.cat([hf[source.replace(packed, part)] for part in parts[packed]])
            else:
                value = hf[source]
            native[name].copy_(value)
        ids, _ = batch()
        with torch.no_grad():
            reference = exact(ids).logits
            error = relative(ours.head.logits(ours(ids)), reference)
            ratios.append(error / relative(rounded(ids).logits, reference))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"bf16 logits, ours / transformers: mean {mean:.3f}, worst {max(ratios):.3f}")
    assert mean <= 1.05 and max(ratios) <= 1.3
