"""Make a tiny Llama in both libraries with equal weights, and give gradients our names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from ligermodels import LigerLlama, LlamaConfig
from ligermodels.converters.weight_map import native_tensor

# head_dim is not hidden_size / num_attention_heads, and heads are grouped.
TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
}
PAD = TINY["pad_token_id"]


def native(tensors: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Return transformers' tensors under the names of our model, packed by its weight map."""
    entries = model.weight_map(model.config).written_as(model.source.layout)
    return {entry.name: native_tensor(entry, tensors) for entry in entries}


def native_gradients(theirs: Any, ours: Any) -> dict[str, Tensor]:
    """Return transformers' gradients of the parameters that ours trains."""
    grads = hf_tensors(theirs, {n: w.grad for n, w in theirs.named_parameters()})
    grads |= hf_tensors(theirs, dict(theirs.named_buffers()))
    return {n: g for n, g in native(grads, ours).items() if ours.get_parameter(n).requires_grad}


def hf_tensors(theirs: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of transformers' model under the names of a checkpoint of its text model."""
    if any("experts" in name for name in tensors):  # transformers 5 joins those of all experts
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(theirs, tensors)
    prefix = "model.language_model."  # of a wrapper with other towers
    return {name.replace(prefix, "model."): tensor for name, tensor in tensors.items()}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None for g in grads.values()), "a parameter has no gradient"
    return {name: g.detach().clone() for name, g in grads.items()}


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw weights that keep activations of order one, with norms and biases all different."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean, std = (1.0, 0.2) if "norm" in name else (0.0, 0.3 if p.dim() > 1 else 0.1)
            p.copy_(torch.randn(p.shape, generator=generator) * std + mean)


def tiny_model(seed: int = 0, **overrides: Any) -> LigerLlama:
    model = LigerLlama(LlamaConfig(**{**TINY, **overrides}))
    randomize(model, seed)
    return model


def tiny_pair(seed: int = 0, **overrides: Any) -> tuple[LlamaForCausalLM, LigerLlama]:
    sizes = {**TINY, **overrides}
    hf = LlamaForCausalLM(HFConfig(**sizes, attn_implementation="sdpa")).float()
    randomize(hf, seed)
    ours = LigerLlama(LlamaConfig(**sizes))
    ours.load_state_dict(native(hf.state_dict(), ours))
    return hf, ours


def tokens(
    batch: int = 2, seq: int = 20, seed: int = 0, vocab: int = TINY["vocab_size"], pad: int = PAD
) -> tuple[Tensor, Tensor]:
    """Return ids with the padding token among them, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, seq), generator=generator)
    ids[:, 3] = pad
    ids[-1, seq // 2] = pad
    labels = ids.clone()
    labels[0, : seq // 4] = -100
    return ids, labels


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of a - b, divided by the norm of b, both summed up in float64."""
    a, b = a.detach(), b.detach()
    difference, size = (x.norm(dtype=torch.float64) for x in (a - b, b))
    return (difference / size.clamp_min(1e-30)).item()


def step(model: torch.nn.Module, ids: Tensor, **inputs: Any) -> Any:
    """Run a forward and a backward; return the output."""
    model.zero_grad()
    out = model(ids, **inputs)
    out.loss.backward()
    return out
