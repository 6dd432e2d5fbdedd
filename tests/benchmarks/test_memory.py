"""The models of the memory benchmark share weights, and its results are put together correctly."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import memory, memory_cases
from benchmarks.memory import Models
from benchmarks.memory_works import GIB, HF, LIGER, OURS, WORKS, Setting, Work
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.layers.recompute import KEEPS
from ligermodels.memory.offload import Offloader
from ligermodels.memory.pinned_pool import MIB
from ligermodels.memory.plan import MemoryPlan, Prediction

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_work(family: str) -> Work:
    preset = {"llama": "llama-3-8b", "gemma2": "gemma-2-9b"}[family]
    changes = TINY | ({"query_pre_attn_scalar": 8} if family == "gemma2" else {})
    return Work(family, preset, 2, 16, (), changes=changes)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_all_implementations_share_weights_and_optimizer_states(family):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    work = tiny_work(family)
    models = Models(work, torch.float32, "cpu")
    setting = Setting(HF, attention="sdpa" if family == "llama" else "eager")
    theirs, their_optimizer = models.get(setting)
    ours, our_optimizer = models.get(Setting(OURS))
    assert models.get(setting)[0] is theirs
    storages = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    assert {p.untyped_storage().data_ptr() for p in theirs.parameters()} == storages
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())

    ids = torch.randint(3, 64, (work.batch, work.seq))
    for model, optimizer in ((theirs, their_optimizer), (ours, our_optimizer)):
        expected = ours(ids, labels=ids).loss.item()
        before = [p.detach().clone() for p in ours.parameters()]
        loss = memory.training_step(model, optimizer, ids)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert all(not torch.equal(a, b) for a, b in zip(before, ours.parameters()))
        assert all(p.grad is None for p in model.parameters())
    for parameter in ours.parameters():
        state = our_optimizer.state[parameter]
        assert state["step"] == 1 and state["exp_avg"].count_nonzero() > 0
    theirs = {
        state["exp_avg_sq"].untyped_storage().data_ptr() for state in their_optimizer.state.values()
    }
    assert theirs == {
        state["exp_avg_sq"].untyped_storage().data_ptr() for state in our_optimizer.state.values()
    }


def test_a_work_without_an_optimizer_has_no_states():
    work = Work("llama", "llama-3-8b", 1, 8, (), changes=TINY, adamw=False)
    models = Models(work, torch.float32, "cpu")
    assert models.get(Setting(OURS))[1] is None
    assert not any(models._states.values())


def calls_of(modules: nn.ModuleList) -> list[int]:
    """Count the calls of each block's attention from now on."""
    counts = [0] * len(modules)
    for i, block in enumerate(modules):

        def count(*_, i=i):
            counts[i] += 1

        block.self_attn.register_forward_pre_hook(count)
    return counts


@pytest.mark.parametrize("keeps", ["input", "attention", "products"])
@pytest.mark.parametrize("implementation", [HF, OURS])
def test_checkpointed_blocks_give_the_same_gradients(implementation, keeps):
    if implementation == HF:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    work = tiny_work("llama")
    models = Models(work, torch.float32, "cpu")
    setting = Setting(implementation, keeps, blocks=3)
    model, _ = models.get(setting)
    ids = torch.randint(3, 64, (2, 16))

    def gradients() -> list[torch.Tensor]:
        return torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))

    expected = gradients()
    blocks = model.layers if implementation == OURS else model.model.layers
    counts = calls_of(blocks)
    with memory.applied(model, setting, None):
        found = gradients()
    assert counts == [2, 2, 2, 1]
    for one, other in zip(expected, found):
        torch.testing.assert_close(one, other)
    gradients()
    assert counts == [3, 3, 3, 2], "the blocks are as they were"


