"""`ligermodels families` shows the facts of the config classes."""

import json

from ligermodels import cli
from ligermodels.layers.rotary import ROPE_TYPES
from ligermodels.models.auto import families


def call(capfd, *arguments):
    assert cli.main(["families", *arguments]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return out


def test_every_family_and_preset_is_listed(capfd):
    found = json.loads(call(capfd, "--json"))
    assert found["rope types"] == list(ROPE_TYPES)
    listed = {name for each in found["families"].values() for name in each["model_type"]}
    assert listed == set(families())
    for name, cls in families().items():
        entry = next(e for e in found["families"].values() if name in e["model_type"])
        assert entry["presets"] == list(cls.config_class.presets)
        assert entry["classes"] == [cls.__name__, cls.config_class.__name__]
    text = call(capfd)
    for cls in families().values():
        assert cls.__name__ in text
        for preset in cls.config_class.presets:
            assert preset in text


def test_facts_are_those_of_a_default_config(capfd, subtests):
    for family, key, value in (
        ("llama", "window", "none"),
        ("mistral", "window", "4096 in 32 of 32 layers"),
        ("gemma2", "window", "4096 in 13 of 26 layers"),
        ("gemma3", "model_type", ["gemma3_text", "gemma3"]),
        ("gemma", "activation", "gelu_tanh"),
        ("gemma", "head", "tied"),
        ("llama", "own fields", ["hidden_act='silu'", "attention_bias=False", "mlp_bias=False"]),
    ):
        with subtests.test(f"{family}: {key}"):
            (found,) = json.loads(call(capfd, family, "--json"))["families"].values()
            assert found[key] == value


def test_a_narrow_terminal_breaks_no_name(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    out = call(capfd, "gemma2")
    assert "Gemma2Config" in out and "query_pre_attn_scalar" in out
    assert max(map(len, out.split("\n\n")[0].splitlines())) <= 50
