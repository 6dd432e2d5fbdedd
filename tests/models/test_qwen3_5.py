"""Qwen3.5: published checkpoints, states in a cache, and what gated delta nets cannot do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ligermodels import AutoLiger, KVCache
from ligermodels.adapters.adapted_model import add_adapters, export_adapter
from ligermodels.adapters.adapter_config import has_end
from ligermodels.converters.hf_config import fields_from_hf
from ligermodels.converters.inspect import describe
from ligermodels.converters.verify import verify
from ligermodels.errors import ConfigError
from ligermodels.generation import prefill
from ligermodels.layers import GatedDeltaNet
from ligermodels.models.auto import families, family_of
from ligermodels.parallel.context import context_parallel
from ligermodels.parallel.shard import check_dtypes
from tests.models import hf_models, zoo
from tests.models.pairs import relative
from tests.tiny_models import VOCAB, random_model

FAMILIES = ("qwen3_5", "qwen3_5_moe")
PROMPTS = [[5, 9, 3, 8], [11], [40, 41, 8, 77, 31, 90, 2]]
TEXT = {
    "attn_output_gate": True,
    "full_attention_interval": 2,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
ROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}


def as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the experts, widen what is float32 on the hub, and add a layer for a second token."""
    made: dict[str, Tensor] = {}
    for name, x in tensors.items():
        start, _, end = name.partition(".experts.")
        if not end:
            wide = name.endswith(("A_log", "linear_attn.norm.weight"))
            made[name] = x.float() if wide else x
        elif end == "0.gate_proj.weight":
            each = [f"{start}.experts.{i}" for i in range(5)]
            gate, up, down = (
                torch.stack([tensors[f"{one}.{kind}_proj.weight"] for one in each])
                for kind in ("gate", "up", "down")
            )
            made[f"{start}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
            made[f"{start}.experts.down_proj"] = down
    return made | {
        "mtp.fc.weight": torch.randn(48, 96).bfloat16(),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.full((2, 3, 4), torch.nan),
        "mtp.norm.weight": torch.arange(48, dtype=torch.int64),
    }


@pytest.fixture(scope="module", params=FAMILIES)
def published(request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("published")
    hf_models.save(folder, request.param, zoo.Feature(dtype=torch.bfloat16))
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= TEXT
    raw["text_config"]["rope_parameters"] |= ROPE
    (folder / "config.json").write_text(json.dumps(raw, indent=4))
    path = folder / "model.safetensors"
    save_file(as_published(load_file(path)), path, {"format": "pt"})
    return folder


def contents(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return {n: (x.dtype, x.view(torch.uint8).numpy().tobytes()) for n, x in tensors.items()}


def test_a_published_checkpoint_passes_through(published: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(published, copy)
    before, raw = contents(copy), json.loads((copy / "config.json").read_text())
    model = AutoLiger.from_hf(copy)
    assert model.layers[0].linear_attn.A_log.dtype == torch.float32
    with pytest.raises(ConfigError, match="as in published checkpoints"):
        check_dtypes(model)
    model.save_hf(out, max_shard_size=20000)
    assert contents(out) == before and json.loads((out / "config.json").read_text()) == raw

    report = verify(copy, family_of(copy))
    assert report.ok and report.tensors == len(before), str(report)
    kept = sum(name.startswith(("model.visual.", "mtp.")) for name in before)
    described = describe(copy, family_of(copy))
    assert kept > 3 and sum(described.kept.values()) == kept
    assert described.unknown_keys.keys() <= TEXT.keys()

    with torch.no_grad():
        model.norm.weight.add_(1)
    model.save_hf(copy)  # onto the folder that the towers are read from
    after = contents(copy)
    name = "model.language_model.norm.weight"
    assert after.pop(name) != before[name]
    assert after.items() <= before.items()


def test_adapters_have_the_names_of_the_projections(published: Path, tmp_path: Path) -> None:
    model = AutoLiger.from_hf(published, dtype=torch.float32)
    add_adapters(model, rank=2, alpha=4)
    export_adapter(model, tmp_path, str(published), None)
    targets = {*json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]}
    weights = load_file(tmp_path / "adapter_model.safetensors")
    names = {0: "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.in_proj_a".split()}
    names[0] += ["linear_attn.in_proj_b", "linear_attn.out_proj"]
    names[1] = [f"self_attn.{x}_proj" for x in "qkvo"]
    start = "base_model.model.model.language_model.layers"
    for layer, of_layer in names.items():
        for name in of_layer:
            assert f"{start}.{layer}.{name}.lora_B.weight" in weights
            assert has_end(f"model.language_model.layers.{layer}.{name}", targets)
    attention = f"{start}.1.self_attn"
    rows = {x: len(weights[f"{attention}.{x}_proj.lora_B.weight"]) for x in "qk"}
    assert rows == {"q": 2 * 4 * 16, "k": 2 * 16}  # a gate beside each query


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_prompts_that_share_a_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last token of each prompt is read, as the next step reads that one."""
    model = random_model(family)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    caches = []
    for packs in (False, True):
        monkeypatch.setattr(prefill, "_can_pack", lambda _, packs=packs: packs)
        caches.append(KVCache.of(model, 4, 16))
        for _ in range(2):  # what other prompts have left is gone
            prefill.read_prompts(model, caches[-1], [2, 0, 3], prompts)
    for apart, together in zip(caches[0].states, caches[1].states):
        for one, other in zip(apart or (), together or ()):
            torch.testing.assert_close(one, other)
            assert not one[0].any() and not one[1].any() and one[2].any()
    with torch.no_grad():
        row = KVCache.of(model, 1, 16)
        model(prompts[2][None, :-1], cache=row)
    for state, of_row in zip(caches[0].states, row.states):
        for x, y in zip(state or (), of_row or ()):
            torch.testing.assert_close(x[3:4], y)
    with pytest.raises(ValueError, match="cannot be truncated"):
        row.truncate(2)


def test_what_a_state_cannot_do() -> None:
    model, ids = random_model("qwen3_5"), torch.tensor(PROMPTS[2:])
    with pytest.raises(ValueError, match="sees the tokens before it and no others"):
        model(ids, prefix_lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match="cannot put states of batch 1 in a cache made for 3"):
        model(ids, cache=KVCache.of(model, 3, 16))
    with pytest.raises(ValueError, match="wrong drafts cannot be removed"):
        model.generate(ids, draft_model=random_model("llama"), max_new_tokens=3)
    with pytest.raises(ConfigError, match="LinearAttention, which mixes the tokens"):
        context_parallel(model, None)  # type: ignore[arg-type]
    llama = random_model("llama")
    llama.layers[1].net = GatedDeltaNet(20, 2, 4, 16, 8)
    with pytest.raises(ConfigError, match="net is a GatedDeltaNet, which mixes"):
        context_parallel(llama, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a GatedDeltaNet, which knows no padding"):
        llama.generate([[3, 4], [5]])


def test_a_document_begins_with_an_empty_state() -> None:
    """Documents of any lengths, cut at random: bitwise those of rows of their own, or nearly."""
    model = random_model("qwen3_5")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (1, 150), generator=draw)
    with torch.no_grad():
        for _ in range(4):
            cuts = torch.randperm(149, generator=draw)[:3].sort().values + 1
            ends = torch.cat((torch.tensor([0]), cuts, torch.tensor([150])))
            together = model(ids, cu_seqlens=ends)
            apart = [model(part) for part in ids.split(ends.diff().tolist(), 1)]
            assert relative(together, torch.cat(apart, 1)) <= 1e-6


def test_a_model_without_gates_is_refused() -> None:
    raw = {"model_type": "qwen3_5_text", "attn_output_gate": False}
    with pytest.raises(ConfigError, match="'attn_output_gate' is False"):
        fields_from_hf(raw, families()["qwen3_5"].config_class)
