"""ligermodels: decoder-only transformers built natively from fused Triton layers."""

from ligermodels.auto import AutoLiger
from ligermodels.errors import CheckpointError, ConfigError, LigerError, SaveError
from ligermodels.models.llama import LigerLlama, LlamaConfig
from ligermodels.tokenizers import Tokenizer

__version__ = "0.1.0"

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
