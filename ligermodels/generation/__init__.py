"""Generate text: continue prompts token by token."""

from ligermodels.generation.generate import generate, stream, stream_text
from ligermodels.generation.sampling import Sampling

__all__ = ["Sampling", "generate", "stream", "stream_text"]
