"""The tasks of lm-eval, on the HF wrapper of a native model."""

from collections.abc import Sequence
from typing import Any

from ligermodels.integrations import require

require("lm_eval", "transformers")

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from ligermodels.errors import ConfigError, did_you_mean
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.models.base import DecoderModel


def evaluate_tasks(
    model: DecoderModel,
    folder: str,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    num_fewshot: int | None = None,
    limit: int | None = None,
    task_folder: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the results of lm-eval by task and metric, such as "acc,none".

    Args:
        model: in the dtype and on the device to compute with.
        folder: of its tokenizer.
        tasks: names of lm-eval's tasks or groups, or of those in `task_folder`.
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
    found = lm_eval.simple_evaluate(
        HFLM(pretrained=wrapper, tokenizer=tokenizer, batch_size=batch_size),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
    )
    kept = {task: dict(result) for task, result in found["results"].items()}
    for result in kept.values():
        result.pop("alias", None)
    return kept
