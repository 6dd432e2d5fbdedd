"""Good checkpoints broken at random: a load refuses each by name, or loads exactly its content.

`make test` breaks 40 checkpoints of each family, and `make test-long` breaks 1000.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ligermodels import AutoLiger, CheckpointError, ConfigError
from ligermodels.converters.weight_map import hf_tensors
from ligermodels.models.auto import families
from tests.families import sampled
from tests.tiny_models import random_model

INDEX, CONFIG = "model.safetensors.index.json", "config.json"
SECONDS = 60  # a load takes milliseconds, so one that takes a minute hangs
INFINITY, NAN = float("inf"), float("nan")
NUMBERS = [True, False, 0, -1, 1.5, 2**31, 2**64, 10**400, NAN, INFINITY]
WORDS = ["", "x", "\0", "../x", "BF16", "F32", "F8_E4M3", "llama"]
ODD: list[Any] = [None, *NUMBERS, *WORDS, [], [1], ["a"], {}, {"a": 1}, [[]]]


def break_value(draw: random.Random, value: Any) -> None:
    """Change one item at a random place of a parsed JSON object."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        if not isinstance(value[key], (dict, list)) or not value[key] or draw.random() < 0.2:
            break
        value = value[key]
    kind = draw.choice(["odd", "odd", "gone", "renamed", "other"])
    if kind == "odd":
        value[key] = draw.choice(ODD)
    elif kind == "other":
        value[key] = value[draw.choice(keys)]
    elif isinstance(value, list) or kind == "gone":
        del value[key]
    else:
        value[draw.choice([f"{key}x", key.upper(), f"language_model.{key}"])] = value.pop(key)


def break_checkpoint(draw: random.Random, folder: Path) -> None:
    files = sorted(folder.iterdir())
    weights = [path for path in files if path.suffix == ".safetensors"]
    file = draw.choice([folder / CONFIG, draw.choice(weights), draw.choice(files)])
    content = file.read_bytes()
    at = draw.randrange(min(len(content), draw.choice([9, 400, 10**9])))
    kind = draw.choice(["value", "value", "value", "cut", "flip", "insert", "file", "other"])
    if kind == "value":
        length = struct.unpack_from("<Q", content)[0] if file in weights else len(content)
        start = 8 if file in weights else 0
        parsed = json.loads(content[start : start + length])
        break_value(draw, parsed)
        text = json.dumps(parsed).encode()
        rest = content[start + length :]
        file.write_bytes(struct.pack("<Q", len(text)) * bool(start) + text + rest)
    elif kind == "cut":
        file.write_bytes(content[:at])
    elif kind == "flip":
        flipped = bytes([content[at] ^ 1 << draw.randrange(8)])
        file.write_bytes(content[:at] + flipped + content[at + 1 :])
    elif kind == "insert":
        file.write_bytes(content[:at] + draw.randbytes(draw.randint(1, 9)) + content[at:])
    elif kind == "other":
        file.write_bytes(draw.choice(weights).read_bytes())
    else:
        file.unlink()
        make = [lambda: None, file.mkdir, file.touch]
        draw.choice([*make, lambda: file.symlink_to("nowhere")])()


def check_content(model: Any, folder: Path) -> None:
    """Compare a model with what safetensors and json read in its folder."""
    raw = json.loads((folder / CONFIG).read_text())
    raw = raw.get("text_config", raw)
    for name, value in model.config.to_dict().items():
        has_two_spellings = name in ("dtype", "rope_theta")
        if isinstance(value, (bool, int, str)) and raw.get(name) is not None:
            assert has_two_spellings or value == raw[name], name
    names = ["model.safetensors"]
    if (folder / INDEX).exists():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    stored = {key: tensor for name in names for key, tensor in load_file(folder / name).items()}
    weight_map = type(model).weight_map(model.config)
    for name, tensor in hf_tensors(weight_map, dict(model.named_parameters())):
        theirs = stored.get(name, stored.get(f"language_model.{name}"))
        assert torch.equal(tensor, theirs.to(tensor.dtype)), name
    ids = torch.tensor([[1, 5, 3, 0, 7, 2]])
    assert model(ids).shape == (1, 6, model.config.hidden_size)


@pytest.mark.filterwarnings("ignore:.*tensors left out")
@pytest.mark.parametrize("cases", [20, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", sampled(sorted(set(families()) - {"gemma3"})))
def test_a_broken_checkpoint_is_refused_by_name_or_loads_its_content(tmp_path, family, cases):
    good, folder, outcomes = tmp_path / "good", tmp_path / "case", set()
    made = random_model(family, num_hidden_layers=2, tie_word_embeddings=False)
    made.to(torch.bfloat16).save_hf(good, max_shard_size=6000)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the load hangs"))
    try:
        for number in range(cases):
            draw = random.Random(f"{family} {number}")
            shutil.copytree(good, folder)
            break_checkpoint(draw, folder)
            signal.alarm(SECONDS)
            try:
                check_content(AutoLiger.from_hf(folder), folder)
                outcomes.add("loaded")
            except (ConfigError, CheckpointError) as fault:
                line = str(fault).partition("\n")[0]
                assert re.match(rf"{re.escape(str(folder))}(/[^/]+)?( \(header\))?: ", line), line
                assert line.isprintable() and len(line) < 1000, line
                outcomes.add(type(fault).__name__)
            except BaseException as fault:
                fault.add_note(f"{family} case {number}")
                raise
            finally:
                signal.alarm(0)
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert outcomes == {"loaded", "ConfigError", "CheckpointError"}
