"""Texts that a model generates while it is trained, so that one can read what it learns."""

from __future__ import annotations

from typing import Any

import torch

from ligermodels.errors import ConfigError
from ligermodels.models.base import DecoderModel
from ligermodels.text.tokenizer import Tokenizer


class Sampler:
    """Continues the same prompts greedily, whenever it is called.

    Args:
        prompts: texts.
        max_new_tokens: most tokens of a continuation.
        chat: whether a prompt is the message of a user, which the chat template formats.
    Raises:
        CheckpointError: there is no chat template.
        ConfigError: a prompt has no tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompts: list[str], *, max_new_tokens: int, chat: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.ids = [self._encode(prompt, chat) for prompt in prompts]
        if [] in self.ids:
            raise ConfigError("sample_prompts: a prompt is empty; give each prompt some text")

    def _encode(self, prompt: str, chat: bool) -> list[int]:
        if not chat:
            return self.tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}]
        ids: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return ids

    @torch.no_grad()
    def __call__(self, model: DecoderModel) -> list[dict[str, str]]:
        """Return each prompt and the text that the model continues it with."""
        was_training = model.training
        model.eval()
        found = []
        for prompt, ids in zip(self.prompts, self.ids):
            made = model.generate([ids], max_new_tokens=self.max_new_tokens)[0, len(ids) :]
            found.append({"prompt": prompt, "text": self.tokenizer.decode(made)})
        model.train(was_training)
        return found
