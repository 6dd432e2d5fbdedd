"""Wrappers with weights of few bits, by bitsandbytes and torchao: the numbers of HF's model."""

from __future__ import annotations

import gc

import pytest
import torch

from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.integrations.peft_adapters import get_peft_model
from tests.training.tiny_run import make_checkpoint

transformers = pytest.importorskip("transformers")
KINDS = (
    "bitsandbytes-4bit",
    "bitsandbytes-4bit-double",
    "bitsandbytes-8bit",
    "torchao-int8",
    "torchao-float8",
)
IN_THE_SUITE = ("bitsandbytes-4bit-double", "torchao-float8")
SOME_LONG = [k if k in IN_THE_SUITE else pytest.param(k, marks=pytest.mark.long) for k in KINDS]
IDS = torch.randint(0, 258, (2, 17), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore")


def quantization_config(kind: str):
    if kind.startswith("torchao"):
        ao = pytest.importorskip("torchao.quantization")
        one_scale = ao.Float8WeightOnlyConfig(granularity=ao.PerTensor())
        return transformers.TorchAoConfig(
            ao.Int8WeightOnlyConfig() if kind.endswith("int8") else one_scale
        )
    pytest.importorskip("bitsandbytes")
    if kind == "bitsandbytes-8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=kind.endswith("double"),
        bnb_4bit_compute_dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    return make_checkpoint(tmp_path_factory.mktemp("quantised") / "tiny", **sizes)


def loss_of(model) -> float:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, labels=IDS).loss.item()


def opened(cls, folder, **options):
    gc.collect()
    return cls.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("kind", IN_THE_SUITE)
def test_a_quantised_classifier(folder, kind) -> None:
    """Scales that are chosen for a whole weight are those of HF's weights."""
    logits = []
    for cls in (transformers.AutoModelForSequenceClassification, LigerForSequenceClassification):
        torch.manual_seed(0)
        model = opened(cls, folder, quantization_config=quantization_config(kind)).eval()
        model.config.pad_token_id = 0
        with torch.no_grad():
            logits.append(model(IDS).logits)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SOME_LONG)
def test_adapters_on_a_quantised_wrapper(folder, kind) -> None:
    """On a CPU, bitsandbytes has no right gradients after a forward without them."""
    peft, config = pytest.importorskip("peft"), quantization_config(kind)
    options = {"r": 2, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    losses, grads = [], []
    for cls in (transformers.AutoModelForCausalLM, LigerForCausalLM):
        model = opened(cls, folder, quantization_config=config)
        adapted = get_peft_model(model.train(), peft.LoraConfig(**options))
        adapters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        torch.manual_seed(0)
        for name in sorted(adapters):
            torch.nn.init.normal_(adapters[name], std=0.1)
        losses.append(adapted(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        grads.append({name: parameter.grad for name, parameter in adapters.items()})
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    expected, found = grads
    assert found.keys() == expected.keys() and len(found) == 28
    for name, grad in expected.items():
        assert grad.any()
        assert (found[name] - grad).norm() <= 1e-4 * grad.norm(), name


@pytest.mark.parametrize("kind", SOME_LONG)
def test_quantised_checkpoints_both_ways(folder, tmp_path, kind) -> None:
    config = quantization_config(kind)
    auto = transformers.AutoModelForCausalLM
    opened(auto, folder, quantization_config=config).save_pretrained(tmp_path / "theirs")
    assert loss_of(opened(LigerForCausalLM, tmp_path / "theirs")) == pytest.approx(
        loss_of(opened(auto, tmp_path / "theirs")), rel=1e-5
    )
    wrapper = opened(LigerForCausalLM, folder, quantization_config=config)
    wrapper.save_pretrained(tmp_path / "ours")
    for cls in (auto, LigerForCausalLM):
        assert loss_of(opened(cls, tmp_path / "ours")) == pytest.approx(loss_of(wrapper), rel=1e-5)
