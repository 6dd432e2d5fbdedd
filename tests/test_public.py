"""The public names come from one list, which is imported on the first use of a name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ligermodels
from ligermodels import public
from tests.limits import SECONDS

ROOT = Path(__file__).parent.parent


def python(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=SECONDS
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_names_are_those_of_the_list() -> None:
    names = [name for name in vars(public) if not name.startswith("_")]
    assert ligermodels.__all__ == sorted(names) and "register" in names
    for name in names:
        assert getattr(ligermodels, name) is getattr(public, name)
    assert set(names) <= set(dir(ligermodels))


LATER = ("FinetuneConfig", "LigerForCausalLM", "finetune", "get_peft_model")


def test_some_names_are_imported_alone() -> None:
    import ligermodels.integrations.peft_adapters as adapters
    from ligermodels.training.finetune import finetune

    assert ligermodels.finetune is finetune
    assert ligermodels.get_peft_model is adapters.get_peft_model
    assert set(LATER) <= set(dir(ligermodels)) and not set(LATER) & set(ligermodels.__all__)


WITHOUT_TRANSFORMERS = """
import inspect
sys.modules["transformers"] = None
try: from ligermodels import LigerForCausalLM
except ImportError as error: print(error)
try: ligermodels.LigerForCausalLM
except AttributeError as error: print(error)
print(hasattr(ligermodels, "LigerForCausalLM"), len(inspect.getmembers(ligermodels)) > 50)
"""


# Each takes a good part of a second or more. A program that needs none should not wait for them.
LATE_MODULES = {"transformers", "tokenizers", "huggingface_hub", "peft", "trl", "accelerate"}
LATE_MODULES |= {"datasets", "pandas", "matplotlib", "rich", "tyro", "torchao", "triton"}
LATE_MODULES |= {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy"}
LATE_MODULES |= {"torch.distributed.tensor", "ligermodels.training.finetune"}


def test_torch_is_imported_with_the_first_public_name_only() -> None:
    """The public names, `import *` among them, need no transformers and load no training.

    A name that needs it says how to install it. All is asked of one process, because a start takes
    seconds.
    """
    before = "import sys, ligermodels.errors, ligermodels.cli; from ligermodels import errors, cli"
    unknown = "ligermodels.__version__; hasattr(ligermodels, '__wrapped__')"
    shown = "print('torch' in sys.modules)"
    both = "from ligermodels import LlamaConfig; from ligermodels import *"
    later = f"print({LATE_MODULES!r} & {{*sys.modules}})"
    first = f"{before}; {unknown}; {shown}; {both}; dir(); {shown}; {later}"
    *said, one, other, found = python(f"{first}\n{WITHOUT_TRANSFORMERS}").splitlines()
    assert said == ["False", "True", "set()"] and found == "False True"
    assert all('pip install "ligermodels[trainers]"' in error for error in (one, other))
