"""The option --import of every command."""

from __future__ import annotations

import sys

import pytest

from tests.cli.helpers import assert_one_line

FAMILY = """
import ligermodels

class Config(ligermodels.LlamaConfig):
    model_type = {name!r}

@ligermodels.register
class LigerNew(ligermodels.LigerLlama):
    config_class = Config
"""


@pytest.mark.usefixtures("registry")
def test_modules_register_their_families(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("a_new_family", "wave"):  # They are as before after the test.
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_new_family.py").write_text(FAMILY.format(name="new_one"))
    # A file is imported even if an installed module has its name.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "wave.py").write_text(FAMILY.format(name="new_two"))
    code, out, err = call("families", "new_one", "--import", "a_new_family")
    assert (code, err) == (0, "") and "LigerNew" in out
    for _ in range(2):  # finetune imports it early, too
        assert call("families", "new_two", "--import", tmp_path / "folder" / "wave.py")[0] == 0


def test_a_module_that_cannot_be_imported_is_one_line(call, tmp_path, subtests):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\nway')")
    (tmp_path / "clash.py").write_text(FAMILY.format(name="llama"))
    (tmp_path / "json.py").write_text("")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    for name, words in (
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{tmp_path}/nothing.py", "there is no such file"),
        (f"{tmp_path}/broken.py", "RuntimeError: no"),
        (f"{tmp_path}/clash.py", "'llama' belongs to ligermodels.models.llama.LigerLlama"),
        (f"{tmp_path}/json.py", "'json' is imported already; rename the file"),
        (f"{tmp_path}/leaves.py", "SystemExit: 0"),
    ):
        with subtests.test(name):
            assert_one_line(call("families", "--import", name), f"--import {name}: ", words)
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    result = call("families", "--import", tmp_path / "slow.py")
    assert result == (130, "", "ligermodels: interrupted\n")
