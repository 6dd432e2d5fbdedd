import math

import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ligermodels.generation import Sampling
from ligermodels.generation.sampling import RepetitionPenalty
from tests.tiny_models import VOCAB


def test_sampling_filters_equal_transformers(subtests):
    for options in (
        *({"top_k": 5}, {"top_k": 1000}, {"top_p": 0.6}, {"top_p": 0.01}, {"temperature": 0.7}),
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8},
    ):
        with subtests.test(str(options)):
            torch.manual_seed(1)
            logits = 3 * torch.randn(6, VOCAB)
            logits[0, :10] = logits[0, 10]  # ties between logits
            expected = logits
            if "temperature" in options:
                expected = TemperatureLogitsWarper(options["temperature"])(None, expected)
            if "top_k" in options:
                expected = TopKLogitsWarper(options["top_k"])(None, expected)
            if options.get("top_p", 1.0) < 1:
                expected = TopPLogitsWarper(options["top_p"])(None, expected)
            filtered = Sampling(do_sample=True, **options).filter(logits)
            assert torch.equal(filtered, expected)


def test_draws_follow_the_distribution_and_the_generator():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20000, 4)
    sampling = Sampling(do_sample=True, temperature=0.5, top_k=3)
    drawn = sampling.next_tokens(logits, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(share, sampling.filter(logits)[0].softmax(-1), atol=0.01, rtol=0)
    assert torch.equal(drawn, sampling.next_tokens(logits, torch.Generator().manual_seed(0)))


def test_extreme_temperatures_and_penalties_stay_finite():
    logits = torch.tensor([[3.0, 2.9, -1.0, 0.0], [1e9, -1e9, 0.0, -torch.inf]])
    for temperature in (5e-324, 1e-310, 1e-40, 1e-20):
        sampling = Sampling(do_sample=True, temperature=temperature)
        assert sampling.next_tokens(logits, None).tolist() == [0, 0]
    for temperature in (1e40, 10**400):
        found = Sampling(do_sample=True, temperature=temperature).filter(logits)
        assert found[:, :3].isfinite().all()
    prompt = torch.tensor([[0, 1], [0, 1]])
    for penalty in (1e-310, 1e-40, 1e6):
        assert not RepetitionPenalty(penalty, prompt, None, 4)(logits).isnan().any()
        assert RepetitionPenalty(penalty, prompt, None, 4)(logits)[:, 0].isfinite().all()


def test_the_penalty_is_for_tokens_of_the_row_and_not_for_its_padding():
    """Token 0 pads the first row, and is a token of the second one."""
    prompt = torch.tensor([[0, 0, 2], [0, 3, 3]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    logits = torch.tensor([[4.0, -2.0, 6.0, -8.0]]).expand(2, 4)
    penalty = RepetitionPenalty(2.0, prompt, mask, 4)
    expected = torch.tensor([[4.0, -2.0, 3.0, -8.0], [2.0, -2.0, 6.0, -16.0]])
    assert torch.equal(penalty(logits), expected)
    penalty.add(torch.tensor([1, 0]))
    expected[0, 1] = -4.0
    assert torch.equal(penalty(logits), expected)


def test_numbers_out_of_range_are_refused():
    for options in (
        *({"temperature": x} for x in (0, -1.0, math.nan, math.inf, "1", None)),
        *({"top_k": x} for x in (0, 1.5, "3", True)),
        *({"top_p": x} for x in (0.0, 1.5, math.nan, "0.5")),
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            Sampling(do_sample=True, **options)
