"""The buckets of `DistributedDataParallel`: their bytes beside those of a real step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligermodels import ConfigError
from ligermodels.memory.torch_private import buckets
from tests.memory.step_bytes import error_of_prediction
from tests.tiny_models import random_model

pytestmark = pytest.mark.usefixtures("rows_at_once")

MIB = 2**20


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Two ranks, of which only this one exists; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def wrapped(model: Any, views: bool) -> tuple[DistributedDataParallel, dict[int, Tensor]]:
    """Return a wrapper, and its buckets once it has made a step."""
    found: dict[int, Tensor] = {}

    def keep(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found[bucket.index()] = bucket.buffer()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    made = DistributedDataParallel(model, gradient_as_bucket_view=views)
    made.register_comm_hook(None, keep)
    return made, found


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_predicted_bytes_are_those_of_a_real_step(
    two_ranks: None, views: bool, accumulates: bool, frozen: bool
) -> None:
    model = random_model("llama", num_hidden_layers=2).train()
    if frozen:
        model.layers[0].requires_grad_(False)
        model.embed_tokens.requires_grad_(False)
    ddp, found = wrapped(model, views)
    error = error_of_prediction(
        model,
        wrapped=ddp,
        held=found,
        zero=not accumulates,
        gradients="kept" if accumulates else "new",
        ddp_buckets="views" if views else "copies",
    )
    assert abs(error) < 0.005
    made = buckets(p for p in model.parameters() if p.requires_grad)
    assert sum(x.nbytes for x in made) == sum(x.nbytes for x in found.values())


def test_sizes_of_buckets() -> None:
    sizes = [3 * MIB, 24 * MIB, 2 * MIB, MIB // 2, MIB // 2]  # of elements of 2 bytes
    parameters = [torch.empty(size // 2, dtype=torch.bfloat16, device="meta") for size in sizes]
    assert [x.nbytes // MIB for x in buckets(parameters)] == [1, 26, 3]
    mixed = [*parameters, torch.empty(MIB, device="meta")]
    assert [x.dtype for x in buckets(mixed)] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_a_plan_counts_them_and_other_words_are_refused() -> None:
    model = random_model("llama").train()
    options = {"device": "cpu", "optimizer_bytes": 0, "reserve": 0.0}
    whole, copies, views = (
        model.plan_memory(2, 24, "1GiB", **options, ddp_buckets=each).prediction
        for each in (None, "copies", "views")
    )
    trained = sum(p.nbytes for p in model.parameters())
    assert copies.peak_bytes - whole.peak_bytes == trained == views.grad_bytes
    assert copies.grad_bytes == 2 * trained
    for name in ("ddp_buckets", "gradients", "count"):
        with pytest.raises(ConfigError, match=f"{name}='all'; expected "):
            model.plan_memory(2, 24, "1GiB", **options, **{name: "all"})
