"""Classification, regression and reward heads beside transformers' ...ForSequenceClassification."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from ligermodels.cli import main
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.heads.classifier import (
    LigerClassifier,
    classification_loss,
    classifier_class,
    last_tokens,
    last_valid,
)
from ligermodels.memory.plan import MemoryPlan
from ligermodels.models.auto import AutoLiger, families
from tests.families import DECODERS, sampled, windows
from tests.memory.step_bytes import error_of_prediction
from tests.models import hf_models, zoo
from tests.tiny_models import VOCAB, random_model

PAD = 0


def hf_classifier(family: str, **changes):
    settings = {"initializer_range": 0.3, "pad_token_id": PAD, "num_labels": 3}
    sizes = zoo.sizes(family) | windows(family, 5)
    config_name, _ = DECODERS[family].hf
    config = zoo.config_class(family)(**sizes | settings | changes)
    name = config_name.replace("Config", "") + "ForSequenceClassification"
    torch.manual_seed(0)
    options = hf_models.implementations(family)
    model = getattr(transformers, name)._from_config(config, **options)
    return hf_models.with_its_activation(model).eval()


def padded_ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids with padding on the right, on the left and not at all, and their mask."""
    ids = torch.randint(1, VOCAB, (3, 11), generator=torch.Generator().manual_seed(0))
    ids[0, 7:] = PAD
    ids[1, :4] = PAD
    return ids, ids != PAD


# transformers has no such class for Gemma 4, Granite, and experts of Qwen3.5.
WITHOUT = ("gemma4_text", "granite", "granitemoehybrid", "qwen3_5_moe_text")


@pytest.mark.parametrize("family", sampled(x for x in DECODERS if x not in WITHOUT))
def test_equal_to_transformers(family: str, tmp_path: Path) -> None:
    theirs = hf_classifier(family)
    theirs.save_pretrained(tmp_path / "hf")
    ours = LigerClassifier.from_hf(tmp_path / "hf")
    assert isinstance(ours, families()[family])
    ids, mask = padded_ids()
    labels = torch.tensor([2, 0, 1])
    expected = theirs(ids, attention_mask=mask.long(), labels=labels)
    found = ours(ids, labels=labels, attention_mask=mask)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    torch.testing.assert_close(
        ours.head.score.weight.grad, theirs.score.weight.grad, rtol=1e-4, atol=1e-5
    )

    ours.save_hf(tmp_path / "out")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("hf", "out")]
    assert configs[0].items() <= configs[1].items()
    first, again = (type(theirs).from_pretrained(tmp_path / x) for x in ("hf", "out"))
    with torch.no_grad():
        assert torch.equal(first(ids).logits, again(ids).logits)


def test_problem_types_are_those_of_transformers(tmp_path: Path) -> None:
    ids, _ = padded_ids()
    cases = [
        (1, None, torch.tensor([0.5, -1.0, 2.0])),
        (3, None, torch.tensor([0, 2, 1])),
        (3, None, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]])),
        (2, "regression", torch.randn(3, 2)),
        (3, "multi_label_classification", torch.eye(3)),
    ]
    for number, kind, labels in cases:
        theirs = hf_classifier("llama", num_labels=number, problem_type=kind)
        theirs.save_pretrained(tmp_path)
        ours = LigerClassifier.from_hf(tmp_path)
        expected = theirs(ids, labels=labels).loss
        torch.testing.assert_close(ours(ids, labels=labels).loss, expected, rtol=1e-5, atol=1e-5)
        logits = torch.randn(3, number).bfloat16()  # A loss is computed in float32.
        found, exact = (classification_loss(x, labels, kind) for x in (logits, logits.float()))
        torch.testing.assert_close(found, exact)


