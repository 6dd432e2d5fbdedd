"""Small models and rows, and the comparison of sharded models with whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ligermodels import MemoryPlan, families
from ligermodels.layers.recompute import CheckpointingPolicy
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import splits_of, whole_tensor
from tests.families import OWN
from tests.memory.step_bytes import error_of_prediction

BATCH, SEQ = 4, 12
# The sizes are small and odd, so that the ranks' shards differ in rows; heads are grouped.
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "pad_token_id": 2,
}


# Gemma 4 with embeddings for each layer, and with keys of earlier layers, as its smallest models.
SMALL_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "attention_k_eq_v": False,
    "enable_moe_block": False,
}


def make(tied: bool, family: str = "llama", **changes: Any) -> DecoderModel:
    torch.manual_seed(7)
    if family == "small gemma4":
        family, changes = "gemma4_text", SMALL_GEMMA4 | changes
    cls = families()[family]
    sizes = {"initializer_range": 0.3, **SIZES, **OWN.get(family, {}), **changes}
    made = cls(cls.config_class(tie_word_embeddings=tied, **sizes))
    # Norms in gated delta nets make rounding larger where the output is small.
    return made.double() if made.is_recurrent else made


def data() -> tuple[Tensor, Tensor]:
    """Make halves with different numbers of valid labels, so that a mean of means is wrong."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, SEQ), generator=generator)
    ids[:, 5] = SIZES["pad_token_id"]
    labels = ids.clone()
    labels[0, :7] = -100
    labels[1, 4:] = -100
    return ids, labels


def count(labels: Tensor) -> int:
    return int((labels[:, 1:] != -100).sum())


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))


def upstream(like: Tensor) -> Tensor:
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(1))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        whole = whole_tensor(parameter.grad, splits_of(model).get(name))
        grads[name.removeprefix("module.")] = whole
    return grads


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(relative(ours[name], theirs[name]) for name in theirs)


def outputs(ours: Any, theirs: Any) -> dict[str, float]:
    """Compare the fields of two outputs of a head."""
    found = {}
    for name, a, b in zip(ours._fields, ours, theirs):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype, name
            found[name] = relative(a, b)
    return found


def error_of_bytes(
    model: DecoderModel, policy: CheckpointingPolicy, seq: int, allowed: float
) -> dict[str, float]:
    """Compare the bytes that a simulation predicts with those that a rank's step takes.

    Args: allowed: a share, since a thread of gloo may hold the tensors of a collective longer.
    """
    model.set_memory_plan(MemoryPlan.uniform(len(model.layers), policy))
    return {"bytes": max(0.0, abs(error_of_prediction(model, seq, steps=4)) - allowed)}
