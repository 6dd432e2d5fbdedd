"""The memory plan of a run: what is planned for, and what the command line says of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common import release_memory
from examples.medusa import MedusaModel
from ligermodels import ConfigError, LigerLlama, shard
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.memory.fit import Planner
from ligermodels.memory.plan import MemoryPlan
from ligermodels.memory.rates import gpu_bytes
from ligermodels.memory.simulate import simulate
from ligermodels.training.distillation import TaughtModel, TeacherModel
from ligermodels.training.model import outlook, planner, summary, weight_dtype
from tests.memory.step_bytes import error_of_prediction
from tests.training.tiny_run import tiny_config


def model(precision: str) -> LigerLlama:
    with torch.device("meta"):
        return LigerLlama(tiny_config()).to(weight_dtype(precision))


def test_precision_and_accumulation_count() -> None:
    pytest.importorskip("triton")
    weights = sum(p.numel() for p in model("bf16").parameters())
    peaks = {}
    for precision, size in (("bf16", 2), ("bf16-mixed", 4), ("float32", 4)):
        given = model(precision)
        for accumulates in (False, True):
            run = planner(given, "1GiB", precision=precision, accumulates=accumulates)
            said = run.plan(8, 512).prediction
            assert said is not None and said.optimizer_bytes == 2 * size * weights
            peaks[precision, accumulates] = said.peak_bytes
        assert peaks[precision, True] >= peaks[precision, False]
    assert peaks["bf16", False] < peaks["bf16-mixed", False] < peaks["float32", False]


def test_the_summary_is_one_line() -> None:
    run = planner(model("float32"), "1GiB", precision="float32")
    text = summary(run.plan(2, 64))
    assert "\n" not in text
    assert text.startswith("2 layers keep all; predicted peak 0.")
    mixed = MemoryPlan.of(["all", "input", "all"], prediction=run.plan(2, 64).prediction)
    assert summary(mixed).startswith("2 layers keep all, 1 layer keeps input; predicted")
    assert text.endswith("of 1.00 GiB for 2 x 64 tokens")


def test_an_outlook_needs_no_gpu_and_no_weights() -> None:
    pytest.importorskip("triton")
    sizes = {"hidden_size": 8192, "num_attention_heads": 64, "max_position_embeddings": 8192}
    sizes |= {"intermediate_size": 28672, "num_hidden_layers": 1}
    model = LigerLlama, tiny_config(**sizes), 8, 4096
    found = outlook(*model, gpu="H200")
    assert found.plan is not None and found.budget == gpu_bytes("H200")
    assert found.rates == "data sheet of H200" and found.largest_batch > 8
    less = outlook(*model, gpu="H200", budget=str(found.least_bytes - 1))
    assert less.plan is None and less.largest_seq <= 4096
    with pytest.raises(ConfigError, match="gpu: 'abacus' is not known"):
        outlook(*model, gpu="abacus")


def taught(model: LigerLlama, layers: int = 2) -> nn.Module:
    teacher = LigerLlama(tiny_config(hidden_size=128, vocab_size=264, num_hidden_layers=layers))
    return TaughtModel(model, TeacherModel(teacher, beta=0.5, temperature=1.0, share=0.5))


STEPS = {
    "teacher": taught,
    "heads": lambda model: MedusaModel(model, MedusaHeads(model.head, 2), freeze_body=False),
}


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("policy", ["all", "input"])
@pytest.mark.parametrize("name", STEPS)
def test_what_else_a_step_runs_counts(name: str, policy: str) -> None:
    """A teacher's forward and the divergence, and Medusa's heads."""
    torch.manual_seed(0)
    model = LigerLlama(tiny_config())
    step_module = STEPS[name](model)
    model.set_memory_plan(MemoryPlan.uniform(2, policy))
    others = {id(x): x for x in (*step_module.parameters(), *step_module.buffers())}
    for x in (*model.parameters(), *model.buffers()):
        others.pop(id(x))
    error = error_of_prediction(
        model, 24, wrapped=step_module, held=others, step_module=step_module
    )
    assert abs(error) < 0.002
    alone = error_of_prediction(model, 24, wrapped=step_module, held=others)
    assert alone < -0.1


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_what_else_a_step_runs_counts_on_a_gpu(name: str) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    config = tiny_config(**sizes, num_attention_heads=16, num_key_value_heads=8)
    device = torch.device("cuda")
    torch._C._cuda_clearCublasWorkspaces()
    release_memory()
    before = torch.cuda.memory_allocated()
    model = LigerLlama(config).to(device, torch.bfloat16)
    if name == "teacher":
        teacher = LigerLlama(config).to(device, torch.bfloat16)
        step = TaughtModel(model, TeacherModel(teacher, beta=0.5, temperature=1.0, share=1.0))
    else:
        step = MedusaModel(model, MedusaHeads(model.head, 2), freeze_body=False)
    ids = torch.randint(32000, (4, 2048), device=device)

    def run() -> None:
        step(ids, labels=ids).loss.backward()

    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        run()
        step.zero_grad(set_to_none=True)
    measured = torch.cuda.max_memory_allocated() - before
    predicted = simulate(model, 4, 2048, device=device, step_module=step).peak_bytes
    print(name, predicted, measured)
    assert 0.99 < predicted / measured < 1.03


def test_what_else_a_step_runs_counts_beside_shards() -> None:
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = LigerLlama(tiny_config(tie_word_embeddings=False))
        shard(model, init_device_mesh("cpu", (4,)))
        step_module = taught(model)
        ours = {id(x) for x in (*model.parameters(), *model.buffers())}
        held = {id(x): x for x in (*step_module.parameters(), *step_module.buffers())}
        held = {key: x for key, x in held.items() if key not in ours}
        error = error_of_prediction(
            model, 24, wrapped=step_module, held=held, step_module=step_module
        )
        assert abs(error) < 0.002
    finally:
        dist.destroy_process_group()


def test_the_bytes_of_a_teacher_decide_what_fits() -> None:
    pytest.importorskip("triton")
    given = model("bf16")

    def least(step_module: nn.Module | None = None) -> int:
        run = Planner(given, "1GiB", step_module=step_module, count="allocated", reserve=0.0)
        return run.least_bytes(2, 64)

    with torch.device("meta"):
        beside = taught(given, layers=8)
    assert least(beside) > least() + sum(x.nbytes for x in beside.teacher.parameters())
