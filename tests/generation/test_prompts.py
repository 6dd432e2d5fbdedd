"""Prompts as lists and tensors: the batch they make, and the ones that are refused."""

import numpy as np
import pytest
import torch

from ligermodels.generation import generate
from tests.tiny_models import VOCAB

from .prompts import PROMPTS, greedy_of, left_padded


def test_greedy_equals_transformers_for_unequal_prompts(pair):
    theirs, ours = pair
    ids, mask = left_padded(PROMPTS)
    expected = greedy_of(theirs, ids, mask, 30)
    assert torch.equal(generate(ours, PROMPTS, max_new_tokens=30), expected)
    for kind in (torch.tensor, np.array):
        assert torch.equal(generate(ours, [*map(kind, PROMPTS)], max_new_tokens=30), expected)
    alone = generate(ours, [3, 4, 5], max_new_tokens=2)
    for prompt in (np.array([[3, 4, 5]], dtype=np.uint16), range(3, 6)):
        assert torch.equal(generate(ours, prompt, max_new_tokens=2), alone)
    assert torch.equal(generate(ours, ids, attention_mask=mask, max_new_tokens=30), expected)
    ids, flat_mask = torch.tensor([0, *PROMPTS[0]]), torch.tensor([0, 1, 1, 1])
    one = generate(ours, ids, attention_mask=flat_mask, max_new_tokens=8)
    assert torch.equal(one[0, 4:], generate(ours, PROMPTS[0], max_new_tokens=8)[0, 3:])
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(ours, PROMPTS, max_new_tokens=4).shape == (3, 11)


NO_IDS = (
    *([[2**70]], [["a"]], [None], [[1, None]], [1, [2]], b"hi", None, {1: 2}, {3}, object()),
    torch.ones(1, 2, dtype=torch.complex64),
)


def test_prompts_that_no_model_can_take_are_refused(pair, subtests):
    ids = torch.tensor([1, 2])
    for prompts, options, message in (
        ([], {}, "there are no tokens"),
        ([[1], []], {}, "prompt 1 is empty"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, "prompt 0 is empty"),
        ([[1, VOCAB]], {}, "token 97 is outside the vocabulary of 97"),
        ([[0.5]], {}, "expected token ids"),
        ("hello", {}, "Tokenizer.encode"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), {}, "expected \\(batch, seq\\)"),
        ([[1]], {"attention_mask": torch.ones(1, 1)}, "leave it out"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.ones(1, 3)}, "differ in shape"),
        (torch.tensor([[1, 2]]), {"attention_mask": torch.tensor([[1, 0]])}, "as a list"),
        (
            torch.tensor([[1, 2]]),
            {"attention_mask": torch.zeros(1, 2)},
            "row 0; expected 0 for",
        ),
        *(
            (ids, {"attention_mask": x}, "attention_mask")
            for x in ([0.5, 1.0], [-1e9, 0.0], [2, 1])
        ),
        ([1, 2], {"attention_mask": "x"}, "attention_mask"),
        *((prompt, {}, "input_ids") for prompt in NO_IDS),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            generate(pair[1], prompts, **options)
