"""Weights of experts in one HF tensor: alternating and transposed rows, other layouts, MXFP4."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ligermodels import AutoLiger, GptOssConfig, LigerGptOss
from ligermodels.cli.convert import Arguments, run
from ligermodels.converters import export
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.inspect import describe
from ligermodels.converters.mxfp4 import decode
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.converters.verify import compare, verify
from ligermodels.converters.weight_map import (
    Entry,
    WeightMap,
    expert_entry,
    hf_tensors,
    native_tensor,
    packed_entry,
)
from ligermodels.errors import CheckpointError, ConfigError, SaveError
from tests.models import hf_models, zoo

EXPERTS, INNER, HIDDEN = 3, 4, 5
ROWS = 2 * INNER
QUANTIZER = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def layout(source: str = "s", **options) -> WeightMap:
    entry = expert_entry("w", (HIDDEN,), source, EXPERTS, ROWS, **options)
    bias = expert_entry("b", (), "c", EXPERTS, ROWS, parts=options.get("parts", 1))
    return WeightMap((entry, bias))


def tensors(*shape: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"s": torch.randn(EXPERTS, *shape), "c": torch.randn(EXPERTS, ROWS)}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_experts_come_in_and_go_out(tmp_path, monkeypatch, parts, transposed) -> None:
    """Rows, blocks of rows and columns, the export, and what is read for a part of the rows."""
    given = tensors(*((HIDDEN, ROWS) if transposed else (ROWS, HIDDEN)))
    save_file(given, tmp_path / "model.safetensors")
    weight_map = layout(parts=parts, transposed=transposed)
    weight_map.check("Family", {"w": (EXPERTS * ROWS, HIDDEN), "b": (EXPERTS * ROWS,)})
    assert weight_map.source_shapes() == {name: tuple(x.shape) for name, x in given.items()}
    rows = given["s"].mT if transposed else given["s"]
    expected = torch.cat([expert[first::parts] for expert in rows for first in range(parts)])
    checkpoint = Checkpoint(tmp_path)
    checkpoint.plan(weight_map)
    entry, bias = weight_map
    assert torch.equal(native_tensor(entry, given), expected)
    fill = Mock(wraps=SafetensorsFile._fill)
    monkeypatch.setattr(SafetensorsFile, "_fill", lambda *args: fill(*args))
    for dtype in (torch.float32, torch.float64):
        for first, last in ((0, EXPERTS * ROWS), (ROWS, 2 * ROWS), (3, 13), (INNER, ROWS)):
            for columns in ((0, HIDDEN), (1, 4)):
                fill.reset_mock()
                out = torch.full((last - first, columns[1] - columns[0]), -7.0, dtype=dtype)
                checkpoint.read(entry, out, first, columns[0])
                assert torch.equal(out, expected[first:last, slice(*columns)].to(dtype))
                if (last - first) % ROWS == 0:  # whole experts
                    read = sum(len(call.args[-1]) for call in fill.call_args_list)
                    assert read == 4 * out.numel()
    weights = {"w": expected, "b": native_tensor(bias, given)}
    for name, tensor in hf_tensors(weight_map, weights):
        assert torch.equal(tensor, given[name])
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    export.save(tmp_path / "out", {}, weight_map, weights.__getitem__, dtypes)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], x) for name, x in given.items())


def test_a_map_whose_experts_do_not_tile_is_refused(subtests) -> None:
    good = expert_entry("w", (HIDDEN,), "s", EXPERTS, ROWS, parts=2)
    spans = good.spans
    for wrong, complaint in (
        (spans[2:], "its experts are \\[1, 2\\], expected 0, 1, ... or None"),
        ((*spans[:4], replace(spans[4], source_row=1), spans[5]), "of expert 2 they fill 0 of 4"),
        ((*spans[:5], replace(spans[5], source_row=3)), "of expert 0 they fill 4 of 5"),
        ((*spans[:5], replace(spans[5], step=1, source_row=4)), "its pieces have several steps"),
        ((*spans[:5], replace(spans[5], transposed=True)), "only a part of it is transposed"),
    ):
        with subtests.test(complaint):
            rows = [replace(s, row=INNER * i) for i, s in enumerate(wrong)]
            entry = Entry("w", (INNER * len(rows), HIDDEN), tuple(rows))
            with pytest.raises(ConfigError, match=f"'w': each row of the tensor 's' .*{complaint}"):
                WeightMap((entry,)).check("Family", {"w": entry.shape})
    other = WeightMap((good,), layouts={"flat": (Entry("w", (4, 5), ()),)})
    with pytest.raises(ConfigError, match=r"Family, layout 'flat': .* has shape"):
        other.check("Family", {"w": good.shape})


def test_the_layout_that_came_in_is_found(tmp_path) -> None:
    fused = layout(parts=2, transposed=True)
    each = [(f"e.{i}", ROWS) for i in range(EXPERTS)]
    weight_map = replace(fused, layouts={"split": (packed_entry("w", (HIDDEN,), *each),)})
    given = tensors(HIDDEN, ROWS)
    parts = dict(zip((name for name, _ in each), torch.randn(EXPERTS, ROWS, HIDDEN)))
    for name, held in ((None, given), ("split", parts | {"c": given["c"]})):
        save_file(held, tmp_path / "model.safetensors")
        checkpoint = Checkpoint(tmp_path)
        assert checkpoint.plan(weight_map).keys() == {"w", "b"} and checkpoint.layout == name
        assert weight_map.written_as(name) == checkpoint.weight_map
        out = torch.empty(EXPERTS * ROWS, HIDDEN)
        checkpoint.read(weight_map.entries[0], out)
        assert torch.equal(out, native_tensor(checkpoint.weight_map.entries[0], held))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_layout_that_came_in_goes_out(tmp_path, family) -> None:
    """transformers has saved all experts of a layer in one tensor."""
    theirs = hf_models.build(family, zoo.Feature())
    theirs.save_pretrained(tmp_path, save_original_format=False)
    held = load_file(tmp_path / "model.safetensors")
    assert held["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    model = AutoLiger.from_hf(tmp_path)
    model.save_hf(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == held.keys()
    assert all(torch.equal(written[name], x) for name, x in held.items())
    assert verify(tmp_path, type(model)).ok


def test_mxfp4_is_decoded_as_in_transformers() -> None:
    """Every byte with every scale but 255, which is NaN, and which transformers reads as 2^128."""
    modeling = pytest.importorskip("transformers.integrations.mxfp4")
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(1, 255, 16, 16).contiguous()
    expected = modeling._convert_moe_packed_tensors(blocks, scales).mT
    found = decode(blocks, scales)
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))
    assert not decode(blocks[:, :1], scales[:, :1] | 255).isfinite().any()


@pytest.fixture
def mxfp4(tmp_path) -> Path:
    """A random checkpoint of gpt-oss whose experts are in MXFP4."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    config = GptOssConfig.small(**sizes, dtype="bfloat16")
    LigerGptOss(config).bfloat16().save_hf(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    for name in [name for name in held if name.endswith("_proj")]:
        experts, width, rows = held.pop(name).shape
        shape = experts, rows, width // 32
        held[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(120, 128, shape, dtype=torch.uint8)
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    del raw["num_experts"]
    file.write_text(json.dumps(raw | {"quantization_config": QUANTIZER}))
    return tmp_path


def test_mxfp4_comes_in_and_goes_out_in_either_form(mxfp4, capsys) -> None:
    folder = mxfp4
    model = LigerGptOss.from_hf(folder)
    held = load_file(folder / "model.safetensors")
    source = "model.layers.0.mlp.experts.gate_up_proj"
    values = decode(held[f"{source}_blocks"], held[f"{source}_scales"])
    expected = torch.stack((values[:, 0::2], values[:, 1::2]), 1).flatten(0, 2)
    assert torch.equal(model.layers[0].mlp.gate_up_proj, expected)
    weight_map, checkpoint = LigerGptOss.weight_map(model.config), Checkpoint(folder)
    checkpoint.plan(weight_map)
    entry = next(e for e in weight_map if e.name == "layers.0.mlp.gate_up_proj")
    part = torch.empty(90, 20)  # of two experts, in the dtype of a rank
    checkpoint.read(entry, part, 40, 30)
    assert torch.equal(part, expected[40:130, 30:50].float())
    assert describe(folder, LigerGptOss).dtype_bytes["MXFP4"] == 17 * values.numel() // 32 * 3 // 2
    assert verify(folder, LigerGptOss).ok

    model.save_hf(folder / "bf16")
    written = load_file(folder / "bf16" / "model.safetensors")
    assert torch.equal(written[source], values.mT)
    config = json.loads((folder / "bf16" / "config.json").read_text())
    assert "quantization_config" not in config and "num_experts" not in config
    report = compare(folder, folder / "bf16", LigerGptOss)
    assert report.ok and "but for 2 tensors in MXFP4 or float8, whose decoded" in str(report)

    model.float().save_hf(folder / "kept", mxfp4=True)
    written = load_file(folder / "kept" / "model.safetensors")
    assert written.keys() == held.keys()
    assert all(torch.equal(written[n], x) for n, x in held.items() if x.dtype == torch.uint8)
    config = json.loads((folder / "kept" / "config.json").read_text())
    assert config["quantization_config"] == QUANTIZER
    target = str(folder / "converted")
    run(Arguments(source=str(folder), target=target, mxfp4=True, verify=True))
    assert "bitwise equal" in capsys.readouterr().out

    with torch.no_grad():
        model.layers[0].mlp.down_proj[3, 3] += 1
    model.bfloat16().save_hf(folder / "changed")
    report = compare(folder, folder / "changed", LigerGptOss)
    assert report.differences == ("layers.0.mlp.down_proj: differs",)
    with pytest.raises(SaveError, match=r"'layers\.0\.mlp\.down_proj' .* not what was loaded"):
        model.save_hf(folder / "kept", mxfp4=True)
    with pytest.raises(ConfigError, match="was not loaded from weights in MXFP4"):
        LigerGptOss.from_hf(folder / "bf16").save_hf(folder / "kept", mxfp4=True)


def test_damaged_mxfp4_is_refused(mxfp4, subtests) -> None:
    folder = mxfp4
    held = load_file(folder / "model.safetensors")
    blocks = "model.layers.0.mlp.experts.down_proj_blocks"
    scales = blocks.replace("blocks", "scales")
    for changes, complaint in (
        ({scales: None}, "down_proj_scales' do not hold .* values in MXFP4"),
        ({blocks: None}, "down_proj_blocks' is missing"),
        ({blocks: held[blocks][:, :, :, :8].contiguous()}, "do not hold"),
        ({scales: torch.full_like(held[scales], 255)}, "NaN or infinite"),
    ):
        with subtests.test(complaint):
            changed = {name: x for name, x in (held | changes).items() if x is not None}
            save_file(changed, folder / "model.safetensors", {"format": "pt"})
            with pytest.raises(CheckpointError, match=complaint):
                LigerGptOss.from_hf(folder)
