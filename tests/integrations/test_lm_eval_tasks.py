"""Tasks of lm-eval: the numbers are those of transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ligermodels import AutoLiger, cli
from ligermodels.errors import ConfigError
from tests.training.tiny_run import make_checkpoint

lm_eval = pytest.importorskip("lm_eval")
METRICS = ("word_perplexity,none", "byte_perplexity,none")


@pytest.mark.usefixtures("quick_lm_eval")
def test_the_results_are_those_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ligermodels.integrations.lm_eval_tasks import evaluate_tasks

    folder = str(make_checkpoint(tmp_path / "tiny"))
    texts = [{"page": "the cat saw a dog and ran"}, {"page": "a dog and the dog"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (tmp_path / "pages.yaml").write_text(
        "task: pages\ndataset_path: json\noutput_type: loglikelihood_rolling\n"
        f"test_split: train\ndataset_kwargs: {{data_files: {tmp_path}/data.jsonl}}\n"
        "doc_to_text: ''\ndoc_to_target: '{{page}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]\n"
    )
    model, own = AutoLiger.from_hf(folder).train(), str(tmp_path)
    with pytest.raises(ConfigError, match="tasks: lm-eval knows no task 'pagse'; did you mean"):
        evaluate_tasks(model, folder, ["pages", "pagse"], task_folder=own)
    (ours,) = evaluate_tasks(model, folder, ["pages"], task_folder=own).values()
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    made = lm_eval.simple_evaluate(
        HFLM(pretrained=theirs, tokenizer=AutoTokenizer.from_pretrained(folder)),
        tasks=["pages"],
        task_manager=TaskManager(include_path=own, include_defaults=False),
    )
    (expected,) = made["results"].values()
    assert [ours[x] for x in METRICS] == pytest.approx([expected[x] for x in METRICS], rel=1e-5)
    (first,) = evaluate_tasks(model, folder, ["pages"], task_folder=own, limit=1).values()
    assert first[METRICS[0]] != ours[METRICS[0]]
    arguments = ["--tasks", "pages", "--task-folder", own, "--device", "cpu"]
    assert cli.main(["evaluate", folder, *arguments]) == 0
    assert f"word_perplexity,none {ours[METRICS[0]]:.4f}" in capsys.readouterr().out


def test_generated_texts_are_those_of_transformers(tmp_path: Path) -> None:
    """The contexts have all lengths. What generate_many does not know goes lm-eval's own way."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ligermodels.integrations.hf_model import LigerForCausalLM
    from ligermodels.integrations.lm_eval_tasks import NativeLM

    folder = make_checkpoint(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="</s>")
    wrapper = LigerForCausalLM.from_native(AutoLiger.from_hf(folder).eval())
    ours = NativeLM(pretrained=wrapper, tokenizer=tokenizer, batch_size=2)
    ours.max_batch = 2
    theirs = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer)
    contexts = ["the cat", "a", "a dog and the dog saw a cat", "I run", "x" * 300]
    varied = {"max_gen_toks": 12, "repetition_penalty": 50.0}

    def texts(model: HFLM, *options: dict[str, object]) -> list[str]:
        pairs = [(context, {**each}) for each in options for context in contexts]
        requests = [Instance("generate_until", {}, pair, i) for i, pair in enumerate(pairs)]
        return model.generate_until(requests, disable_tqdm=True)

    free = texts(theirs, varied)
    stops = {"until": [free[0][3:5], "</s>"]}
    kinds = [varied, varied | stops, {"max_gen_toks": 5, "num_beams": 2}, {"max_gen_toks": 3}]
    found = texts(ours, *kinds)
    assert found[:5] == free and found == texts(theirs, *kinds)
    assert 0 < free[0].index(stops["until"][0]) == len(found[5]) < len(free[0])
