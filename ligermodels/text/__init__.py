"""Convert text to token ids and back: tokenizers, chat templates and streaming."""

from ligermodels.text.streaming import TextStream
from ligermodels.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
