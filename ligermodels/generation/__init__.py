"""Generate text: continue prompts token by token."""

from ligermodels.generation.draft import DraftOptions, DraftResult, generate_drafted
from ligermodels.generation.generate import generate, stream, stream_text
from ligermodels.generation.sampling import Sampling

__all__ = [
    "DraftOptions",
    "DraftResult",
    "Sampling",
    "generate",
    "generate_drafted",
    "stream",
    "stream_text",
]
