"""Generate text: continue prompts token by token."""

from ligermodels.generation.ahead import AheadResult, generate_ahead
from ligermodels.generation.generate import generate, stream, stream_text
from ligermodels.generation.sampling import Sampling

__all__ = ["AheadResult", "Sampling", "generate", "generate_ahead", "stream", "stream_text"]
