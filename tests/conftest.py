"""What every test may rely on: markers, one CPU thread, the small pretrained checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

INTERPRETER_FOLDER = Path(__file__).parent / "interpreter"
SMOLLM2 = Path(__file__).parent.parent / "build" / "smollm2"


def pytest_configure(config: pytest.Config) -> None:
    import torch

    # Tests are many and small, and several processes share the cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    other_process = pytest.mark.skip(reason="needs a process with TRITON_INTERPRET=1")
    for item in items:
        if INTERPRETER_FOLDER in item.path.parents:
            item.add_marker("interpreter")
        if "gpu" in item.keywords and (interpreting or not torch.cuda.is_available()):
            item.add_marker(no_gpu)
        if "interpreter" in item.keywords and not interpreting:
            item.add_marker(other_process)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder with SmolLM2-135M-Instruct, the real checkpoint that tests load.

    LIGERMODELS_SMOLLM2 names another one; `make test` makes build/smollm2 before it starts.
    """
    folder = Path(os.environ.get("LIGERMODELS_SMOLLM2", SMOLLM2))
    if not (folder / "config.json").is_file():
        pytest.skip(f"no checkpoint in {folder}: run python examples/smollm2.py {folder}")
    return folder
