"""The wrappers compute, generate, save and load what transformers' own models do."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from ligermodels import LigerMixtral, MixtralConfig
from ligermodels.errors import ConfigError, SaveError
from ligermodels.integrations.hf_base import LigerModel, check_version
from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.models.auto import AutoLiger
from ligermodels.models.base import DecoderModel
from tests import outside
from tests.integrations.tiny import ids, theirs, tokenizer
from tests.models import hf_models, zoo
from tests.models.pairs import relative
from tests.tiny_models import random_model


@pytest.mark.parametrize("family", ["mixtral", "qwen3_5_moe_text"])
def test_experts_that_a_file_has_in_one_tensor_are_saved_one_by_one(
    family: str, tmp_path: Path
) -> None:
    expected = hf_models.build(family, zoo.features(family)["basic"])
    expected.save_pretrained(tmp_path / "one tensor", save_original_format=False)
    model = LigerForCausalLM.from_pretrained(tmp_path / "one tensor")
    model.save_pretrained(tmp_path / "saved")
    for found in (model, theirs(tmp_path / "saved")):
        assert relative(found(ids()).logits, expected(ids()).logits) < 1e-5


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "name",
    [x if x == "glm4" else pytest.param(x, marks=pytest.mark.long) for x in outside.NAMES],
)
def test_a_family_from_outside(name: str, tmp_path: Path) -> None:
    cls = outside.family(name)
    torch.manual_seed(0)
    native = cls(cls.config_class.small()).eval()
    native.save_hf(tmp_path / "native")
    model = LigerForCausalLM.from_pretrained(tmp_path / "native")
    assert torch.equal(model(ids()).logits, native.head.logits(native(ids())))
    model.save_pretrained(tmp_path / "again")
    again = AutoLiger.from_hf(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in native.state_dict().items())
    expected = theirs(tmp_path / "again")
    torch.testing.assert_close(model(ids()).logits, expected(ids()).logits, rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    made = model.generate(ids(), max_new_tokens=5, do_sample=False, pad_token_id=2)
    assert torch.equal(
        made, expected.generate(ids(), max_new_tokens=5, do_sample=False, pad_token_id=2)
    )


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_balance_of_experts_is_that_of_transformers(recomputes: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig.small(output_router_logits=True, initializer_range=0.3)
    LigerMixtral(config).save_hf(tmp_path)
    ours, expected = LigerForCausalLM.from_pretrained(tmp_path).train(), theirs(tmp_path).train()
    if recomputes:
        ours.gradient_checkpointing_enable()
    mask = torch.ones_like(ids())
    mask[0, :4] = 0
    call = {"attention_mask": mask, "labels": ids().masked_fill(mask == 0, -100)}
    call["labels"][0, 4] = -100  # padding attends to no token
    losses = [model(ids(), **call) for model in (ours, expected)]
    fused = ours(ids(), **call, fused_lm_head=True)
    for name in ("loss", "aux_loss"):
        torch.testing.assert_close(losses[0][name], losses[1][name], rtol=1e-5, atol=0)
        torch.testing.assert_close(fused[name], losses[1][name], rtol=1e-5, atol=0)
    assert len(losses[0].router_logits) == config.num_hidden_layers
    for each in losses:
        each.aux_loss.backward()
    found, gate = ours.native.layers[0].mlp.router.weight, expected.model.layers[0].mlp.gate.weight
    assert relative(found.grad, gate.grad) <= 1e-5


@pytest.mark.parametrize(
    ("options", "is_native"),
    [
        ({}, True),
        ({"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.3}, False),
        ({"do_sample": True, "top_k": 5}, True),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "min_p": 0.1}, True),
        ({"do_sample": True, "num_return_sequences": 3, "eos_token_id": [5, 40, 77]}, True),
        ({"attention_mask": None, "repetition_penalty": 1.3}, True),
        ({"repetition_penalty": 1.3}, True),  # transformers' counts padding
        ({"min_new_tokens": 4, "eos_token_id": [*range(80)]}, True),
        ({"do_sample": True, "typical_p": 0.5, "no_repeat_ngram_size": 2}, True),
        ({"logits_processor": [transformers.TemperatureLogitsWarper(2.0)]}, True),
        ({"guidance_scale": 1.5}, True),
        ({"prefill_chunk_size": 4}, False),
        ({"past_key_values": transformers.DynamicCache}, False),
        ({"stopping_criteria": [lambda ids, _: torch.ones(len(ids)).bool()]}, False),
    ],
    ids=lambda options: ", ".join(options) or "greedy" if isinstance(options, dict) else "",
)
def test_it_generates_what_transformers_does(
    options: dict[str, Any],
    is_native: bool,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It uses the native `generate` where that can do what is asked, draws included."""
    made, used = [], Mock(side_effect=DecoderModel.generate)
    monkeypatch.setattr(DecoderModel, "generate", lambda *args, **given: used(*args, **given))
    mask = torch.ones_like(ids())
    mask[0, :3] = 0
    for model in (LigerForCausalLM.from_pretrained(folders["gemma2"]), theirs(folders["gemma2"])):
        torch.manual_seed(0)
        kept = {"attention_mask": mask, "max_new_tokens": 10, "pad_token_id": 2}
        given = {name: x() if isinstance(x, type) else x for name, x in options.items()}
        made.append(model.generate(ids(), **(kept | given)))
    assert torch.equal(*made)
    assert used.called == is_native


