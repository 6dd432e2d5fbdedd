"""Memory plans on a GPU are exact with deterministic attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import exact_plans

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent
# Whole rows, a window, and capped scores: FlashAttention 2, its varlen_attn, FlexAttention.
FAMILIES = ("llama", "mistral", "gemma2")


def test_plans_change_no_bit_where_attention_is_deterministic() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.exact_plans", *FAMILIES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found = json.loads(line.removeprefix("RESULT"))
    same: dict[str, list[str]] = {name: [] for name in ("no plan", *exact_plans.plans())}
    assert found == dict.fromkeys(FAMILIES, same)
