"""FSDP2 and tensor parallelism in a simulation: bytes beside those of real steps.

The collectives of these steps do nothing; tests/parallel/test_wrappers.py has some with real ones.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligermodels import ConfigError, MemoryPlan, shard
from ligermodels.memory.simulate import Simulation, simulate
from ligermodels.memory.torch_private import Sharding
from tests.memory.step_bytes import error_of_prediction
from tests.pairwise import pairwise
from tests.tiny_models import random_model

pytestmark = pytest.mark.usefixtures("rows_at_once")

RANKS = 4
CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which only this one exists; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, **options: Any) -> Any:
    model = random_model("llama", num_hidden_layers=4, tie_word_embeddings=False).train()
    for module in [*model.layers, model.head]:
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model: Any, **options: Any) -> Simulation:
    return simulate(model, 2, 24, device=CPU, **options)


LAYOUTS = [
    {"dp_shard": 4},
    {"dp_replicate": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
]


@pairwise(
    sizes=LAYOUTS,
    mixed=[False, True],
    reshards=[False, True],
    frozen=[False, True],
    policy=["all", "attention", "input"],
)
def test_predicted_bytes_are_those_of_a_real_step(
    mesh: DeviceMesh,
    sizes: dict[str, int],
    mixed: bool,
    reshards: bool,
    frozen: bool,
    policy: Any,
) -> None:
    layout = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    model = random_model("llama", num_hidden_layers=2, tie_word_embeddings=mixed).train()
    if frozen:
        model.layers[0].requires_grad_(False)
        model.embed_tokens.requires_grad_(False)
    compute_dtype = torch.bfloat16 if mixed else None
    shard(model, layout, compute_dtype=compute_dtype, reshard_after_forward=reshards)
    model.set_memory_plan(MemoryPlan.uniform(2, policy))
    assert abs(error_of_prediction(model)) < 0.005


def test_the_bytes_of_a_forward_that_gathers_ahead(mesh: DeviceMesh) -> None:
    # In a model that is frozen but for its last norm, forward takes more than backward.
    sizes = {"num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": 64}
    peaks = []
    for prefetch in (0, 1, 2):
        model = random_model("llama", **sizes, tie_word_embeddings=True).train()
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
        shard(model, init_device_mesh("cpu", (RANKS,)), reshard_after_forward=True)
        for index, layer in enumerate(model.layers):
            layer.set_modules_to_forward_prefetch([*model.layers[index + 1 :][:prefetch]])
        assert abs(error_of_prediction(model, seq=2)) < 0.005
        peaks.append(step(model).peak_bytes)
    assert peaks == sorted(set(peaks))


def test_other_shards_are_refused_by_name(mesh: DeviceMesh) -> None:
    model = random_model("llama").train()
    linear = model.layers[1].mlp.down_proj
    linear.weight = torch.nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Shard(0)]))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight is sharded"):
        Sharding(model, model)
    with pytest.raises(ConfigError, match="offloads parameters to the CPU"):
        offloaded = sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        Sharding(offloaded, offloaded)


def test_other_words_are_refused() -> None:
    model = random_model("llama").train()
    for name in ("gradients", "count"):
        with pytest.raises(ConfigError, match=f"{name}='all'; expected "):
            model.plan_memory(2, 24, "1GiB", device="cpu", **{name: "all"})