def test_what_is_not_plain_goes_through_the_forward(folders: dict[str, Path]) -> None:
    """Hooks see every step, a streamer every token, and a returned cache has the tokens."""
    model = LigerForCausalLM.from_pretrained(folders["llama"])
    expected, seen = model.generate(ids(1), max_new_tokens=4), []
    hook = model.model.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model.generate(ids(1), max_new_tokens=4), expected) and len(seen) == 4
    hook.remove()
    found = model.generate(ids(1), max_new_tokens=4, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert found.past_key_values.get_seq_length() == expected.shape[1] - 1
    cache = transformers.DynamicCache()
    model.generate(ids(1), max_new_tokens=4, past_key_values=cache)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_generation_with_an_assistant_and_from_embeddings(folders: dict[str, Path]) -> None:
    """An assistant proposes tokens. Those that are refused have to leave the cache again."""
    made = []
    for opened in (LigerForCausalLM.from_pretrained, theirs):
        model, assistant = opened(folders["llama"]), opened(folders["llama"])
        with torch.no_grad():
            assistant.lm_head.weight.mul_(
                torch.linspace(0.2, 1, len(assistant.lm_head.weight))[:, None]
            )
        kept = {"max_new_tokens": 10, "pad_token_id": 2}
        assert not torch.equal(assistant.generate(ids(1), **kept), model.generate(ids(1), **kept))
        made.append(
            [
                model.generate(ids(1), assistant_model=assistant, **kept),
                model.generate(ids(1), prompt_lookup_num_tokens=3, **kept),
                model.generate(inputs_embeds=model.get_input_embeddings()(ids()), **kept),
                model.generate(ids(1), use_cache=False, **kept),
            ]
        )
    for ours, expected in zip(*made):
        assert torch.equal(ours, expected)


def test_an_early_exit_is_refused(folders: dict[str, Path]) -> None:
    model = LigerForCausalLM.from_pretrained(folders["llama"])
    with pytest.raises(ConfigError, match="leave out assistant_early_exit"):
        model.generate(ids(1), assistant_early_exit=1, max_new_tokens=2, pad_token_id=2)


def test_a_loop_with_the_cache_that_is_returned(folders: dict[str, Path]) -> None:
    """As in transformers, a cache is returned unless use_cache says otherwise."""
    made = []
    for model in (LigerForCausalLM.from_pretrained(folders["gemma2"]), theirs(folders["gemma2"])):
        first = model(ids())
        made.append(model(ids()[:, :2], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5)
    model = LigerForCausalLM.from_pretrained(folders["gemma2"])
    assert model.model(ids(), use_cache=True).past_key_values.get_seq_length() == 9
    assert model(ids(), use_cache=False).past_key_values is None
    assert model(ids(), labels=ids()).past_key_values is None


def test_where_the_numbers_are_others_than_in_transformers(folders: dict[str, Path]) -> None:
    """The page says so: documents beside a mask of ones, and a loss of no targets."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    ours = LigerForCausalLM.from_pretrained(folders["llama"])
    alone = theirs(folders["llama"])(ids(1)[:, 4:]).logits
    for mask in (None, torch.ones_like(ids(1))):
        # By default no cache is returned, which would join the documents of a packed row.
        found = ours(ids(1), position_ids=positions, attention_mask=mask).logits
        torch.testing.assert_close(found[:, 4:], alone, rtol=1e-5, atol=1e-5)
    assert ours(ids(1), labels=torch.full_like(ids(1), -100)).loss == 0


def test_a_mask_of_floats(folders: dict[str, Path]) -> None:
    """PEFT makes such masks for virtual tokens."""
    mask = torch.ones(2, 9)
    mask[0, :3] = 0
    model = LigerForCausalLM.from_pretrained(folders["llama"])
    expected = theirs(folders["llama"])(ids(), attention_mask=mask).logits
    got = model(ids(), attention_mask=mask).logits
    torch.testing.assert_close(got[mask > 0], expected[mask > 0], rtol=1e-5, atol=1e-5)


def test_an_older_transformers_is_refused() -> None:
    """It reads HF's names, but not into packed projections, which would stay random."""
    with pytest.raises(ConfigError, match=r"transformers 5\.6\.0: .*install transformers 5\.16"):
        check_version("5.6.0")
    check_version("5.16.1")


def test_the_older_way_to_recompute_blocks(folders: dict[str, Path]) -> None:
    """LLaMA-Factory calls a private method of transformers' models."""
    model = LigerForCausalLM.from_pretrained(folders["llama"])
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=lambda *_: None)
    assert model.is_gradient_checkpointing
    model._set_gradient_checkpointing(enable=False)
    assert not model.is_gradient_checkpointing


def test_it_shares_the_parameters_of_the_native_model(folders: dict[str, Path]) -> None:
    for family in ("llama", "gemma"):  # untied and tied
        native = AutoLiger.from_hf(folders[family])
        wrapper = LigerForCausalLM.from_native(native)
        assert wrapper.native is native
        before = native.loss(ids(), ids())
        with torch.no_grad():
            native.layers[0].mlp.gate_up_proj.weight.mul_(1.5)
        after = wrapper(ids(), labels=ids(), skip_logits=True)
        assert after.loss != before and after.logits is None
        assert torch.equal(after.loss, native.loss(ids(), ids()))
        want, got = native.state_dict(), wrapper.native.state_dict()
        assert want.keys() == got.keys()


def test_in_training_logits_are_made_for_tools_that_ask(folders: dict[str, Path]) -> None:
    wrapper = LigerForCausalLM.from_pretrained(folders["llama"]).train()
    assert wrapper(ids(), labels=ids()).logits is None
    wrapper.trains_with_logits = True
    made = wrapper(ids(), labels=ids()).logits
    torch.testing.assert_close(made, wrapper.eval()(ids()).logits)
    assert wrapper.train()(ids(), labels=ids(), skip_logits=True).logits is None


def test_copies_are_whole(folders: dict[str, Path]) -> None:
    wrapper = LigerForCausalLM.from_pretrained(folders["gemma"])
    for twin in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper)):
        assert type(twin) is type(wrapper)
        assert twin.lm_head.weight is twin.model.embed_tokens.weight
        assert twin.native.embed_tokens is twin.model.embed_tokens is not wrapper.model.embed_tokens
        assert torch.equal(twin(ids()).logits, wrapper(ids()).logits)


