"""What tensor parallelism refuses. Its results are compared in test_shard.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ligermodels import ConfigError
from ligermodels.layers import RMSNorm
from ligermodels.models.layout import local_slices, splits_of
from ligermodels.parallel import modules
from ligermodels.parallel.state import _take_own_slices
from ligermodels.parallel.tensor import tensor_parallel
from tests import outside
from tests.parallel.steps import make


class Mesh:
    """As much of a mesh as checks need, without processes."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def get_group(self) -> None:
        return None

    def get_local_rank(self) -> int:
        return 0


def refuse(message: str, ranks: int = 2, **changes: Any) -> None:
    model = make(True, **changes)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        tensor_parallel(model, Mesh(ranks))  # type: ignore[arg-type]
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_sizes_that_do_not_divide_are_refused() -> None:
    refuse("4 query heads and 2 key heads", ranks=3)
    refuse("an MLP of width 27", intermediate_size=27)
    refuse("a vocabulary of 5", ranks=4, vocab_size=5)


@pytest.mark.usefixtures("registry")
def test_modules_that_are_not_known_are_refused() -> None:
    refuse(r"layers.0.mlp.*cannot be cut", family="mixtral")
    refuse(r"layers.0.self_attn|over all heads", family="olmo2")
    outside.family("starcoder2")
    refuse(r"layers.0.mlp.\w+ \(Linear\) cannot be cut", family="starcoder2")
    model = make(True)
    model.layers[1].mlp.down_proj = type("Other", (torch.nn.Linear,), {})(28, 20)
    with pytest.raises(ConfigError, match=r"a projection of layers.1.mlp is a Other"):
        tensor_parallel(model, Mesh(2))  # type: ignore[arg-type]
    model = make(True)
    model.norm = type("Other", (RMSNorm,), {})(20)
    with pytest.raises(ConfigError, match=r"norm \(Other\) cannot be cut"):
        tensor_parallel(model, Mesh(2))  # type: ignore[arg-type]


def test_a_norm_with_two_names_stays_one() -> None:
    model = make(True)
    block = model.layers[0]
    block.post_attention_layernorm = block.input_layernorm
    tensor_parallel(model, Mesh(2))  # type: ignore[arg-type]
    assert type(block.input_layernorm) is modules.SequenceRMSNorm
    assert block.post_attention_layernorm is block.input_layernorm


def test_rows_that_do_not_divide_are_refused() -> None:
    model = make(True)
    tensor_parallel(model, Mesh(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pad the rows to a multiple of 2"):
        model(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.ones(1, 4, 20))


def test_a_part_is_taken_of_whole_parameters() -> None:
    whole, model = make(True).state_dict(), make(True)
    tensor_parallel(model, Mesh(2))  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    given = dict(whole)
    name = next(iter(splits_of(model)))
    given[name] = given[name][1:]  # of another shape: left to torch, which says so
    _take_own_slices(model, given, "")
    assert name in given and not model.get_parameter(name).any()
    for each, shard in splits_of(model).items():
        if each != name:
            for part in local_slices(model.get_parameter(each), shard):
                assert part.values.equal(part.place_in(whole[each])), each
