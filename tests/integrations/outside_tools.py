"""Compare native models with transformers' in tools that need environments of their own.

    make outside-tools     makes the environments, and writes benchmarks/results/outside_tools.json

Axolotl, LLaMA-Factory and Unsloth load models by themselves and ask for other versions of
transformers and TRL than the tests. Each has an environment in build/, and there
tests/integrations/outside_worker.py trains with the tool's own code. Nothing is written unless all
errors are within the bounds.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ligermodels.integrations.auto_map import write_auto_map
from tests.examples.trainer_cases import FAMILIES
from tests.integrations.tiny import checkpoint, texts
from tests.markdown import ROOT

TOOLS = ("axolotl", "llamafactory", "unsloth")
PACKAGES = ("accelerate", "datasets", "peft", "torch", "transformers", "trl")
RESULTS = ROOT / "benchmarks" / "results" / "outside_tools.json"
BOUNDS = {"losses": 1e-5, "saved": 1e-5}
Errors = dict[str, dict[str, float]]


def interpreter(tool: str) -> Path:
    return ROOT / "build" / tool / "bin" / "python"


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a tool's process: offline, on a CPU, with caches in the folder."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory asks for transformers 5.6 or older
        "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth"),
    }


def letters() -> PreTrainedTokenizerFast:
    """Make a tokenizer of the letters of the texts; transformers reads Qwen2's only by letters."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"Ġw0123456789"]
    model = models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>")
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def prepare(folder: Path, families: list[str]) -> None:
    """Write a text in the formats of the tools, and two copies of each family's checkpoint."""
    lines = texts(16, 2)
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    alpaca = [{"instruction": x.split()[0], "input": "", "output": x} for x in lines]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca.json"}}))
    for family in families:
        hf = checkpoint(family, folder / family / "hf")
        letters().save_pretrained(hf)
        shutil.copytree(hf, folder / family / "native")
        write_auto_map(folder / family / "native", split_projections=True)


def measure(tool: str, folder: Path, families: list[str]) -> Errors:
    """Train with a tool on each family in an empty folder, and return the relative errors."""
    prepare(folder, families)
    command = [interpreter(tool), "-m", "tests.integrations.outside_worker", tool, folder]
    done = subprocess.run(
        list(map(str, command)), env=environment(folder), cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "errors.json").read_text(encoding="utf-8"))


def beyond(errors: Errors) -> dict[str, dict[str, float]]:
    """Return the cases with an error that is not within its bound."""
    return {
        case: values
        for case, values in errors.items()
        if not all(values[what] <= bound for what, bound in BOUNDS.items())
    }


def versions(tool: str) -> dict[str, str]:
    code = "import json, sys; from importlib.metadata import version; "
    code += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    command = [str(interpreter(tool)), "-c", code, tool, *PACKAGES]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def main() -> None:
    found: dict[str, Any] = {"python": platform.python_version(), "bounds": BOUNDS}
    for tool in TOOLS:
        if not interpreter(tool).exists():
            sys.exit(f"{interpreter(tool)} does not exist; run make outside-tools")
        with tempfile.TemporaryDirectory() as folder:
            errors = measure(tool, Path(folder), FAMILIES)
        assert not beyond(errors), (tool, beyond(errors))
        found[tool] = {"versions": versions(tool), "errors": errors}
        print(tool, {what: max(case[what] for case in errors.values()) for what in BOUNDS})
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
