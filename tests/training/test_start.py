"""Runs that begin with another checkpoint than the one they name: new tokens, random weights."""

from __future__ import annotations

import json

import pytest
import torch

from ligermodels import AutoLiger
from ligermodels.errors import CheckpointError, ConfigError, DataError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.model import load_checkpoint
from tests.training.tiny_run import forget, make_checkpoint, options, run, same, tensors

IDS = torch.tensor([[5, 258, 259, 7]])
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TOKENS = {"special_tokens": ["<|im_start|>", "eos_token=<|im_end|>"], "add_tokens": ["dog and"]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = [{"role": "user", "content": "a dog and"}, {"role": "assistant", "content": "a cat"}]
    file.write_text("\n".join([json.dumps({"messages": turns})] * 8))
    return file


@pytest.mark.parametrize("lora", [{}, {"lora_r": 2, "modules_to_save": ["embed_tokens"]}])
def test_new_tokens_and_a_template_of_ones_own(checkpoint, chats, tmp_path, lora):
    """They learn, are exported, and a killed run goes on; transformers reads them."""
    transformers = pytest.importorskip("transformers")
    (template := tmp_path / "own.jinja").write_text(TEMPLATE)
    given = {"chat_template": template, "max_steps": 4, "save_steps": 2, **TOKENS, **lora}
    done = run(checkpoint, chats, tmp_path / "run", **given)
    exported = tensors(done.model_dir)
    forget(done.output_dir, 4)
    again = run(checkpoint, chats, tmp_path / "run", resume=True, **given)
    assert same(exported, tensors(again.model_dir))
    theirs = transformers.AutoTokenizer.from_pretrained(done.model_dir)
    ours = Tokenizer.from_hf(done.model_dir)
    for tokenizer in (theirs, ours):
        assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|im_end|>"
        ids = tokenizer.encode("a dog and<|im_end|>", add_special_tokens=False)
        assert ids[-2:] == [260, 259] and tokenizer.decode([259], skip_special_tokens=True) == ""
    old = AutoLiger.from_hf(checkpoint).embed_tokens.weight
    new = AutoLiger.from_hf(done.output_dir / "start").embed_tokens.weight
    torch.testing.assert_close(new[258:], old.mean(0, keepdim=True).expand(3, -1))
    assert not torch.equal(exported["embed_tokens.weight"][259], new[259])
    model = transformers.AutoModelForCausalLM.from_pretrained(done.model_dir)
    assert model.config.eos_token_id == 259
    mine = AutoLiger.from_hf(done.model_dir)
    torch.testing.assert_close(mine.head.logits(mine(IDS)), model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert same(load_checkpoint(done.output_dir, 4).state_dict(), exported)


def test_an_adapter_with_new_tokens_belongs_to_its_start(checkpoint, chats, tmp_path):
    peft = pytest.importorskip("peft")
    lora = {"lora_r": 2, "modules_to_save": ["embed_tokens"], "export": "adapter"}
    done = run(checkpoint, chats, tmp_path / "run", max_steps=2, **TOKENS, **lora)
    found = peft.AutoPeftModelForCausalLM.from_pretrained(done.model_dir)
    mine = AutoLiger.from_hf(done.model_dir)
    torch.testing.assert_close(found(IDS).logits, mine.head.logits(mine(IDS)), rtol=1e-5, atol=1e-5)


def test_an_untied_head_grows_too(tmp_path):
    folder = make_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    model = AutoLiger.from_hf(folder)
    before = model.head.logits(model(IDS[:, :1]))
    model.resize_token_embeddings(261)
    after = model.head.logits(model(IDS[:, :1]))
    torch.testing.assert_close(after[..., :258], before)
    torch.testing.assert_close(after[..., 258:], before.mean(-1, keepdim=True).expand(-1, -1, 3))
    model.loss(IDS, IDS).backward()
    model.save_hf(tmp_path / "grown")
    assert AutoLiger.from_hf(tmp_path / "grown").config.vocab_size == 261


@pytest.mark.parametrize("of", ["llama-3.2-1b", "folder"])
def test_pretraining_from_random_weights(checkpoint, text, tmp_path, of):
    sizes = ["hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2", "vocab_size=258"]
    given = {
        "from_scratch": True,
        "tokenizer": checkpoint,
        "config_overrides": [*sizes, "intermediate_size=48"],
    }
    model = checkpoint if of == "folder" else of
    done = run(model, text, tmp_path / "run", max_steps=20, seed=3, **given)
    assert done.eval_before["eval_perplexity"] == pytest.approx(258, rel=0.1)
    assert done.eval_after["eval_perplexity"] < 0.5 * done.eval_before["eval_perplexity"]
    exported = AutoLiger.from_hf(done.model_dir)
    assert exported.config.num_hidden_layers == 1 and exported.config.eos_token_id == 257
    assert Tokenizer.from_hf(done.model_dir).eos_token == "</s>"
    other = run(model, text, tmp_path / "other", max_steps=1, seed=4, **given)
    starts = [tensors(each.output_dir / "start") for each in (done, other)]
    assert not same(*starts)
    # A run that does not begin leaves the older one's start as it was, and what begins replaces it.
    given |= {"overwrite_output_dir": True, "max_steps": 1, "seed": 4}
    (nothing := tmp_path / "nothing.txt").write_text("")
    for name in ("run", "none"):
        with pytest.raises(DataError):
            run(model, nothing, tmp_path / name, **given)
    assert not (done.output_dir / "start.new").exists() and not (tmp_path / "none").exists()
    assert same(tensors(done.output_dir / "start"), starts[0])
    run(model, text, tmp_path / "run", **given)
    assert same(tensors(done.output_dir / "start"), starts[1])
    assert not (done.output_dir / "start.new").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer": "x"}, "tokenizer: .* this is for from_scratch"),
        ({"add_tokens": ["x"], "lora_r": 2}, "add_tokens: adapters leave the embeddings frozen"),
        ({"config_overrides": ["a=1"]}, "config_overrides: this needs from_scratch"),
        ({"columns": ["prompt"]}, "columns: 'prompt'; expected KEY=NAME"),
        ({"group_by_length": True}, "group_by_length: sft packs documents into full rows"),
        ({"lora_dora": True}, "lora_dora: this needs lora_r"),
        ({"hub_strategy": "every_save"}, "hub_strategy: this needs push_to_hub"),
    ],
)
def test_options_that_do_not_fit_are_refused(checkpoint, text, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        options(checkpoint, text, tmp_path / "run", **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"from_scratch": True, "config_overrides": ["a=1"]}, "'a=1'; expected FIELD=VALUE"),
        ({"modules_to_save": ["lm_head"], "lora_r": 2}, "'lm_head' is no .*tied: name embed_tok"),
        ({"modules_to_save": ["o_proj"], "lora_r": 2}, "o_proj has an adapter"),
        ({"model": "llama-3.2-1b", "from_scratch": True}, "tokenizer: missing"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    checkpoint, text, tmp_path, changes, message
):
    with pytest.raises(ConfigError, match=message):
        run(changes.pop("model", checkpoint), text, tmp_path / "run", **changes)


