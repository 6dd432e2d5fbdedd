"""Tests of models on a GPU: results, packing, memory, torch.compile and CUDA graphs."""

import pytest
import torch

from ligermodels.adapters.adapted_model import add_adapters
from ligermodels.layers import AttentionMask
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from tests.families import DECODERS
from tests.gpu.synchronisation import captured, no_synchronisation
from tests.models.pairs import relative

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


each_family = pytest.mark.parametrize("family", DECODERS)


def make(dtype: torch.dtype = torch.float32, family: str = "llama", **changes) -> DecoderModel:
    torch.manual_seed(0)
    cls = families()[family]
    config = cls.config_class(**{**CONFIG, **DECODERS[family].gpu, **changes})
    model = cls(config).to("cuda", dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
        if family == "gemma4_text" and "q_norm" in name:
            # Nothing else scales the scores, which would be about 20: float32 has four digits then.
            parameter.data *= len(parameter) ** -0.5
        if name.endswith("A_log"):
            # By default exp(A_log) is up to 16, and such a head forgets all before a token. Then
            # one head of few terms has nearly all of the gradients of dt_bias and A_log, which may
            # cancel to a tenth of their terms.
            parameter.data.uniform_(-3, -1)
    return model


def every_expert(family: str) -> dict[str, int]:
    """Return the field by which each token gets all experts, as rounding could choose others."""
    config = families()[family].config_class(**DECODERS[family].gpu)
    field = getattr(config, "experts_field", None)
    return {} if field is None else {"num_experts_per_tok": getattr(config, field)}


def batch(rows: int = 2, seq: int = 200, vocab: int = 32003) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, vocab, (rows, seq), device="cuda")
    ids[:, 7] = CONFIG["pad_token_id"]
    labels = ids.clone()
    labels[0, :50] = -100
    return ids, labels


def gradients(model: torch.nn.Module, forward, *args, **kwargs):
    model.zero_grad()
    output = forward(*args, **kwargs)
    output.loss.backward()
    return output.loss.detach(), copied_gradients(model)


