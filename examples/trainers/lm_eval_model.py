"""Evaluate a native model on tasks of lm-eval.

python -m examples.trainers.lm_eval_model MODEL TASK...
"""

import sys
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from ligermodels import AutoLiger, DecoderModel


class NativeLM(TemplateLM):
    """A native model as lm-eval wants it.

    Args: model; tokenizer, of transformers; batch_size; max_length, of a context with its
        continuation, in tokens.
    """

    def __init__(
        self, model: DecoderModel, tokenizer: Any, batch_size: int = 8, max_length: int = 0
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model.eval(), tokenizer, batch_size
        self.max_length = max_length or model.config.max_position_embeddings
        self.target_device = model.embed_tokens.weight.device

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.bos_token or "\0")
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the greedy one."""
        found = []
        for start in range(0, len(requests), self.batch_size):
            rows, targets, lengths = [], [], []
            for _, context, continuation in requests[start : start + self.batch_size]:
                ids = torch.tensor((context + continuation)[-self.max_length - 1 :])
                target = ids[1:].clone()
                target[: -len(continuation)] = -100
                rows.append(ids[:-1])
                targets.append(target)
                lengths.append(len(continuation))
            hidden = self.model(pad_sequence(rows, True).to(self.target_device))
            out = self.model.head(
                hidden,
                pad_sequence(targets, True, padding_value=-100).to(self.target_device),
                return_token_stats=("log_probs", "correct"),
            )
            sums, right = out.token_log_probs.sum(1).tolist(), out.token_correct.sum(1).tolist()
            found += [(total, n == count) for total, n, count in zip(sums, right, lengths)]
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows of max_length."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(total for total, _ in self._loglikelihood_tokens(parts)))
        return found

    @torch.no_grad()
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy continuations, up to the first stop text or max_gen_toks tokens."""
        found = []
        for request in requests:
            context, options = request.args
            count = options.get("max_gen_toks", 256)
            prompt = self.tok_encode(context)[-(self.max_length - count) :]
            made = self.model.generate([prompt], max_new_tokens=count)[0, len(prompt) :]
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            for stop in options.get("until", []):
                text = text.split(stop)[0]
            found.append(text)
        return found


if __name__ == "__main__":
    name, *tasks = sys.argv[1:]
    lm = NativeLM(AutoLiger.from_hf(name), AutoTokenizer.from_pretrained(name))
    print(lm_eval.simple_evaluate(lm, tasks=tasks)["results"])
