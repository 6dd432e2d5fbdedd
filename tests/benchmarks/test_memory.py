"""The models of the memory benchmark share weights, and its results are put together correctly."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

from benchmarks import memory, memory_cases
from benchmarks.memory import HF, LIGER, OURS, WORKS, Models, Setting, Work
from ligermodels.layers.recompute import KEEPS

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


@pytest.mark.parametrize("keeps", ["input", "attention"])
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
            first_patched = [setting.implementation == LIGER for setting in settings]
            after = settings[first_patched.index(True) :] if settings else ()
            assert all(setting.implementation != HF for setting in after)
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
        'print(\'{"section": "levels", "level": "all", "extra ms": 0.5}\'); print("a note"); '
        "raise SystemExit(3)"
    )
    monkeypatch.setattr(memory.sys, "executable", "unused")
    started = []
    popen = memory.subprocess.Popen

    def start(command, **options):
        started.append(command[4])
        return popen(["python3", "-c", lines], **options)

    monkeypatch.setattr(memory.subprocess, "Popen", start)
    memory.run_parts(["levels", "predict:3"], 60, tmp_path)
    assert started == ["levels", "predict:3"]
    written = json.loads((tmp_path / "memory.json").read_text())
    assert written["levels"] == [{"gpu": "none", "level": "all", "extra ms": 0.5}]
    memory.run_parts(["levels"], 5, tmp_path)
    assert len(started) == 2, "too little time is left"


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
    assert {plan.mlp_tile for plan in plans} == set(memory_cases.TILES)
    assert all(case.batch == 1 for case in cases if case.packing == "cu_seqlens")


@pytest.mark.parametrize("number", range(0, 24, 3))
def test_a_case_computes_a_finite_loss_and_its_gradients(number):
    """The models are tiny here, and nothing is offloaded, because there may be no GPU."""
    case = memory_cases.draw(24)[number]
    layers = [memory_cases.LayerPlan(layer.keep) for layer in case.plan.layers]
    plan = memory_cases.MemoryPlan(tuple(layers), mlp_tile=None)
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
