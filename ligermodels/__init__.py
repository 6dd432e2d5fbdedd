"""ligermodels: decoder-only transformers built natively from fused Triton layers.

The public names. Each is imported when it is first asked for, so that `import ligermodels` and the
command line's `--help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels.errors import CheckpointError, ConfigError, LigerError, SaveError
    from ligermodels.layers.kv_cache import KVCache
    from ligermodels.models.auto import AutoLiger
    from ligermodels.models.gemma import GemmaConfig, LigerGemma
    from ligermodels.models.gemma2 import Gemma2Config, LigerGemma2
    from ligermodels.models.gemma3 import Gemma3Config, LigerGemma3
    from ligermodels.models.llama import LigerLlama, LlamaConfig
    from ligermodels.models.load_pretrained import LoadReport, load_pretrained
    from ligermodels.models.mistral import LigerMistral, MistralConfig
    from ligermodels.models.qwen2 import LigerQwen2, Qwen2Config
    from ligermodels.models.qwen3 import LigerQwen3, Qwen3Config
    from ligermodels.text.tokenizer import Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "AutoLiger": "ligermodels.models.auto",
    "CheckpointError": "ligermodels.errors",
    "ConfigError": "ligermodels.errors",
    "Gemma2Config": "ligermodels.models.gemma2",
    "Gemma3Config": "ligermodels.models.gemma3",
    "GemmaConfig": "ligermodels.models.gemma",
    "KVCache": "ligermodels.layers.kv_cache",
    "LigerError": "ligermodels.errors",
    "LigerGemma": "ligermodels.models.gemma",
    "LigerGemma2": "ligermodels.models.gemma2",
    "LigerGemma3": "ligermodels.models.gemma3",
    "LigerLlama": "ligermodels.models.llama",
    "LigerMistral": "ligermodels.models.mistral",
    "LigerQwen2": "ligermodels.models.qwen2",
    "LigerQwen3": "ligermodels.models.qwen3",
    "LlamaConfig": "ligermodels.models.llama",
    "LoadReport": "ligermodels.models.load_pretrained",
    "MistralConfig": "ligermodels.models.mistral",
    "Qwen2Config": "ligermodels.models.qwen2",
    "Qwen3Config": "ligermodels.models.qwen3",
    "SaveError": "ligermodels.errors",
    "Tokenizer": "ligermodels.text.tokenizer",
    "load_pretrained": "ligermodels.models.load_pretrained",
}

__all__ = [
    "AutoLiger",
    "CheckpointError",
    "ConfigError",
    "Gemma2Config",
    "Gemma3Config",
    "GemmaConfig",
    "KVCache",
    "LigerError",
    "LigerGemma",
    "LigerGemma2",
    "LigerGemma3",
    "LigerLlama",
    "LigerMistral",
    "LigerQwen2",
    "LigerQwen3",
    "LlamaConfig",
    "LoadReport",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "SaveError",
    "Tokenizer",
    "load_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
