"""Tasks of lm-eval: the numbers are those of transformers' own model."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("lm_eval")


def test_the_results_are_those_of_transformers(tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ligermodels import AutoLiger
    from ligermodels.integrations.lm_eval_tasks import evaluate_tasks
    from tests.training.tiny_run import make_checkpoint

    folder = str(make_checkpoint(tmp_path / "tiny"))
    texts = [{"page": "the cat saw a dog and ran"}, {"page": "a dog and the dog"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (tmp_path / "pages.yaml").write_text(
        "task: pages\ndataset_path: json\noutput_type: loglikelihood_rolling\n"
        f"test_split: train\ndataset_kwargs: {{data_files: {tmp_path}/data.jsonl}}\n"
        "doc_to_text: ''\ndoc_to_target: '{{page}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]\n"
    )
    ours = evaluate_tasks(AutoLiger.from_hf(folder), folder, ["pages"], task_folder=str(tmp_path))
    theirs = lm_eval.simple_evaluate(
        HFLM(
            pretrained=AutoModelForCausalLM.from_pretrained(folder),
            tokenizer=AutoTokenizer.from_pretrained(folder),
        ),
        tasks=["pages"],
        task_manager=TaskManager(include_path=str(tmp_path)),
    )
    for metric in ("word_perplexity,none", "byte_perplexity,none"):
        assert ours["pages"][metric] == pytest.approx(theirs["results"]["pages"][metric], rel=1e-5)