def test_a_replaced_embedding_does_not_leave_a_tied_head_behind(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = LigerForCausalLM.from_pretrained(folders["gemma"])
    model.model.embed_tokens = copy.deepcopy(model.model.embed_tokens)
    with pytest.raises(SaveError, match="tie_word_embeddings is True, but the embedding was"):
        model.save_pretrained(tmp_path)
    model.tie_weights()
    model.save_pretrained(tmp_path)


def test_resized_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    for family in ("llama", "gemma"):
        model, hf = LigerForCausalLM.from_pretrained(folders[family]), theirs(folders[family])
        for each in (model, hf):
            each.resize_token_embeddings(140, mean_resizing=False)
        walked = dict(model.hf_named_parameters())
        assert torch.equal(walked["model.embed_tokens.weight"], model.model.embed_tokens.weight)
        model.save_pretrained(tmp_path / family)
        again = theirs(tmp_path / family)
        assert again.config.vocab_size == 140
        torch.testing.assert_close(model(ids()).logits, again(ids()).logits, rtol=1e-5, atol=1e-5)


def test_a_class_without_a_family_makes_no_model(folders: dict[str, Path]) -> None:
    model = LigerForCausalLM.from_pretrained(folders["llama"])
    with pytest.raises(ConfigError, match="LigerForCausalLM belongs to no family"):
        LigerForCausalLM(model.config)


def test_the_decoder_has_no_checkpoint_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    model = LigerForCausalLM.from_pretrained(folders["llama"])
    with pytest.raises(ConfigError, match=r"use LigerForCausalLM.from_pretrained\(.*\).model"):
        type(model.model).from_pretrained(folders["llama"])
    with pytest.raises(SaveError, match="save the LigerForCausalLM that it belongs to"):
        model.model.save_pretrained(tmp_path)


def test_classification(folders: dict[str, Path], tmp_path: Path) -> None:
    options = {"num_labels": 3, "pad_token_id": 2}
    hf = transformers.AutoModelForSequenceClassification.from_pretrained(
        folders["llama"], **options
    )
    hf.save_pretrained(tmp_path)
    ours = LigerForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(ours(ids()).logits, hf(ids()).logits, rtol=1e-5, atol=1e-6)
    ours.save_pretrained(tmp_path / "ours")
    again = type(hf).from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids()).logits, hf(ids()).logits)
    assert isinstance(ours.model, LigerModel)
    ours.config.auto_map = {"AutoModelForCausalLM": "modeling_ligermodels.LigerLlamaForCausalLM"}
    ours.save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert "auto_map" not in config