def test_from_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model("qwen2", pad_token_id=PAD, tie_word_embeddings=False)
    cls = classifier_class(type(model))
    assert cls is classifier_class(type(model))
    assert cls.__name__ == "LigerQwen2ForSequenceClassification"
    names = {0: "bad", 1: "fine", 2: "good"}
    reward = cls.from_model(model, 3, id2label=names)
    assert reward.layers is model.layers and reward.head.score.weight.shape == (3, 32)
    ids, mask = padded_ids()
    logits = reward(ids, attention_mask=mask).logits
    tokens = reward.token_scores(ids, attention_mask=mask)
    torch.testing.assert_close(logits[0], tokens[0, 6])
    torch.testing.assert_close(logits[1:], tokens[1:, -1])
    reward.save_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["label2id"] == {"bad": 0, "fine": 1, "good": 2}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    expected = theirs(ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(expected, logits, rtol=1e-5, atol=1e-5)
    assert LigerClassifier.from_hf(tmp_path).head.score.weight.equal(reward.head.score.weight)
    said = "'score.weight' is the head of a classifier.*load it with LigerClassifier.from_hf"
    with pytest.raises(CheckpointError, match=said):
        AutoLiger.from_hf(tmp_path)
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert re.search(said, capsys.readouterr().err)
    model.save_hf(tmp_path / "model")
    said = r"'score.weight' is missing: the folder holds .*classifier_class\(.*\.from_model"
    with pytest.raises(CheckpointError, match=said):
        LigerClassifier.from_hf(tmp_path / "model")


def test_it_trains_like_its_family() -> None:
    model = random_model("llama", pad_token_id=PAD)
    reward = classifier_class(type(model)).from_model(model, 1)
    reward.activation_checkpointing_enable()
    ids, _ = padded_ids()
    chosen, rejected = reward(ids).logits[:, 0], reward(ids.flip(0)).logits[:, 0]
    (-F.logsigmoid(chosen - rejected)).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in reward.parameters())
    assert "rms_norm" in reward.kernels() and "linear_cross_entropy" not in reward.kernels()
    with pytest.raises(ConfigError, match="generates no text"):
        reward.generate(ids)


@pytest.mark.parametrize(
    "labels, problem_type", [(1, None), (3, None), (3, "multi_label_classification")]
)
def test_a_memory_plan_is_made_for_its_labels(labels: int, problem_type: str | None) -> None:
    model = random_model("llama", num_hidden_layers=2)
    cls = classifier_class(type(model))
    classifier = cls.from_model(model, labels, problem_type=problem_type)
    plan = classifier.plan_memory(2, 64, "1GiB")
    assert plan.prediction is not None and not plan.recomputes
    for policy in ("all", "input"):
        classifier.set_memory_plan(MemoryPlan.uniform(2, policy))
        assert abs(error_of_prediction(classifier, 64)) < 0.005


def test_the_last_token() -> None:
    ids, mask = padded_ids()
    hidden = torch.zeros(3, 11, 1)
    assert last_tokens(hidden, ids, PAD).tolist() == [6, 10, 10]
    assert last_tokens(hidden, ids, None, mask).tolist() == [6, 10, 10]
    assert last_tokens(hidden, ids, None).tolist() == [10, 10, 10]
    assert last_valid(torch.zeros(2, 4)).tolist() == [0, 0]


def test_what_is_refused(tmp_path: Path) -> None:
    model = random_model("llama")
    cls = classifier_class(type(model))
    with pytest.raises(ConfigError, match="is no classifier of LigerQwen2"):
        cls.from_model(random_model("qwen2"))
    with pytest.raises(ConfigError, match="id2label: expected names of the labels 0 to 2"):
        cls.from_model(model, 3, id2label={0: "a", 1: "b", 3: "c"})
    with pytest.raises(ConfigError, match="problem_type: 'ranking' is not one of regression"):
        cls.from_model(model, problem_type="ranking")
    hf_classifier("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": [1, 2]}))
    with pytest.raises(ConfigError, match="id2label: expected an object"):
        LigerClassifier.from_hf(tmp_path)
