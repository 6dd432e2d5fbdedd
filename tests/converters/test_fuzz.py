"""Good checkpoints broken at random: a load refuses each by name, or loads exactly its content.

The default run takes SAMPLE cases of each family, and `make test-long` takes 4000 of all families.
LIGERMODELS_FUZZ_CASES asks for another number, and LIGERMODELS_FUZZ_REPORT names a file for the
counts of the long run:

    LIGERMODELS_FUZZ_CASES=50000 LIGERMODELS_FUZZ_REPORT=benchmarks/results/fuzz.json \\
        python -m pytest -m long tests/converters/test_fuzz.py
"""

import json
import os
import platform
import random
import re
import shutil
import signal
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from ligermodels import AutoLiger, CheckpointError, ConfigError
from ligermodels.models.auto import families

from . import fuzzing, second_opinion
from .seeds import seeds

SAMPLE = 50
CASES = int(os.environ.get("LIGERMODELS_FUZZ_CASES", "4000")) // len(families())
REPORT = os.environ.get("LIGERMODELS_FUZZ_REPORT")
SECONDS = 60  # a load takes milliseconds, so one that takes a minute hangs
IDS = torch.tensor([[1, 5, 3, 0, 7, 2]])


class Hung(BaseException):
    """A load did not end. No `except Exception` of the loader catches this."""


@pytest.fixture(scope="module")
def report():
    """Count outcomes by family; LIGERMODELS_FUZZ_REPORT's file keeps other families' counts."""
    counts: dict[str, Counter] = {}
    yield counts
    print("\nfuzz:", dict(sum(counts.values(), Counter())))
    if REPORT:
        path = Path(REPORT)
        held = json.loads(path.read_text())["families"] if path.exists() else {}
        families = {**{name: Counter(held[name]) for name in held}, **counts}
        packages = {"torch": torch, "transformers": transformers}
        versions = {name: module.__version__ for name, module in packages.items()}
        result = {
            "environment": {"python": platform.python_version(), **versions},
            "total": sum(families.values(), Counter()),
            "families": families,
        }
        path.write_text(json.dumps(result, indent=1) + "\n")


def hung(*_):
    raise Hung


@pytest.mark.filterwarnings("ignore:.*tensors left out")
@pytest.mark.parametrize(
    "cases",
    [pytest.param(SAMPLE, id="sample"), pytest.param(CASES, id="long", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("family", families())
def test_broken_checkpoints(tmp_path, report, family, cases):
    trace = tmp_path / "executed"
    good = seeds(family)
    others = [*good, *seeds("llama"), *seeds("gemma2")]
    canary = f"import os\nos.mkdir({str(trace)!r})\nclass Model: pass\n".encode()
    counts = report.setdefault(family, Counter())
    for seed in good:
        outcome = one(tmp_path / "good", {**seed.files, "canary.py": canary}, {}, True)
        assert outcome == "loaded"
    before = signal.signal(signal.SIGALRM, hung)
    try:
        for number in range(cases):
            rng = random.Random(f"{family} {number}")
            state = {**rng.choice(good).files, "canary.py": canary}
            mutate = fuzzing.Mutator(rng, others, trace)
            kinds = [mutate(state) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            options = {"dtype": rng.choice([None, None, torch.float32, torch.float16])}
            options["allow_nonfinite"] = rng.random() < 0.3
            signal.alarm(SECONDS)
            try:
                outcome = one(tmp_path / "case", state, options, "config" in kinds)
            except BaseException as fault:
                sys.stderr.write(f"{family} case {number}: {kinds} {options} {fault!r}\n")
                raise
            finally:
                signal.alarm(0)
            counts["cases"] += 1
            counts[outcome] += 1
            assert not trace.exists(), f"{family} case {number} executed code from the checkpoint"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert counts["loaded"] and counts["ConfigError"] and counts["CheckpointError"]


@pytest.mark.filterwarnings("ignore:.*tensors left out")
@pytest.mark.parametrize("family", families())
def test_another_order_and_whitespace_load(tmp_path, family):
    """This fails if the loader refuses everything."""
    rng = random.Random(family)
    for seed in seeds(family):
        for name, content in list(seed.files.items()):
            if name.endswith(".json"):
                text = json.dumps(json.loads(content), indent=1).replace("model", r"\u006dodel")
                seed.files[name] = f"\n {text}\t".encode()
                continue
            length = struct.unpack_from("<Q", content)[0]
            header = json.loads(content[8 : 8 + length])
            tensors = {
                n: content[8 + length :][slice(*r["data_offsets"])]
                for n, r in header.items()
                if n != "__metadata__"
            }
            names = rng.sample(sorted(tensors), len(tensors))
            end = 0
            for tensor in names:
                begin, end = end, end + len(tensors[tensor])
                header[tensor]["data_offsets"] = [begin, end]
            header["__metadata__"] = {"any": "thing", "": "\n"}
            items = rng.sample(sorted(header.items()), len(header))
            text = (json.dumps(dict(items)) + " " * rng.randrange(9)).encode()
            data = b"".join(tensors[tensor] for tensor in names)
            seed.files[name] = struct.pack("<Q", len(text)) + text + data
        beside = {"consolidated.safetensors": b"", "pytorch_model.bin": b"", "onnx": "folder"}
        assert one(tmp_path / "case", {**seed.files, **beside, "p": "pipe"}, {}, True) == "loaded"


def one(folder, state, options, run):
    """Load one case; return "loaded" or the name of the error. Raise any other error."""
    fuzzing.write(folder, state)
    try:
        model = AutoLiger.from_hf(folder, **options)
    except (ConfigError, CheckpointError) as fault:
        line = str(fault).partition("\n")[0]
        assert re.match(rf"{re.escape(str(folder))}(/[^/]+)?( \(header\))?: ", line), line
        assert line.isprintable() and len(line) < 1000, line
        return type(fault).__name__
    finally:
        shutil.rmtree(folder)
    settings = {"dtype": None, "allow_nonfinite": False, **options}
    assert second_opinion.differences(model, state, **settings) == []
    if run:
        with torch.no_grad():
            assert model(IDS).shape == (1, 6, model.config.hidden_size)
    return "loaded"
