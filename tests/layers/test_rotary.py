"""Compare every rope type with the frequencies and angles of transformers."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig as HFConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ligermodels.layers import RotaryEmbedding

HEAD_DIM, LONGEST = 32, 64
HALF = HEAD_DIM // 2
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(HALF)],
    "long_factor": [1.0 + 0.5 * i for i in range(HALF)],
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "proportional": {"rope_type": "proportional", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "llama3, original from max": LLAMA3 | {"original_max_position_embeddings": LONGEST},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, a ramp without length": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 6,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 40,
    },
    "yarn, mscales": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.3, "mscale_all_dim": 0.8},
    "longrope": LONG | {"original_max_position_embeddings": 32},
    "longrope, factor": LONG | {"original_max_position_embeddings": 32, "factor": 6.0},
    "longrope, attention factor": LONG
    | {"original_max_position_embeddings": 32, "attention_factor": 1.25},
}


def theirs(scaling: dict[str, Any] | None, theta: float) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        HFConfig(
            hidden_size=4 * HEAD_DIM,
            num_attention_heads=4,
            max_position_embeddings=LONGEST,
            rope_theta=theta,
            rope_scaling=scaling,
        )
    )


def angles(hf: LlamaRotaryEmbedding, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = hf(torch.zeros(1), positions)
    return cos[..., :HALF], sin[..., :HALF]


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_equal_transformers(name: str) -> None:
    """Lengths up to the original length, between it and the maximum, and above the maximum."""
    scaling = SCALINGS[name]
    original = (scaling or {}).get("original_max_position_embeddings", LONGEST)
    for theta, length in product((1e4, 5e5), (8, original, original + 1, 48, 200)):
        ours = RotaryEmbedding(HEAD_DIM, theta, LONGEST, copy.deepcopy(scaling))
        positions = torch.arange(length)[None]
        cos, sin = ours(positions, length)
        assert cos.dtype == sin.dtype == torch.float32
        # Each length takes a new module, because transformers' dynamic rope keeps a longer length.
        expected = angles(theirs(copy.deepcopy(scaling), theta), positions)
        torch.testing.assert_close((cos, sin), expected, rtol=0, atol=2e-6 * length / 8)
        from_positions = ours(positions)
        assert torch.equal(from_positions[0], cos)
        assert torch.equal(from_positions[1], sin)


def test_calls_do_not_remember_each_other() -> None:
    for name in ("dynamic", "longrope"):
        rope = RotaryEmbedding(HEAD_DIM, 1e4, LONGEST, SCALINGS[name])
        short = torch.arange(8)[None]
        before = rope(short, 8)
        assert not torch.equal(rope(short, 500)[1], before[1])
        assert torch.equal(rope(short, 8)[1], before[1])


def test_conversions_keep_the_frequencies_exact() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    rope = RotaryEmbedding(HEAD_DIM, scaling=scaling)
    exact = rope.inv_freq.clone()
    scaling["factor"] = 4.0  # the caller's dict is copied
    assert torch.equal(rope.to(torch.float16).inv_freq, exact)
    for name, scaling in SCALINGS.items():
        rope = RotaryEmbedding(HEAD_DIM, 1e4, LONGEST, scaling)
        exact = rope.inv_freq.clone()
        parent = torch.nn.Sequential(rope)
        for moved in (parent.to(torch.bfloat16), parent.half(), parent.double()):
            assert moved[0].inv_freq.dtype == torch.float32, name
            assert torch.equal(moved[0].inv_freq, exact), name
        with torch.device("meta"):
            empty = RotaryEmbedding(HEAD_DIM, 1e4, LONGEST, scaling)
        assert empty.inv_freq.is_meta, name
        assert torch.equal(empty.to_empty(device="cpu").inv_freq, exact), name


def test_numbers_that_no_rope_has_are_refused() -> None:
    for wrong in ({"head_dim": 3}, {"head_dim": 4.0}, {"theta": 0}, {"theta": "1e4"}):
        with pytest.raises(
            ValueError, match=f"RotaryEmbedding: {next(iter(wrong))}=.*expected an? "
        ):
            RotaryEmbedding(**{"head_dim": 4, **wrong})
    with pytest.raises(ValueError, match="rope_type='spiral'"):
        RotaryEmbedding(HEAD_DIM, scaling={"rope_type": "spiral"})
    with pytest.raises(ValueError, match="max_position_embeddings=0"):
        RotaryEmbedding(4, max_position_embeddings=0)
