"""The documentation site builds without a warning, and its pages hold what the code says."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ligermodels import families
from tests import markdown


def test_the_drawings_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(markdown.ROOT / "docs" / "site"))
    drawings = importlib.import_module("drawings")
    folder = markdown.ROOT / "docs" / "site"
    assert drawings.draw_block() == (folder / "block.svg").read_text(encoding="utf-8")
    assert drawings.draw_head() == (folder / "head.svg").read_text(encoding="utf-8")


def test_the_site(tmp_path: Path) -> None:
    """Build it as `make site` does, and look for names, sizes and what the search finds."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=markdown.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pages = {
        page.parent.relative_to(tmp_path).as_posix(): page.read_text(encoding="utf-8")
        for page in tmp_path.rglob("index.html")
    }
    reference = "".join(text for name, text in pages.items() if name.startswith("reference/"))
    for name in ("Entry", "Span", "packed_entry", "KVCache", "Attention", "plan_memory"):
        assert f'.{name}"' in reference, name
    for family, cls in families().items():
        assert all(preset in pages[f"families/{family}"] for preset in cls.config_class.presets)
    assert not any(
        "fonts.googleapis.com" in text for text in pages.values()
    )  # nothing from elsewhere
    documents = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    found = {document["location"] for document in documents}
    assert {"memory/", "start/", "families/llama/"} <= found
    assert any(place.endswith("#ligermodels.layers.attention.Attention") for place in found)