def test_settings_have_names_of_their_own_and_plain_transformers_come_first():
    for work in WORKS.values():
        for settings in (work.settings, work.small):
            assert len({setting.name for setting in settings}) == len(settings)
            kinds = [setting.implementation for setting in settings]
            after = kinds[kinds.index(LIGER) :] if LIGER in kinds else []
            assert HF not in after
    assert Setting(LIGER, "input").name == f"{LIGER}: every block checkpointed"
    assert Setting(LIGER, "attention", 4, attention="flex_attention").name == (
        f"{LIGER}, flex_attention: 4 blocks checkpointed, without attention"
    )
    assert Setting(OURS, "plan", budget=61.5, host=32).name == (
        f"{OURS}: plan for 61.5 GiB and 32 GiB of host memory"
    )
    work = WORKS["llama-adamw"]
    assert work.settings_for(140 * 10**9) == work.settings
    assert work.settings_for(80 * 10**9) == work.small


def test_a_new_row_replaces_the_row_of_its_name_and_gpu():
    result = {}
    for gpu, ms in (("A", 1), ("B", 2), ("A", 3)):
        memory.merge(result, "rows", {"gpu": gpu, "work": "w", "setting": "s", "ms": ms})
    assert [(row["gpu"], row["ms"]) for row in result["rows"]] == [("A", 3), ("B", 2)]


def test_parts_are_processes_whose_rows_are_written_at_once(tmp_path, monkeypatch):
    """A part that fails leaves its earlier rows, and the next part runs."""
    lines = (
        'print(\'{"section": "levels", "gpu": "A", "level": "all"}\'); print("a note"); '
        "raise SystemExit(3)"
    )
    monkeypatch.setattr(memory.sys, "executable", "unused")
    started = []
    popen = memory.subprocess.Popen

    def start(command, **options):
        started.append(command[4])
        return popen(["python3", "-c", lines], **options)

    monkeypatch.setattr(memory.subprocess, "Popen", start)
    monkeypatch.setattr(memory, "RESULTS", tmp_path / "none")
    memory.run_parts(["levels", "predict:3"], 60, tmp_path)
    assert started == ["levels", "predict:3"]
    written = json.loads((tmp_path / "memory.json").read_text())
    assert written["levels"] == [{"gpu": "A", "level": "all"}]
    memory.run_parts(["levels"], 5, tmp_path)
    assert len(started) == 2, "too little time is left"


@pytest.fixture
def without_gpu(monkeypatch):
    """Let the benchmark run on the CPU: a step takes as many milliseconds as there were steps."""
    pytest.importorskip("transformers")
    steps = itertools.count(1)

    def milliseconds(run):
        run()
        return float(next(steps))

    monkeypatch.setattr(memory, "Models", partial(Models, device="cpu"))
    monkeypatch.setattr(memory, "milliseconds", milliseconds)
    for name in ("release", "host_bytes"):
        monkeypatch.setattr(memory, name, lambda: 0)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 3 * GIB)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9)
    )


def test_each_setting_of_a_work_takes_its_turns(without_gpu, monkeypatch):
    peak = 2 * GIB
    prediction = Prediction(2, 16, 3 * GIB, peak, peak, 0, 0, 0, 0, 0, seconds=0.5)
    made = []

    def plan_memory(model, *shape, **options):
        made.append((shape, options))
        return MemoryPlan.uniform(4, "no_gate_up", prediction=prediction)

    model_class = type(Models(tiny_work("llama"), torch.float32, "cpu").ours)
    monkeypatch.setattr(model_class, "plan_memory", plan_memory)
    settings = (
        Setting(HF, "input"),
        Setting(HF, attention="no such attention"),
        Setting(OURS, "attention"),
        Setting(OURS, "plan", budget=3),
    )
    work = dataclasses.replace(tiny_work("llama"), small=settings)
    monkeypatch.setitem(WORKS, "tiny", work)
    emitted = []
    memory.run_work("tiny", float("inf"), lambda section, row: emitted.append(dict(row)))
    order = [settings.index(s) for row in emitted for s in settings if s.name == row["setting"]]
    assert order == [0, 1, 2, 3, 3, 2, 0], "a failed setting has no second turn"
    rows = {row["setting"]: row for row in emitted}
    assert "no such attention" in rows[settings[1].name]["error"]
    assert len(made) == 1, "the plan is made once"
    ours = rows[settings[3].name]
    assert ours["turns"] == [[8.0, 9.0], [11.0, 12.0]]
    assert (ours["first ms"], ours["ms"], ours["ms spread"]) == (7.0, 10.0, 4.0)
    assert ours["tokens/s"] == 2 * 16 * 100
    assert (ours["peak GiB"], ours["predicted GiB"], ours["predicted ms"]) == (3.0, 2.0, 500.0)
    assert ours["loss"] == pytest.approx(rows[settings[0].name]["loss"], rel=0.1)
    ((shape, options),) = made
    assert shape == (2, 16) and options["budget"] == 3 * GIB and options["reserve"] == 0
    assert isinstance(options["optimizer_bytes"], torch.optim.AdamW)

    emitted.clear()
    memory.run_work("tiny", 0.0, lambda section, row: emitted.append(row))
    assert emitted == [], "no setting begins after the deadline"


