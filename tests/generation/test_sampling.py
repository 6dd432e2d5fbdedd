import math
from inspect import signature

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ligermodels.generation import Sampling, generate, generate_many
from ligermodels.generation.generate import GenerateOptions, StreamOptions
from ligermodels.generation.many import ManyOptions
from ligermodels.generation.sampling import RuleOptions, Sampler
from tests.tiny_models import VOCAB


def test_sampling_filters_equal_transformers(subtests):
    for options in (
        *({"top_k": 5}, {"top_k": 1000}, {"top_p": 0.6}, {"top_p": 0.01}, {"temperature": 0.7}),
        *({"min_p": 0.3}, {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}),
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
            if "min_p" in options:
                expected = MinPLogitsWarper(options["min_p"])(None, expected)
            filtered = Sampling(do_sample=True, **options).filter(logits)
            assert torch.equal(filtered, expected)


def test_draws_follow_the_distribution_and_the_generator():
    """By a chi-squared test with 2 degrees of freedom: 13.8 is passed by 1 in 1,000 fair draws."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20000, 4)
    sampling = Sampling(do_sample=True, temperature=0.5, top_k=3)
    drawn = sampling.next_tokens(logits, torch.Generator().manual_seed(0))
    found = torch.bincount(drawn, minlength=4)[:3]
    expected = len(drawn) * torch.tensor([4.0, 2.0, 0.0]).softmax(0)
    assert found.sum() == len(drawn)
    assert ((found - expected) ** 2 / expected).sum() < 13.8
    assert torch.equal(drawn, sampling.next_tokens(logits, torch.Generator().manual_seed(0)))


def test_extreme_temperatures_and_penalties_stay_finite():
    logits = torch.tensor([[3.0, 2.9, -1.0, 0.0], [1e9, -1e9, 0.0, -torch.inf]])
    for temperature in (5e-324, 1e-310, 1e-40, 1e-20):
        sampling = Sampling(do_sample=True, temperature=temperature)
        assert sampling.next_tokens(logits, None).tolist() == [0, 0]
    for temperature in (1e40, 10**400):
        found = Sampling(do_sample=True, temperature=temperature).filter(logits)
        assert found[:, :3].isfinite().all()
    for penalty in (1e-310, 1e-40, 1e6):
        rule = Sampling(repetition_penalty=penalty)
        sampler = sampler_of(rule, [[0, 1], [0, 1]])
        found = sampler.changed(logits)
        assert not found.isnan().any() and found[:, 0].isfinite().all()


def sampler_of(rule, prompts):
    sampler = Sampler(rule, len(prompts), 4, torch.device("cpu"))
    for row, prompt in enumerate(prompts):
        sampler.read(row, torch.tensor(prompt))
    return sampler


def test_penalties_and_biases():
    """One penalty is for the tokens of the row, the other for those that were generated."""
    logits = torch.tensor([[4.0, -2.0, 6.0, -8.0]]).expand(2, 4)
    sampler = sampler_of(Sampling(repetition_penalty=2.0), [[2], [0, 3, 3]])
    expected = torch.tensor([[4.0, -2.0, 3.0, -8.0], [2.0, -2.0, 6.0, -16.0]])
    assert torch.equal(sampler.changed(logits), expected)
    assert sampler(logits).tolist() == [0, 2]
    expected[0, 0], expected[1, 2] = 2.0, 3.0
    assert torch.equal(sampler.changed(logits), expected)
    sampler.read(1, torch.tensor([1]))  # another prompt in the place of the first one
    assert sampler.changed(logits)[1].tolist() == [4.0, -4.0, 6.0, -8.0]

    rule = Sampling(presence_penalty=2.5, logit_bias={1: 7.0, 2: -math.inf})
    sampler = sampler_of(rule, [[1], [0]])
    assert [sampler(logits).tolist() for _ in range(3)] == [[1, 1], [0, 0], [1, 1]]
    assert sampler.changed(logits)[0].tolist() == [1.5, 2.5, -math.inf, -8.0]
    for bias in ({4: 1.0}, {-1: 1.0}, {0: math.inf}, {0: math.nan}):
        with pytest.raises(ValueError, match="logit_bias"):
            sampler_of(Sampling(logit_bias=bias), [[0]])


def test_numbers_out_of_range_are_refused():
    for options in (
        *({"temperature": x} for x in (0, -1.0, math.nan, math.inf, "1", None)),
        *({"top_k": x} for x in (0, 1.5, "3", True)),
        *({name: x} for name in ("top_p", "min_p") for x in (0.0, 1.5, math.nan, "0.5")),
        *({"presence_penalty": x} for x in (math.inf, math.nan, "1")),
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            Sampling(do_sample=True, **options)


def test_the_typed_options_of_a_model_are_those_of_the_functions():
    """mypy sees a name too many; this sees one that is missing."""

    def own(kind, base):
        return kind.__annotations__.keys() - base.__annotations__.keys()

    def keywords(function):
        return {x.name for x in signature(function).parameters.values() if x.kind == x.KEYWORD_ONLY}

    assert own(RuleOptions, Sampling) == {"eos_token_id", "pad_token_id"}
    assert own(Sampling, RuleOptions) == {"stops", "pad"}
    assert own(GenerateOptions, StreamOptions) == keywords(generate)
    assert own(ManyOptions, RuleOptions) == keywords(generate_many)
