"""Every test relies on this file: markers, one CPU thread, the small pretrained checkpoint."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The command line would set expandable segments, which change what the planner leaves free.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "")
# A test has failed while another process compiled into the same folder.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parent.parent / "build" / "inductor" / WORKER)
)
# Where DeepSpeed finds no GPU, it says so on stdout when transformers imports it, in the middle of
# what a command prints.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of <malloc.h>
INTERPRETER_FOLDER = Path(__file__).parent / "interpreter"
SMOLLM2 = Path(__file__).parent.parent / "build" / "smollm2"


def pytest_configure(config: pytest.Config) -> None:
    # The collector would walk again and again through what the imports make, and most of it stays.
    gc.disable()
    # A shell that starts the tests in the background lets them ignore Ctrl+C. Some send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # this process hands the tests to others, and needs none of what takes seconds here
    import torch

    # The tests are many and small, and several processes share the cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    # No variable of torch turns oneDNN off. Processes that a test forks inherit this.
    if os.environ.get("LIGERMODELS_ONEDNN") == "0":
        torch.backends.mkldnn.set_flags(False)
    keep_freed_memory()
    # No test loses power, and a disk takes milliseconds to flush a file. system_calls.py flushes.
    os.fsync = lambda descriptor: None
    if os.environ.get("TRITON_INTERPRET") == "1":
        hurry_the_interpreter()


def keep_freed_memory() -> None:
    """Let malloc take freed memory again, where it is glibc's.

    Otherwise each large tensor is a new mapping, whose pages the kernel fills with zeros.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def hurry_the_interpreter() -> None:
    """Leave out what Triton's interpreter does again and again, which takes longer than the tests.

    It replaces the functions of triton.language before each launch and each call of a device
    function, and restores them after a launch. Nothing in this process needs the functions of the
    compiler, so they stay replaced. It computes again in int64 whether an integer overflows, and
    then drops the result, because it only asserts it for kernels that are debugged. And it makes
    the same few types and shapes for each operation, which are kept here.
    """
    from triton.language import core
    from triton.runtime import interpreter

    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    dtypes: dict[str, Any] = {}
    numpy_dtype = interpreter._get_np_dtype

    def kept_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    make_block = core.block_type.__init__

    def kept_block(block: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *core._unwrap_shape(shape))
        if key not in blocks:
            make_block(block, element_ty, shape)
            blocks[key] = dict(vars(block))
        vars(block).update(blocks[key])

    sizes: dict[tuple[int, ...], dict[str, Any]] = {}
    make_tensor = core.tensor.__init__

    def kept_size(tensor: Any, handle: Any, dtype: Any) -> None:
        shape = tuple(dtype.shape) if dtype.is_block() else ()
        if shape not in sizes:
            make_tensor(tensor, handle, dtype)
            sizes[shape] = {"shape": tensor.shape, "numel": tensor.numel}
        vars(tensor).update(sizes[shape], handle=handle, type=dtype, dtype=dtype.scalar)

    interpreter._get_np_dtype = kept_dtype
    core.block_type.__init__ = kept_block
    core.tensor.__init__ = kept_size


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    # pytest's own -m would replace a "not long" in addopts, so the default is made here.
    if not re.search(r"\blong\b", config.option.markexpr):
        left_out = [item for item in items if "long" in item.keywords]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if "long" not in item.keywords]
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    other_process = pytest.mark.skip(reason="needs a process with TRITON_INTERPRET=1")
    for item in items:
        if INTERPRETER_FOLDER in item.path.parents:
            item.add_marker("interpreter")
        if item.get_closest_marker("gpu") and (interpreting or not torch.cuda.is_available()):
            item.add_marker(no_gpu)
        if "interpreter" in item.keywords and not interpreting:
            item.add_marker(other_process)


def set_apart() -> None:
    """Let the garbage collector pass over all objects that are alive now.

    torch.compile and several tests run the collector. It would walk through millions of objects of
    imported modules, which stay until the end.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    set_apart()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def modules_set_apart() -> Iterator[None]:
    """Set the modules apart that the tests of a file have imported."""
    yield
    set_apart()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the families that a test registers after it."""
    from ligermodels.models import auto

    monkeypatch.setattr(auto, "_registered", auto.families())


@pytest.fixture
def rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plain cross entropy compute all rows of a chunk at once.

    On a CPU it takes a sixteenth of them at a time, which is most of what a simulation of a tiny
    model does. tests/memory/test_simulate.py compares their bytes with those of real steps.
    """
    from ligermodels.kernels.reference import cross_entropy

    monkeypatch.setattr(cross_entropy, "_rows_per_block", lambda logits: max(len(logits), 1))


@pytest.fixture(autouse=True, scope="session")
def without_drawing() -> Iterator[None]:
    """Let runs write a picture without content, because drawing takes longer than their steps.

    tests/training/test_run_dir.py draws, and so do the commands of the README in test_readme.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") != "1":  # where no test trains
            from tests.training.tiny_run import draw_nothing

            patch.setattr("ligermodels.training.finetune.plot_losses", draw_nothing)
        yield


@pytest.fixture
def quick_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of lm-eval what takes longer than the tests, or skip where it is not installed.

    These are the index of its 15,000 tasks, the packages that it notes, and standard errors.
    """
    lm_eval = pytest.importorskip("lm_eval")
    from ligermodels.integrations import lm_eval_tasks

    manager = functools.partial(lm_eval_tasks.TaskManager, include_defaults=False)
    evaluate = functools.partial(lm_eval.simple_evaluate, bootstrap_iters=0)
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", manager)
    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return a folder with SmolLM2-135M-Instruct, the real checkpoint that tests load.

    LIGERMODELS_SMOLLM2 names another folder. `make test` makes build/smollm2 before it starts.
    """
    folder = Path(os.environ.get("LIGERMODELS_SMOLLM2", SMOLLM2))
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} has no checkpoint: run python examples/smollm2.py {folder}")
    return folder
