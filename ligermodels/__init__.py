"""ligermodels: decoder-only transformers built natively from fused Triton layers.

`ligermodels.public` imports the public names. Python imports that module at the first access to one
of them, so `import ligermodels` and the command line's `--help` do not wait for torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Public names that are imported alone: they need a library that is optional, or most of this one.
_LATER = {
    "FinetuneConfig": "ligermodels.training.config",
    "LigerForCausalLM": "ligermodels.integrations.hf_model",
    "finetune": "ligermodels.training.finetune",
    "get_peft_model": "ligermodels.integrations.peft_adapters",
}

if TYPE_CHECKING:  # There is no __getattr__ here, so type checkers report names that do not exist.
    from ligermodels.integrations.hf_model import LigerForCausalLM as LigerForCausalLM
    from ligermodels.integrations.peft_adapters import get_peft_model as get_peft_model
    from ligermodels.public import *  # noqa: F403
    from ligermodels.training.config import FinetuneConfig as FinetuneConfig
    from ligermodels.training.finetune import finetune as finetune

    __version__: str

else:

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _version()
        if name in _LATER:
            try:
                module = import_module(_LATER[name])
            except ModuleNotFoundError as error:
                # hasattr and inspect expect an AttributeError. An import statement would replace
                # one by an error that does not say how to install what is missing.
                if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                    raise
                raise AttributeError(f"{__name__}.{name}: {error}") from error
            globals()[name] = value = getattr(module, name)
            return value
        # Python and its tools also look up special names, and submodules before they import them.
        special = name.startswith("_") and name != "__all__"
        if not special and find_spec(f"{__name__}.{name}") is None:
            imported = vars(import_module("ligermodels.public"))
            names = {each: value for each, value in imported.items() if not each.startswith("_")}
            names["__all__"] = sorted(names)
            globals().update(names)
            if name in names:
                return names[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER, *__getattr__("__all__")})


def _version() -> str:
    """Return the version of the installed package. A copy that is not installed has no version."""
    from importlib import metadata  # The import takes as long as all others of this module.

    try:
        return metadata.version("ligermodels")
    except metadata.PackageNotFoundError:
        return "0+unknown"
