"""Compare whole models that run the Triton kernels, in the interpreter, with the references."""

from __future__ import annotations

import pytest
import torch

import ligermodels

# The families and the config fields that they set. Comments name the kernel features that they use.
CASES = {
    "Llama": {"tie_word_embeddings": False},
    "Llama tied": {"tie_word_embeddings": True},
    "Gemma": {"head_dim": 8},  # gelu, norms with an offset, an explicit head_dim
    "Gemma2": {"head_dim": 8, "sliding_window": 3},
    "Gemma3": {"head_dim": 20, "sliding_window": 3},  # norms of q and k, two ropes
    "Gemma4": {  # norms of values, queries alone in the last layer, a head of another size
        "head_dim": 8,
        "global_head_dim": 20,
        "sliding_window": 3,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 61,
    },
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "GptOss": {  # sinks, biases of experts, clamped and interleaved gates
        "head_dim": 8,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
    },
    "Qwen2": {},
    "Qwen3": {"head_dim": 20},
    "Qwen3_5": {  # gated delta nets, and heads with a gate of which a part is rotated
        "head_dim": 24,
        "full_attention_interval": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_references(monkeypatch, case) -> None:
    torch.manual_seed(0)
    family = case.split()[0]
    config = getattr(ligermodels, f"{family}Config")(
        **{
            "vocab_size": 61,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "dtype": "float32",
            **CASES[case],
        }
    )
    model = getattr(ligermodels, f"Liger{family}")(config).float()
    input_ids = torch.randint(0, 61, (2, 7))
    labels = input_ids.clone()
    labels[0, :3] = -100
    results = []
    for backend in ("triton", "torch"):
        monkeypatch.setenv("LIGERMODELS_BACKEND", backend)
        model.zero_grad()
        loss = model(input_ids, labels=labels).loss
        loss.backward()
        trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
        results.append((loss.detach(), {k: p.grad.clone() for k, p in trained.items()}))
    (loss, grads), (expected, expected_grads) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-6)