def copied_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the gradients of what trains; Gemma 4's scalars of layers do not."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
@each_family
def test_packed_documents_equal_separate_ones(family, dtype, bound):
    lengths = [70, 1, 129]
    # With other tokens, gradients of dt_bias and A_log may cancel to a thousandth of their terms.
    torch.manual_seed(0)
    ids, labels = batch(1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    model = make(dtype, family, **every_expert(family))
    separate = torch.cat([model(part) for part in ids.split(lengths, dim=1)], 1)
    calls = [{"position_ids": positions}, {"cu_seqlens": ends}]
    if dtype == torch.bfloat16:
        calls.append({"cu_seqlens": ends, "max_seqlen": max(lengths)})
    for options in calls:
        assert relative(model(ids, **options), separate) < bound, options.keys()
        _loss, grads = gradients(model, model, ids, labels=labels, **options)
        pieces = zip(ids.split(lengths, 1), labels.split(lengths, 1))
        model.zero_grad()
        outputs = [model(i, labels=t, reduction="sum") for i, t in pieces]
        valid = sum(output.num_valid for output in outputs)
        (sum(output.loss for output in outputs) / valid).backward()
        for name, grad in copied_gradients(model).items():
            assert relative(grads[name], grad) < bound, name


@each_family
def test_no_dense_mask_at_length(family):
    """A row of 65536 tokens, padded or packed, never allocates a dense attention mask."""
    # Of nine heads of 256 and 512, the activations alone would take 10.8 GB.
    fewer = {"num_attention_heads": 3, "num_key_value_heads": 1}
    changes = fewer if family == "gemma4_text" else {}
    model = make(torch.bfloat16, family, vocab_size=64, pad_token_id=None, **changes)
    seq = 65536
    ids = torch.randint(0, 64, (1, seq), device="cuda")
    padding = torch.ones_like(ids)
    padding[:, -1000:] = 0
    options = [
        {"position_ids": torch.arange(seq, device="cuda")[None] % 20000},
        {"attention_mask": padding},
        {"cu_seqlens": torch.tensor([0, 20000, seq], device="cuda"), "max_seqlen": seq},
        {},
    ]
    # A dense mask takes at least a byte for each pair of tokens, which is 4.3 GB. The activations
    # take 2.4 to 4.3 GB.
    activations = seq * model.config.hidden_size * 2 * 11.5 * model.config.num_hidden_layers
    for given in options:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(ids, labels=ids, **given).loss.backward()
        used = torch.cuda.max_memory_allocated() - before
        assert used < 2.5 * activations, (list(given), used / activations)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_gpt_oss_in_bfloat16(packed):
    """Its sinks have kernels of their own in 16 bit; the lengths are no multiples of 32.

    Inductor pads strides of more than 1024 elements, also those of a log-sum-exp.
    """
    model = make(torch.bfloat16, "gpt_oss", num_hidden_layers=2)
    ids, labels = batch(seq=517)
    given = {}
    if packed:
        ids, labels = ids.view(1, -1), labels.view(1, -1)
        ends = torch.tensor([0, 77, 200, 901, 1034], dtype=torch.int32, device="cuda")
        given = {"cu_seqlens": ends, "max_seqlen": 701}
    with torch.no_grad():  # rounding could choose other experts
        given["routed_experts"] = model(ids, return_routing=True, **given)[1].experts
    _, grads = gradients(model, model, ids, labels=labels, **given)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    _, compiled_grads = gradients(model, compiled, ids, labels=labels, **given)
    for name, grad in grads.items():
        assert relative(compiled_grads[name], grad) < 0.05, name


# The parity tests compile every family, also padded, and packed with a window.
@pytest.mark.parametrize(
    "family, given", [("llama", "packed"), ("llama", "prefix"), ("gemma2", "prefix")]
)
def test_compiled_equals_eager(family, given):
    model = make(family=family, num_hidden_layers=2)
    ids, labels = batch()
    options = {
        "packed": {"position_ids": (torch.arange(200, device="cuda") % 77)[None]},
        "prefix": {"prefix_lengths": torch.tensor([90], device="cuda")},
    }[given]
    loss, grads = gradients(model, model, ids, labels=labels, **options)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    compiled_loss, compiled_grads = gradients(model, compiled, ids, labels=labels, **options)
    assert abs(loss - compiled_loss) < 1e-5 * loss
    for name, grad in grads.items():
        assert relative(compiled_grads[name], grad) < 1e-4, name


INPUTS = [("whole", family) for family in DECODERS] + [
    (given, family)
    for given in ("positions", "lengths", "padding")
    for family in ("llama", "gemma2")
]


def inputs_of(given: str) -> dict[str, torch.Tensor]:
    """Return the inputs that make one row of 200 tokens whole, packed or padded."""
    padding = torch.ones(1, 200, dtype=torch.int64, device="cuda")
    padding[:, 150:] = 0
    return {
        "whole": {},
        "positions": {"position_ids": (torch.arange(200, device="cuda") % 77)[None]},
        "lengths": {"cu_seqlens": torch.tensor([0, 90, 200], device="cuda"), "max_seqlen": 110},
        "padding": {"attention_mask": padding},
    }[given]


def captured_step(model, **inputs) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a training step; return the graph and its loss."""

    def step() -> torch.Tensor:
        loss = model(**inputs).loss
        loss.backward()
        return loss

    return captured(step, model.zero_grad)


@pytest.mark.parametrize("given, family", INPUTS)
def test_no_host_synchronisation_and_a_step_in_a_cuda_graph(given, family):
    model = make(torch.bfloat16, family)
    ids, labels = batch(1)
    options = inputs_of(given)
    gradients(model, model, ids, labels=labels, **options)  # compiles the kernels
    with no_synchronisation():
        model(ids, labels=labels, label_smoothing=0.1, z_loss=1e-4, **options).loss.backward()
    graph, captured = captured_step(model, input_ids=ids, labels=labels, **options)
    fresh, fresh_labels = batch(1)
    ids.copy_(fresh)
    labels.copy_(fresh_labels)
    graph.replay()
    replayed = copied_gradients(model)
    loss, grads = gradients(model, model, ids, labels=labels, **options)
    assert torch.equal(captured, loss)
    for name, grad in grads.items():
        # Atomics add up the embedding's gradient, and their order may differ between runs.
        assert relative(replayed[name], grad) < 1e-2, name


@pytest.mark.parametrize("dropout", [None, 0.2])
@pytest.mark.parametrize(
    "policy",
    [LayerPlan(policy, tile=tile) for policy in POLICIES[1:] for tile in (None, 64)],
    ids=str,
)
def test_recomputation_in_a_cuda_graph(policy, dropout):
    """A recomputed layer also draws the random numbers of its forward again."""
    model = make()
    if dropout is not None:
        add_adapters(model, 4, 8.0, dropout)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(parameter, std=0.02)
    ids, labels = batch(1)
    # Tiles draw other random numbers than all tokens at once.
    same_numbers = LayerPlan(tile=None if dropout is None else policy.tile)
    found = []
    for layer in (same_numbers, policy):
        model.set_memory_plan(MemoryPlan((layer,) * len(model.layers)))
        graph, loss = captured_step(model, input_ids=ids, labels=labels)
        for _ in range(2):  # the second replay draws other numbers than the capture
            torch.cuda.manual_seed(3)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            graph.replay()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        found.append((loss.clone(), grads))
    (loss, grads), (recomputed_loss, recomputed) = found
    assert torch.equal(loss, recomputed_loss)
    for name, grad in grads.items():
        assert grad.norm() > 0
        assert relative(recomputed[name], grad) < 1e-5, name


ROPES_OF_THE_LENGTH = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "original_max_position_embeddings": 100,
        "short_factor": [1.0 + 0.01 * pair for pair in range(32)],
        "long_factor": [1.5 + 0.1 * pair for pair in range(32)],
    },
}


@pytest.mark.parametrize("kind", ROPES_OF_THE_LENGTH)
def test_ropes_that_depend_on_the_length_in_a_cuda_graph(kind):
    """They make no tensor from host data, which would be a synchronisation."""
    scaling = {"rope_type": kind, **ROPES_OF_THE_LENGTH[kind]}
    model = make(torch.bfloat16, max_position_embeddings=128, rope_scaling=scaling)
    ids, _ = batch(1)
    positions = torch.arange(200, device="cuda")[None]
    with torch.no_grad():
        for options in ({}, {"position_ids": positions}):
            expected = model(ids, **options)
            with no_synchronisation():
                model(ids, **options)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = model(ids, **options)
            graph.replay()
            assert torch.equal(captured, expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_mask_of_ones_takes_no_flex_attention(family, monkeypatch):
    """Every tokenizer returns one, and to look at it would be a host synchronisation."""
    window = {"sliding_window": 50} if family != "llama" else {}
    model = make(torch.bfloat16, family, num_hidden_layers=2, **window)
    ids, labels = batch()
    loss, grads = gradients(model, model, ids, labels=labels)

    def block_mask(*args, **kwargs):
        raise AssertionError("FlexAttention")

    monkeypatch.setattr(AttentionMask, "block_mask", block_mask)
    for mask in (torch.ones_like(ids), torch.ones_like(ids, device="cpu")):
        masked_loss, masked = gradients(model, model, ids, labels=labels, attention_mask=mask)
        assert abs(masked_loss - loss) < 1e-2 * loss
        for name, grad in grads.items():
            assert relative(masked[name], grad) < 5e-2, name


def test_padding_between_tokens() -> None:
    """It is NaN on the GPU, whose mask is not looked at, and computed for a mask on the CPU."""
    model, (ids, labels) = make(torch.bfloat16, num_hidden_layers=2), batch()
    mask = torch.ones(ids.shape, dtype=torch.int64)
    mask[1, :20] = 0
    assert model(ids, labels=labels, attention_mask=mask.cuda()).loss.isfinite()
    mask[0, 50:60] = 0
    assert model(ids, labels=labels, attention_mask=mask.cuda()).loss.isnan()
    found = model(ids, attention_mask=mask)
    exact = model.float()(ids, attention_mask=mask)
    assert relative(found[mask.bool()], exact[mask.bool()]) < 2e-2
