"""lm-eval finds the same numbers on native models, on wrappers and on transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.models.auto import AutoLiger
from tests.integrations.tiny_text import texts, tokenizer
from tests.models import hf_models, zoo

TASKS = {
    "choice": """\
output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_choice: ['{{a}}', '{{b}}']
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "perplexity": """\
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{question}} {{a}} {{b}}'
metric_list: [{metric: word_perplexity, higher_is_better: false}]
""",
    "text": """\
output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: '{{a}}'
generation_kwargs: {until: [w5], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def write_tasks(folder: Path) -> None:
    """Write tasks on files, so that nothing is downloaded; the longest texts need two windows."""
    file = folder / "rows.jsonl"
    columns = (texts(12), texts(12, 1), texts(12, 2))
    rows = [
        {"question": question, "a": a, "b": b, "answer": number % 2}
        for number, (question, a, b) in enumerate(zip(*columns))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: tiny_{name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {file}}}}}\n{task}"
        )


@pytest.mark.usefixtures("quick_lm_eval")
def test_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from examples.trainers.lm_eval_model import NativeLM

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "checkpoint"
    hf_models.build("llama", zoo.Feature()).save_pretrained(folder)
    write_tasks(tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    options: dict[str, Any] = {"tokenizer": tokenizer(), "batch_size": 4, "max_length": 16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for lm in (
        HFLM(pretrained=theirs, **options),
        HFLM(pretrained=LigerForCausalLM.from_pretrained(folder), **options),
        NativeLM(AutoLiger.from_hf(folder), **options),
    ):
        names = [f"tiny_{name}" for name in TASKS]
        made = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager)
        found.append({(n, i): s["resps"] for n in names for i, s in enumerate(made["samples"][n])})
    expected = found[0]
    assert len(expected) == 3 * 12
    for other in found[1:]:
        assert other.keys() == expected.keys()
        for (name, number), responses in expected.items():
            mine = other[name, number]
            if name == "tiny_text":
                assert mine == responses
            else:
                flat = [x for answer in responses for x in numbers(answer)]
                assert [x for y in mine for x in numbers(y)] == pytest.approx(flat, rel=1e-5)


def numbers(response: Any) -> list[float]:
    """Return the numbers in lists and tuples of any depth."""
    if isinstance(response, (list, tuple)):
        return [number for each in response for number in numbers(each)]
    return [float(response)]
