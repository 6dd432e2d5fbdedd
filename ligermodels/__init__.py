"""ligermodels: decoder-only transformers built natively from fused Triton layers.

The public names. Each is imported when it is first asked for, so that `import ligermodels` and the
command line's `--help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels.auto import AutoLiger
    from ligermodels.errors import CheckpointError, ConfigError, LigerError, SaveError
    from ligermodels.models.llama import LigerLlama, LlamaConfig
    from ligermodels.tokenizers import Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "AutoLiger": "ligermodels.auto",
    "CheckpointError": "ligermodels.errors",
    "ConfigError": "ligermodels.errors",
    "LigerError": "ligermodels.errors",
    "LigerLlama": "ligermodels.models.llama",
    "LlamaConfig": "ligermodels.models.llama",
    "SaveError": "ligermodels.errors",
    "Tokenizer": "ligermodels.tokenizers",
}

__all__ = [
    "AutoLiger",
    "CheckpointError",
    "ConfigError",
    "LigerError",
    "LigerLlama",
    "LlamaConfig",
    "SaveError",
    "Tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
