"""Memory plans on a GPU: exact with deterministic attention, and by several ranks of one host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import exact_plans, offload_ranks
from tests.parallel.ranks import check, run_ranks

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


def test_two_ranks_of_one_gpu_keep_their_own_parts_of_host_memory(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    report = run_ranks(offload_ranks.__name__, 2, tmp_path)
    assert len(report) == 2 * len(offload_ranks.cases(2))
    check(report, subtests)
