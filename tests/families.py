"""What each family has beside Llama, at sizes at which it bites in a few tokens."""

from __future__ import annotations

from typing import Any

WINDOW = 5
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 20,
    },
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
}
