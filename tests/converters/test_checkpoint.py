import json
import shutil
from unittest.mock import Mock

import pytest
import torch

from ligermodels.converters.checkpoint import Checkpoint, bitwise_equal, is_finite
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.errors import CheckpointError
from ligermodels.models.llama import LigerLlama

from .conftest import load_weights, random_tensors, write_checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "rows", [(0, 32), (0, 5), (14, 18), (15, 31), (16, 24), (30, 32), (9, 9)], ids=str
)
def test_a_block_of_rows_and_columns_is_that_of_the_whole(make, monkeypatch, rows):
    """Nothing else is read; the file has 2 bytes for each number."""
    folder, config = make()
    name = "layers.0.self_attn.qkv_proj.weight"
    whole = load_weights(folder, config, torch.float64)[name]
    entry = next(e for e in LigerLlama.weight_map(config) if e.name == name)
    fill = Mock(wraps=SafetensorsFile._fill)
    monkeypatch.setattr(SafetensorsFile, "_fill", lambda *args: fill(*args))
    for columns in ((0, 16), (4, 9)):
        fill.reset_mock()
        out = torch.full((rows[1] - rows[0], columns[1] - columns[0]), -7.0).double()
        Checkpoint(folder).read(entry, out, start=rows[0], column=columns[0])
        assert torch.equal(out, whole[slice(*rows), slice(*columns)])
        assert sum(len(call.args[-1]) for call in fill.call_args_list) == 2 * out.numel()


def test_one_error_lists_everything_wrong(make):
    folder, config = make(
        drop=["model.norm.weight", "model.layers.0.mlp.up_proj.weight"],
        add={Q: torch.zeros(3, 16), "extra.weight": torch.zeros(1)},
    )
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).plan(LigerLlama.weight_map(config))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"{folder}/model.safetensors: {Q!r} has shape [3, 16], expected [16, 16] "
        "(the first of 4 faults)"
    )
    assert lines[1:] == [
        f"  {Q} has shape [3, 16], expected [16, 16]",
        "  model.layers.0.mlp.up_proj.weight is missing",
        "  model.norm.weight is missing",
        "  extra.weight is unexpected",
    ]


def test_quantised_parts_lead_the_message(make, subtests):
    for parts in (
        {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16},  # AWQ, GPTQ
        {"weight_packed": torch.int32, "weight_scale": torch.float16},  # compressed-tensors
    ):
        with subtests.test(str(list(parts))):
            place = Q.removesuffix("weight")
            add = {f"{place}{part}": torch.ones(2, 2).to(dtype) for part, dtype in parts.items()}
            folder, config = make(next(iter(parts)), drop=[Q], add=add)
            with pytest.raises(CheckpointError) as caught:
                Checkpoint(folder).plan(LigerLlama.weight_map(config))
            first, *rest = str(caught.value).splitlines()
            assert first.startswith(f"{folder}/model.safetensors: '{place}")
            assert "is part of a quantised weight" in first and f"  {Q} is missing" in rest


def test_inverse_frequencies_and_other_formats_are_ignored(make):
    add = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(2) for i in range(2)}
    folder, config = make(add=add)
    (folder / "consolidated.safetensors").write_bytes(b"not even a header")
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    load_weights(folder, config, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_are_finite_or_not_as_torch_says(dtype):
    """At the bit patterns around the zeros and the infinities, among them the nearest NaNs."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype).view(integers)
    values = (edges + torch.arange(-4, 5, dtype=integers)[:, None]).view(dtype).flatten()
    finite = values[values.isfinite()].view(2, -1)
    assert is_finite(finite) and is_finite(finite.T) and is_finite(finite[:0])
    for value in values[~values.isfinite()]:
        for place in ((0, 0), (1, 2)):
            changed = finite.clone()
            changed[place] = value
            assert not is_finite(changed) and not is_finite(changed.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_threads_read_what_one_reads(make, dtype):
    folder, config = make(shards=3)
    table = LigerLlama.weight_map(config)
    expected = load_weights(folder, config, dtype)
    before = torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            weights = {e.name: torch.full(e.shape, -7.0, dtype=dtype) for e in table}
            checkpoint = Checkpoint(folder)
            done = list(checkpoint.read_all([(e, weights[e.name]) for e in table]))
            assert len(done) == len(weights)
            assert all(bitwise_equal(weights[name], expected[name]) for name in expected)
    finally:
        torch.set_num_threads(before)


def test_a_cast_that_overflows_is_refused(make):
    folder, config = make(dtype=torch.float32, add={Q: torch.full((16, 16), 7e4)})
    with pytest.raises(CheckpointError, match=f"'{Q}' holds values too large for torch.float16"):
        load_weights(folder, config, torch.float16)


def test_index_and_shards_must_agree(make):
    folder, _ = make(shards=2)
    path = folder / "model.safetensors.index.json"
    shard_of = json.loads(path.read_text())["weight_map"]
    name, file = next(iter(shard_of.items()))
    other = "model-00002-of-00002.safetensors"
    for key, message in (
        (name, f"{name}' is not mapped to {file}"),
        ("x", f"{other}: 'x' is miss"),
    ):
        path.write_text(json.dumps({"weight_map": {**shard_of, key: other}}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(folder)


def test_bitwise_equal_tells_nan_and_signed_zeros_apart():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert bitwise_equal(nan, nan.clone()) and not bitwise_equal(zero, -zero)
    assert not bitwise_equal(zero, zero.bfloat16()) and not bitwise_equal(zero, torch.zeros(2))
    assert bitwise_equal(torch.tensor(1.0), torch.tensor(1.0))


def test_a_checkpoint_that_was_replaced_is_still_read_whole(make):
    """Its files are open: another checkpoint of the same names and shapes does not mix in."""
    folder, config = make(shards=3)
    checkpoint = Checkpoint(folder)
    dtypes = checkpoint.plan(LigerLlama.weight_map(config))
    shutil.rmtree(folder)
    other = {name: torch.zeros_like(t) for name, t in random_tensors(config).items()}
    write_checkpoint(folder, other, {}, shards=3)
    assert set(dtypes.values()) == {torch.bfloat16}
    for name, tensor in random_tensors(config).items():
        assert bitwise_equal(checkpoint.tensor(name), tensor)