@pytest.mark.parametrize(
    ("training", "backend"),
    [
        (True, "eager"),
        *(pytest.param(x, "aot_eager", marks=pytest.mark.long) for x in (True, False)),
    ],
)
def test_compiled_equals_eager(training: bool, backend: str) -> None:
    """In training and in evaluation there is one graph, as of a native model."""
    native = random_model("llama", num_hidden_layers=1, vocab_size=131)
    model, x = LigerForCausalLM.from_native(native).train(training), ids()
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    expected = model(x, labels=x, attention_mask=mask)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = compiled(x, labels=x, attention_mask=mask)
    torch.testing.assert_close(found.loss, expected.loss)
    assert (found.logits is None) == training
    gradients = [
        torch.autograd.grad(made.loss, [*model.parameters()]) for made in (found, expected)
    ]
    for mine, eager in zip(*gradients):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-5)


def test_a_pipeline_and_a_streamer(folders: dict[str, Path]) -> None:
    model = LigerForCausalLM.from_pretrained(folders["llama"])
    words = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())
    made = words("w5 w6 w7", max_new_tokens=4, do_sample=False, return_tensors=True)[0][
        "generated_token_ids"
    ]
    streamer = Mock()
    expected = model.generate(torch.tensor([[8, 9, 10]]), max_new_tokens=4, streamer=streamer)
    assert made == expected[0].tolist()
    put = [call.args[0].flatten() for call in streamer.put.call_args_list]
    assert torch.equal(torch.cat(put), expected[0])


def test_one_process_of_several_writes_the_config_and_pushes(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pushed = LigerForCausalLM.from_pretrained(folders["llama"]), Mock()
    monkeypatch.setattr(LigerForCausalLM, "push_to_hub", pushed)
    model.save_pretrained(tmp_path / "other", is_main_process=False, push_to_hub=True)
    assert not (tmp_path / "other" / "config.json").exists() and not pushed.called
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, private=True)
    pushed.assert_called_once_with("mine", private=True)
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
