"""Tools with environments of their own train native models as they train transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import outside_tools


@pytest.mark.long
@pytest.mark.parametrize("tool", outside_tools.TOOLS)
def test_a_tool_with_its_own_environment(tool: str, tmp_path: Path) -> None:
    made = outside_tools.ROOT / "build" / tool / ".made"
    if not made.exists():
        pytest.skip(f"{made} does not exist; run make outside-tools")
    errors = outside_tools.measure(tool, tmp_path, ["llama", "gemma2"])
    assert len(errors) == 4
    assert not outside_tools.beyond(errors)