@pytest.mark.parametrize("changes", [{"add_tokens": ["x"]}, {"loss": "reward"}])
def test_a_folder_without_a_config_is_refused_by_name(text, tmp_path, changes):
    (folder := make_checkpoint(tmp_path / "model")).joinpath("config.json").unlink()
    with pytest.raises(CheckpointError, match="the file is missing; choose a folder"):
        run(folder, text, tmp_path / "run", **changes)


def test_a_preset_without_its_option_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match=r"model: smollm2-135m is a preset.*--from-scratch"):
        run("smollm2-135m", text, tmp_path / "run")


def test_columns_have_names_of_their_own(checkpoint, tmp_path):
    def rows(record, **given):
        (file := tmp_path / "data.jsonl").write_text("\n".join([json.dumps(record)] * 9))
        return run(checkpoint, file, tmp_path / f"run{len(record)}", max_steps=1, **given).loss

    plain = rows({"prompt": "a cat", "completion": " ran"})
    named = ["prompt=question", "completion=answer"]
    record = {"question": "a cat", "answer": " ran", "id": 3}
    assert rows(record, columns=named) == plain
    with pytest.raises(DataError, match=r"data.jsonl:1: columns: 'answer' is missing; .*'a'"):
        rows({"question": "b", "a": 1, "b": 2, "c": 3}, columns=named)