def test_cases_are_drawn_from_the_seed_alone():
    cases = memory_cases.draw(48)
    assert cases == memory_cases.draw(48) != memory_cases.draw(48, seed=1)
    assert memory_cases.draw(20) == cases[:20]
    assert len({case.name for case in cases}) == 48
    for name, choices in (
        ("preset", memory_cases.PRESETS),
        ("dtype", ["bfloat16", "float16", "float32"]),
        ("packing", set(memory_cases.PACKINGS)),
        ("trainable", set(memory_cases.TRAINABLE)),
    ):
        assert len({getattr(case, name) for case in cases}) == len(choices)
    plans = [case.plan for case in cases]
    assert {layer.keep for plan in plans for layer in plan.layers} == set(KEEPS)
    assert 10 < sum(plan.uses_host for plan in plans) < 30
    assert {layer.tile for plan in plans for layer in plan.layers} == set(memory_cases.TILES)
    assert all(case.batch == 1 for case in cases if case.packing == "cu_seqlens")


@pytest.mark.parametrize("number", range(0, 24, 3))
def test_a_case_computes_a_finite_loss_and_its_gradients(number):
    """The models are tiny here, and nothing is offloaded, because there may be no GPU."""
    case = memory_cases.draw(24)[number]
    layers = [memory_cases.LayerPlan(layer.keep) for layer in case.plan.layers]
    plan = memory_cases.MemoryPlan(tuple(layers))
    values = vars(case) | {"batch": min(case.batch, 2), "seq": 24, "plan": plan}
    if case.dtype == "float16":
        values["dtype"] = "bfloat16"
    case = memory_cases.Case(**values)
    changes = {k: v for k, v in TINY.items() if k not in ("num_hidden_layers", "eos_token_id")}
    model = memory_cases.build(case, "cpu", **changes)
    assert model.memory_plan is plan
    arguments = memory_cases.inputs(case, 64, "cpu")
    if case.packing == "cu_seqlens":
        starts = arguments["cu_seqlens"].tolist()
        longest = max(b - a for a, b in itertools.pairwise(starts))
        assert starts[-1] == 24 and longest == arguments["max_seqlen"]
    elif case.packing == "position_ids":
        assert arguments["position_ids"].shape == (1, 24)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert ("embed_tokens.weight" in trained) == (case.trainable == "all")
    assert ("layers.0.mlp.down_proj.weight" in trained) == (case.trainable != "the upper half")
    assert memory_cases.step(case, model, arguments, "cpu").isfinite()


def test_the_host_memory_of_a_model_is_not_that_of_the_model_before() -> None:
    model = LigerLlama(LlamaConfig(**TINY))
    assert memory.stored_bytes(model) == 0
    for sizes in ((3 * MIB,), (MIB, MIB)):
        store = Offloader("meta", GIB)
        taken = [store.pool.take(size) for size in sizes]
        for pieces in taken:
            assert pieces is not None
            store.pool.give_back(pieces)
        model._offloaders = {store.device: store}
        assert memory.stored_bytes(model) == sum(sizes)
