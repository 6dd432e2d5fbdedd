"""Sizes at which every op's case runs on a CPU in no time."""

from __future__ import annotations

HEAD = {"rows": 12, "width": 16, "vocab": 24}
HEADS = {"batch": 2, "seq": 6, "heads": 4, "kv_heads": 2, "head_dim": 16}
TINY = {
    "rms_norm": {"rows": 5, "width": 16},
    "add_rms_norm": {"rows": 5, "width": 16},
    "layer_norm": {"rows": 5, "width": 16},
    "add_layer_norm": {"rows": 5, "width": 16},
    "swiglu": {"rows": 5, "width": 16},
    "geglu": {"rows": 5, "width": 16},
    "geglu_erf": {"rows": 5, "width": 16},
    "rope": HEADS,
    "qk_norm_rope": HEADS,
    "norm_linear": {"rows": 5, "width": 16, "out": 24},
    "norm_qkv_rope": {"batch": 2, "seq": 6, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8},
    "glu_linear": {"rows": 5, "width": 16, "out": 24},
    "cross_entropy": {"rows": 12, "vocab": 24},
    "cross_entropy_softcap": {"rows": 12, "vocab": 24},
    "linear_cross_entropy": HEAD,
    "linear_cross_entropy_ignored": HEAD | {"ignored": 0.5},
    "linear_cross_entropy_budget": HEAD | {"max_scratch_bytes": None},
    "linear_cross_entropy_none": HEAD,
    "linear_cross_entropy_stats": HEAD,
    "linear_log_probs": HEAD | {"entropy": True},
}
