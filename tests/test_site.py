"""The documentation site builds without a warning, and its pages hold what the code says."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ligermodels import families
from ligermodels.training import config
from tests import markdown

FOLDER = markdown.ROOT / "docs" / "site"
NAMES = ("Entry", "Span", "packed_entry", "KVCache", "Attention")


def test_the_drawings_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    drawings = importlib.import_module("drawings")
    assert drawings.draw_block() == (FOLDER / "block.svg").read_text(encoding="utf-8")
    assert drawings.draw_head() == (FOLDER / "head.svg").read_text(encoding="utf-8")


def test_the_pages_that_are_made_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of the next test. It finds names that are gone, and families without a page.

    It leaves out what takes longest: to count the parameters of all sizes, and to read the recipes
    again for each family.
    """
    monkeypatch.syspath_prepend(str(FOLDER))
    hooks = importlib.import_module("hooks")
    monkeypatch.setattr(hooks, "size_table", lambda cls: cls.config_class.presets)
    monkeypatch.setattr(config, "read_config", functools.cache(config.read_config))
    pages = dict((*hooks.family_pages(), *hooks.reference_pages()))
    for family, cls in families().items():
        assert all(preset in pages[f"families/{family}.md"] for preset in cls.config_class.presets)
    listed = pages["reference/index.md"]
    assert all(f"`{name}`" in listed for name in NAMES)
    written = (FOLDER.parent / "gallery.md").read_text(encoding="utf-8")
    assert hooks.gallery_page() == written, "run python docs/site/hooks.py"


@pytest.mark.long
def test_the_site(tmp_path: Path) -> None:
    """Build it as `make site` does, and look for names, sizes and what the search finds."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
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
    for name in (*NAMES, "plan_memory"):
        assert f'.{name}"' in reference, name
    for family, cls in families().items():
        assert all(preset in pages[f"families/{family}"] for preset in cls.config_class.presets)
    away = ("fonts.googleapis.com", 'class="mermaid"', 'data-md-component="source"')
    assert not any(name in text for text in pages.values() for name in away)  # they fetch something
    documents = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    found = {document["location"] for document in documents}
    assert {"memory/", "start/", "families/llama/"} <= found
    assert any(place.endswith("#ligermodels.layers.attention.Attention") for place in found)
