"""Exports of the whole zoo open in the last transformers 4, and compute the same there.

That version reads the older config spellings only. build/ holds it, outside the environment, and it
runs in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ligermodels import AutoLiger
from tests.models import parity, zoo
from tests.models.pairs import relative

OLD = Path(__file__).parents[2] / "build" / "transformers-4.57.6"

SCRIPT = """
import sys, torch, transformers
from pathlib import Path
from safetensors.torch import save_file
assert transformers.__version__.startswith("4."), transformers.__version__
transformers.logging.set_verbosity_error()
found = {}
for folder in sorted(Path(sys.argv[1]).glob("*/*")):
    name = f"{folder.parent.name}, {folder.name}"
    attention = "eager" if folder.parent.name == "gemma2" else "sdpa"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        ids = torch.arange(3, 3 + 2 * int(sys.argv[3])).view(2, -1)
        with torch.no_grad():
            found[name] = model(ids).logits
    except Exception as error:
        print(name, repr(error), file=sys.stderr)
save_file(found, sys.argv[2])
"""
# This longrope has no factor: transformers 5 derives it, 4 stops with an error.
REFUSED = "longrope, short"


# `whole` is all pairs, and not only the sample of tests/models/test_parity.py.
@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*loading the text model alone:UserWarning")
def test_exports_compute_the_same_in_transformers_4(tmp_path: Path, whole: bool) -> None:
    if not (OLD / "transformers").is_dir():
        pytest.skip(f"{OLD.name} is not in build/: make {OLD.relative_to(OLD.parents[1])}")
    seq = zoo.TINY.seq
    ids = torch.arange(3, 3 + 2 * seq).view(2, -1)
    ours = {}
    for family in zoo.FAMILIES:
        for name, feature in zoo.features(family).items():
            chosen = whole or parity.sampled("round trip", family, name)
            if chosen and parity.applies("round trip", feature):
                case = parity.Case(family, name)
                AutoLiger.from_hf(case.folder).save_hf(tmp_path / "exports" / family / name)
                with torch.no_grad():
                    ours[f"{family}, {name}"] = case.ours.head.logits(case.ours(ids))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "exports"), str(tmp_path / "out"), str(seq)],
        env={**os.environ, "PYTHONPATH": str(OLD), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "out")
    unread = [name for name in ours if name not in theirs and not name.endswith(REFUSED)]
    assert not unread, done.stderr
    far = {name: relative(ours[name], logits) for name, logits in theirs.items()}
    bound = parity.BOUNDS["logits"]
    assert not {name: error for name, error in far.items() if error > bound}
