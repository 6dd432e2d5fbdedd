"""Tasks of lm-eval: the numbers are those of transformers' own model."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch


@pytest.fixture
def stand_in(monkeypatch):
    """A stand-in for lm-eval, so that what we ask of it is tested where it is not installed."""
    found = SimpleNamespace(calls=[])
    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.tasks")}
    modules["lm_eval.models"] = ModuleType("lm_eval.models")
    modules["lm_eval.models.huggingface"] = ModuleType("lm_eval.models.huggingface")

    class TaskManager:
        all_tasks = ("arc_easy", "piqa")

        def __init__(self, include_path):
            self.include_path = include_path

        def match_tasks(self, names):
            return [name for name in names if name in self.all_tasks]

    def simple_evaluate(model, **options):
        found.calls.append((model, options))
        with torch.no_grad():
            logits = model.pretrained(torch.tensor([[1, 2, 3]])).logits
        results = {"acc,none": 0.5, "alias": " - arc", "vocab": logits.shape[-1]}
        return {"results": dict.fromkeys(options["tasks"], results)}

    modules["lm_eval"].simple_evaluate = simple_evaluate
    modules["lm_eval.tasks"].TaskManager = TaskManager
    modules["lm_eval.models.huggingface"].HFLM = SimpleNamespace
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = "ligermodels.integrations.lm_eval_tasks"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    yield found
    sys.modules.pop(ours, None)


def test_what_lm_eval_is_asked(stand_in, tmp_path, capsys):
    from ligermodels import AutoLiger, cli
    from ligermodels.errors import ConfigError
    from ligermodels.integrations.lm_eval_tasks import evaluate_tasks
    from tests.training.tiny_run import make_checkpoint

    folder = str(make_checkpoint(tmp_path / "tiny"))
    model = AutoLiger.from_hf(folder).train()
    with pytest.raises(ConfigError, match=r"tasks: lm-eval knows no task 'arc_esay'; did you mean"):
        evaluate_tasks(model, folder, ["piqa", "arc_esay"])
    assert not stand_in.calls
    found = evaluate_tasks(model, folder, ["piqa"], batch_size=3, limit=7, task_folder="mine")
    assert found == {"piqa": {"acc,none": 0.5, "vocab": model.config.vocab_size}}
    (asked, options), *_ = stand_in.calls
    assert asked.batch_size == 3 and not asked.pretrained.training and asked.tokenizer("the cat")
    assert options.pop("task_manager").include_path == "mine"
    assert options == {"tasks": ["piqa"], "num_fewshot": None, "limit": 7}
    assert cli.main(["evaluate", folder, "--tasks", "piqa", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "piqa  acc,none 0.5000\n"


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_results_are_those_of_transformers(quick, tmp_path, request):
    pytest.importorskip("lm_eval")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ligermodels import AutoLiger
    from ligermodels.integrations.lm_eval_tasks import evaluate_tasks
    from tests.training.tiny_run import make_checkpoint

    if quick:
        request.getfixturevalue("quick_lm_eval")
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
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=not quick),
    )
    for metric in ("word_perplexity,none", "byte_perplexity,none"):
        assert ours["pages"][metric] == pytest.approx(theirs["results"]["pages"][metric], rel=1e-5)
