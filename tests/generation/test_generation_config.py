"""generation_config.json: the stop tokens and the penalty that a checkpoint's file sets."""

import json
import re

import pytest
import torch

from ligermodels.errors import CheckpointError
from ligermodels.generation import generate
from ligermodels.models.llama import LigerLlama

from .prompts import PROMPTS, greedy_of, left_padded


def test_stop_tokens_come_from_generation_config_then_config(pair, tmp_path):
    theirs, ours = pair
    first, second = generate(ours, PROMPTS[0], max_new_tokens=12)[0, 3:].unique()[:2].tolist()
    theirs.save_pretrained(tmp_path)
    config_file = tmp_path / "generation_config.json"

    config_file.unlink()
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**own, "eos_token_id": first}))
    model = LigerLlama.from_hf(tmp_path)
    assert generate(model, PROMPTS[0], max_new_tokens=12)[0, -1] == first
    config_file.write_text(json.dumps({"eos_token_id": second, "do_sample": True}))
    model = LigerLlama.from_hf(tmp_path)
    config_file.write_text('{"eos_token_id": []}')  # The file is read once, at the load.
    found = generate(model, PROMPTS[0], max_new_tokens=12)
    assert found[0, -1] == second
    # do_sample in the file has no effect.
    assert torch.equal(found, generate(model, PROMPTS[0], max_new_tokens=12))
    assert generate(model, PROMPTS[0], max_new_tokens=12, eos_token_id=[]).shape == (1, 15)


def test_damaged_files_are_named(pair, tmp_path, subtests):
    theirs, _ = pair
    theirs.save_pretrained(tmp_path)
    config_file = tmp_path / "generation_config.json"
    for text, message in (
        ('{"eos_token_id": "x"}', "'eos_token_id' is 'x', expected an integer or a list"),
        ('{"pad_token_id": 1.5}', "'pad_token_id' is 1.5, expected an integer"),
        ('{"repetition_penalty": NaN}', "'repetition_penalty' is nan, expected a positive"),
        ('{"repetition_penalty": 1e7}', "'repetition_penalty' is 10000000.0, expected a pos"),
    ):
        config_file.write_text(text)
        said = rf"generation_config.json: {re.escape(message)}"
        with subtests.test(text), pytest.raises(CheckpointError, match=said):
            generate(LigerLlama.from_hf(tmp_path), PROMPTS[0])


def test_repetition_penalty_equals_transformers(pair, tmp_path):
    theirs, ours = pair
    ids, mask = left_padded(PROMPTS)
    plain = greedy_of(theirs, ids, mask, 30)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(ids, attention_mask=mask, repetition_penalty=1.4, **options)
    assert not torch.equal(plain, expected)
    found = generate(ours, PROMPTS, max_new_tokens=30, repetition_penalty=1.4)
    assert torch.equal(found, expected)
    # Qwen 2.5 has such files; transformers applies the penalty in greedy decoding as well
    theirs.save_pretrained(tmp_path)
    config = {"repetition_penalty": 1.4, "num_beams": 1, "no_repeat_ngram_size": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    model = LigerLlama.from_hf(tmp_path)
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=30), expected)
    assert torch.equal(generate(model, PROMPTS, max_new_tokens=30, repetition_penalty=1), plain)
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4, "min_new_tokens": 3}')
    model = LigerLlama.from_hf(tmp_path)
    with pytest.warns(UserWarning, match=r"generation_config.json: .* num_beams, min_new_tokens"):
        generate(model, PROMPTS, max_new_tokens=1)
