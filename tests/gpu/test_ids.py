"""What a GPU does with ids, labels and positions of any value, without a synchronisation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_models import random_model

pytestmark = pytest.mark.gpu
VOCAB = 97

OUTSIDE = """
import sys
import torch
from tests.tiny_models import random_model

model = random_model("llama", hidden_size=64, head_dim=16).to("cuda")
ids = torch.tensor([[3, int(sys.argv[1])]], device="cuda")
options = {"labels": torch.zeros_like(ids)} if sys.argv[2] == "labels" else {}
call = torch.compile(model) if sys.argv[2] == "compiled" else model
torch.cuda.synchronize()
try:
    call(ids, **options)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("failed:", error)
else:
    print("a result came")
"""

# The low 32 bits of the last two are 0 and 5, which are in the vocabulary.
CASES = [
    *((outside, "forward") for outside in (-1, VOCAB, 2**32 + 5)),
    *((outside, "labels") for outside in (VOCAB, 2**40)),
    *((outside, "compiled") for outside in (-1, 2**40)),
]


@pytest.mark.skipif(torch.version.hip is not None, reason="ROCm builds have no device assertions")
@pytest.mark.parametrize(("outside", "kind"), CASES)
def test_an_id_outside_the_vocabulary_gives_no_result(outside, kind):
    """After the device-side assertion, a process cannot use the GPU, so each try has its own.

    The error that Python sees first need not name the assertion: it may come from a library that
    finds the GPU unusable, as cuBLAS does in code that torch.compile made.
    """
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, str(outside), kind],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    said = done.stdout + done.stderr[-2000:]
    assert done.stdout.startswith("failed: "), said
    assert "assert" in done.stdout or re.search(r"Assertion `.*` failed", done.stderr), said


@pytest.mark.parametrize("outside", [-1, VOCAB, 2**31, 2**40, 2**32 + 5, -(2**40)])
def test_a_label_outside_the_vocabulary_makes_the_loss_nan(outside):
    """No row is read out of bounds, the other rows keep their losses, and the GPU stays usable."""
    model = random_model("llama", hidden_size=64, head_dim=16).to("cuda")
    ids = torch.tensor([[3, 4, 5, 6, 7]], device="cuda")
    labels = ids.clone()
    expected = model(ids, labels=labels, reduction="none").loss
    labels[0, 2] = outside  # The model shifts labels by one.
    found = model(ids, labels=labels, reduction="none").loss
    assert found[0].isnan().tolist() == [False, True, False, False, False]
    torch.testing.assert_close(found[0, [0, 2, 3]], expected[0, [0, 2, 3]])
    loss = model(ids, labels=labels).loss
    assert loss.isnan()
    loss.backward()
    torch.cuda.synchronize()
