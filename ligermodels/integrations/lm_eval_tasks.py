"""The tasks of lm-eval, on the HF wrapper of a native model; it generates with generate_many."""

import json
from collections.abc import Sequence
from typing import Any

from ligermodels.integrations import require

require("lm_eval", "transformers")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from ligermodels.errors import ConfigError, did_you_mean
from ligermodels.generation.generation_config import resolve_rule
from ligermodels.generation.many import generate_many
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.models.base import DecoderModel
from ligermodels.text.streaming import until as cut_at

# The options of a task with the same meaning in `generate_many`.
_RULE = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}


class NativeLM(HFLM):
    """lm-eval's model, whose texts the native model generates with a batch that stays full.

    Attributes:
        max_batch: the most rows of that batch, or None for what fits into memory.
    """

    max_batch: int | None = None

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to the strings of its task."""
        kinds: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        texts = [""] * len(requests)
        for indices in kinds.values():
            kind = [requests[index] for index in indices]
            for index, text in zip(indices, self._texts(kind, disable_tqdm)):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _texts(self, requests: list[Instance], disable_tqdm: bool) -> list[str]:
        """Return the texts of requests with the same options."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks))
        until, new = options.pop("until"), options.pop("max_gen_toks")
        until = [each for each in until if each]
        room = self.max_length - new
        if options.keys() - _RULE or room < 1:
            return super().generate_until(requests, disable_tqdm)
        if not options["do_sample"]:
            options = {k: x for k, x in options.items() if k in ("do_sample", "repetition_penalty")}
        prompts = [self.tok_encode(x.args[0], left_truncate_len=room) for x in requests]
        model, special = self.model.native, self.tokenizer.get_added_vocab()
        stops = [self.eot_token_id, *resolve_rule(model).stops]
        made = generate_many(
            model,
            prompts,
            new,
            max_batch=self.max_batch,
            tokenizer=self.tokenizer,
            stop_strings=until,
            eos_token_id=stops + [special[each] for each in until if each in special],
            progress=not disable_tqdm,
            **options,
        )
        return ["".join(cut_at([self.tok_decode(ids.tolist())], until)) for ids in made]


def evaluate_tasks(
    model: DecoderModel,
    folder: str,
    tasks: Sequence[str],
    *,
    batch_size: int | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    task_folder: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the results of lm-eval by task and metric, such as "acc,none".

    Args:
        model: in the dtype and on the device to compute with.
        folder: of its tokenizer.
        tasks: names of lm-eval's tasks or groups, or of those in `task_folder`.
        batch_size: rows of a forward pass, by default 4, or what fits where text is generated.
        num_fewshot: examples before each question, by default what the task says.
        limit: the most questions of a task.
    Raises:
        ConfigError: lm-eval knows no such task.
    """
    manager = TaskManager(include_path=task_folder)
    for task in tasks:
        if not manager.match_tasks([task]):
            hint = did_you_mean(task, manager.all_tasks)
            raise ConfigError(f"tasks: lm-eval knows no task {task!r}{hint}")
    wrapper = LigerForCausalLM.from_native(model.eval())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    language_model = NativeLM(pretrained=wrapper, tokenizer=tokenizer, batch_size=batch_size or 4)
    language_model.max_batch = batch_size
    found = lm_eval.simple_evaluate(
        language_model,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
    )
    kept = {task: dict(result) for task, result in found["results"].items()}
    for result in kept.values():
        result.pop("alias", None)
    return kept
