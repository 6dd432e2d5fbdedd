"""Exports open in the last transformers 4, which reads only the older spellings of configs.

They compute the same there. build/ holds that version, outside the environment; it runs in a
separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ligermodels import AutoLiger, LigerLlama, LlamaConfig
from tests.families import FAMILIES
from tests.models import parity, zoo
from tests.models.pairs import relative

OLD = Path(__file__).parents[1] / "build" / "transformers-4.57.6"
IDS = torch.arange(3, 3 + 2 * zoo.TINY.seq).view(2, -1)
SCRIPT = """
import sys, torch, transformers
from safetensors.torch import save_file
assert transformers.__version__.startswith("4."), transformers.__version__
transformers.logging.set_verbosity_error()
seq, out, *folders = sys.argv[1:]
found = {}
for folder in folders:
    attention = "eager" if "gemma2" in folder else "sdpa"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        with torch.no_grad():
            found[folder] = model(torch.arange(3, 3 + 2 * int(seq)).view(2, -1)).logits
    except Exception as error:
        print(folder, repr(error), file=sys.stderr)
save_file(found, out)
"""
# This longrope has no factor: transformers 5 derives it, 4 stops with an error. And the theta of
# OLMo 3's sliding layers is that of the others in 4.
REFUSED = ("longrope, short", "yarn of the full layers")


def known(family: str) -> bool:
    """Return whether the old version has the family, and its text model.

    Of Granite 4, it does not know the names of layer types that transformers 5 writes.
    """
    if family == "granitemoehybrid":
        return False
    text = FAMILIES[family].text_model or family
    modules = [zoo.config_class(name).__module__.split(".")[2] for name in (family, text)]
    return all((OLD / "transformers" / "models" / name).is_dir() for name in modules)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*loading the text model alone:UserWarning")
def test_exports_compute_the_same_in_transformers_4(smollm2: Path, tmp_path: Path) -> None:
    """Export every pair of family and feature, a config made in Python, and the real checkpoint."""
    if not (OLD / "transformers").is_dir():
        pytest.skip(f"{OLD.name} is not in build/: make {OLD.relative_to(OLD.parents[1])}")
    ours = {}

    def export(model: LigerLlama, name: str) -> None:
        folder = tmp_path / name.replace(" ", "_")
        model.save_hf(folder)
        with torch.no_grad():
            ours[str(folder)] = model.head.logits(model(IDS))

    export(AutoLiger.from_hf(smollm2, dtype=torch.float32), "smollm2")
    # This theta is far from 10000, the default of a reader that ignores the key.
    export(LigerLlama(LlamaConfig.small(rope_theta=500.0, initializer_range=0.3)), "python")
    for family in filter(known, zoo.FAMILIES):
        for name, feature in zoo.features(family).items():
            # The old Phi-3 refuses any fourth key in rope_scaling.
            refused = name in REFUSED or (family, name) == ("phi3", "longrope")
            if parity.applies("round trip", feature) and not refused:
                case = parity.Case(family, name)  # which keeps its folder
                model = AutoLiger.from_hf(case.folder, dtype=torch.float32)
                export(model, f"{family}, {name}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(zoo.TINY.seq), str(tmp_path / "out"), *ours],
        env={**os.environ, "PYTHONPATH": str(OLD), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "out")
    assert theirs.keys() == ours.keys(), done.stderr
    far = {folder: relative(ours[folder], logits) for folder, logits in theirs.items()}
    assert not {name: error for name, error in far.items() if error > parity.BOUNDS["logits"]}
