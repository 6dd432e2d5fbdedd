"""`ligermodels families` lists the families and their sizes."""

from __future__ import annotations

from ligermodels.models.auto import families


def test_every_family_and_preset_is_listed(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    code, out, err = call("families")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 50
    words = out.replace(",", " ").replace(":", " ").split()
    for name, cls in families().items():
        assert {name, cls.__name__, *cls.config_class.presets} <= {*words}
