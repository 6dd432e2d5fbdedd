"""`ligermodels families`: what is supported, read from the classes that support it."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ligermodels.errors import LigerError

if TYPE_CHECKING:
    from ligermodels.models.base import DecoderModel

HELP = "list the families and sizes that are supported"


def arguments(command: argparse.ArgumentParser) -> None:
    """Which family, and the form of the answer."""
    command.description = (
        "List the model families: the names of their published sizes, what is in them where a "
        "config.json says nothing else, and the config fields that only some families have. A "
        "checkpoint's family is the model_type in its config.json."
    )
    command.add_argument("family", metavar="FAMILY", nargs="?", help="show only this one")
    command.add_argument("--json", action="store_true", help="print JSON")


def run(given: argparse.Namespace) -> None:
    """Print the facts of every family."""
    from ligermodels.layers.rotary import ROPE_TYPES
    from ligermodels.models.auto import families

    known = families()

    types: dict[type[DecoderModel], list[str]] = {}
    for model_type, cls in known.items():
        types.setdefault(cls, []).append(model_type)
    if given.family is not None:
        if given.family not in known:
            raise LigerError(
                f"families: {given.family!r} is none of them; known: {', '.join(known)}"
            )
        types = {known[given.family]: types[known[given.family]]}
    found = {
        cls.config_class.model_type: {"model_type": names, **facts(cls)}
        for cls, names in types.items()
    }
    if given.json:
        print(json.dumps({"families": found, "rope types": ROPE_TYPES}, indent=2))
        return
    columns = shutil.get_terminal_size().columns
    for family, entries in found.items():
        print(family)
        width = max(map(len, entries)) + 4
        for name, value in entries.items():
            text = ", ".join(value) if isinstance(value, list) else str(value)
            head = f"  {name}".ljust(width)
            print(
                textwrap.fill(
                    text or "none",
                    columns,
                    initial_indent=head,
                    subsequent_indent=" " * width,
                    break_on_hyphens=False,
                )
            )
        print()
    print(f"rope types of every family: {', '.join(ROPE_TYPES)}")


def facts(cls: type[DecoderModel]) -> dict[str, Any]:
    """What a family has where its config.json says nothing else, by looking at such a model."""
    import torch

    from ligermodels.layers.attention import Attention
    from ligermodels.models.config import ModelConfig

    config = cls.config_class()
    common = {each.name for each in fields(ModelConfig)}
    windows = [window for window in config.sliding_windows if window is not None]
    with torch.device("meta"):
        model = cls(config)
    block = model.layers[0]
    attention = block.self_attn
    assert isinstance(attention, Attention)
    biases = [
        name.removesuffix(".bias") for name, _ in block.named_parameters() if name.endswith(".bias")
    ]
    norms = [name for name, _ in block.named_children() if name.endswith("layernorm")]
    norms += [f"{name} of every head" for name in ("q_norm", "k_norm") if getattr(attention, name)]
    caps = {"scores": attention.softcap, "logits": model.head.loss_options.get("softcap")}
    return {
        "classes": [cls.__name__, type(config).__name__],
        "presets": list(config.presets),
        "activation": config.activation,
        "norms": norms,
        "biases": biases,
        "window": f"{windows[0]} in {len(windows)} of {config.num_hidden_layers} layers"
        if windows
        else "none",
        "soft caps": [f"{name} {cap:g}" for name, cap in caps.items() if cap],
        "ropes": len(set(model.ropes)),
        "head": "tied" if config.tie_word_embeddings else "its own",
        "own fields": [each.name for each in fields(config) if each.name not in common],
    }
