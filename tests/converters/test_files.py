import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from ligermodels.converters.files import read_header, read_json, weight_files
from ligermodels.errors import CheckpointError, ConfigError

GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write(path, header, data=b"\0" * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_header_of_a_file_the_library_wrote(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"x": torch.zeros(3, 2), "y": torch.zeros(5, dtype=torch.bfloat16)}
    save_file(tensors, path, {"format": "pt"})
    header = read_header(path)
    assert header["x"].shape == (3, 2) and header["x"].dtype == "F32" and header["x"].nbytes == 24
    assert header["y"].shape == (5,) and header["y"].dtype == "BF16"


@pytest.mark.parametrize(
    "header, data, message",
    [
        (b"{not json", b"", "is not JSON"),
        (b"\xff\xfe", b"", "is not UTF-8"),
        (b"[1]", b"", "holds a list"),
        (b'{"a": {}, "a": {}}', b"", "key 'a' appears twice"),
        (b"[" * 100_000, b"", "nested too deep"),
        ({"x": GOOD}, b"\0" * 15, "is truncated: the header declares 16 bytes"),
        ({"x": GOOD}, b"\0" * 17, "1 bytes follow the last tensor"),
        ({"x": {**GOOD, "dtype": "Q7"}}, b"\0" * 16, "'x' has dtype 'Q7'"),
        ({"x": {**GOOD, "dtype": ["F32"]}}, b"\0" * 16, "'x' has dtype"),
        ({"x": {**GOOD, "shape": [-2, -2]}}, b"\0" * 16, r"'x' has shape \[-2, -2\]"),
        ({"x": {**GOOD, "shape": [3, 2]}}, b"\0" * 16, "'x' has 16 bytes"),
        ({"x": {**GOOD, "data_offsets": [16, 0]}}, b"\0" * 16, "'x' has data_offsets"),
        ({"x": {"dtype": "F32"}}, b"\0" * 16, "'x' needs exactly"),
        ({"x": 3}, b"\0" * 16, "'x' needs exactly"),
        ({"x": GOOD, "y": GOOD}, b"\0" * 16, "'y' begins at byte 0 of the data, expected 16"),
        ({"x": {**GOOD, "data_offsets": [4, 20]}}, b"\0" * 20, "'x' begins at byte 4"),
    ],
)
def test_damaged_files_name_the_file(tmp_path, header, data, message):
    path = write(tmp_path / "w.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"", b"1234", struct.pack("<Q", 2**63) + b"{}"])
def test_a_header_longer_than_its_file_is_not_read(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
        read_header(path)


def test_an_unreadable_file_is_an_error_of_the_kind_asked_for(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "absent")
    with pytest.raises(ConfigError, match="No such file"):
        read_json(tmp_path / "absent", ConfigError)


@pytest.mark.parametrize(
    "names, message",
    [
        (["pytorch_model.bin"], r"pytorch_model.bin: holds pickled.*save_pretrained"),
        (["pytorch_model-00001-of-00002.bin", "training_args.bin"], "pytorch_model-00001"),
        (["consolidated.safetensors"], "consolidated.safetensors: is not in the HF layout"),
        (["adapter_config.json", "adapter_model.safetensors"], "this is an adapter"),
        (["model-00001-of-00002.safetensors"], "index.json: is missing"),
        (["m.Q4.gguf"], "GGUF is not read here"),
        (["config.json"], "holds no weights"),
    ],
)
def test_folders_without_readable_weights_say_what_to_do(names, message):
    with pytest.raises(CheckpointError, match=message):
        weight_files("repo", names, dict)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", 7, "x.bin", ""]
)
def test_weight_map_names_are_plain(name):
    names = ["model.safetensors.index.json"]
    with pytest.raises(CheckpointError, match=r"'weight_map' puts 'k' into .* no plain file name"):
        weight_files("repo", names, lambda: {"weight_map": {"k": name}})


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": [1]}])
def test_an_index_without_a_map_is_refused(index):
    with pytest.raises(CheckpointError, match="'weight_map' is missing or empty"):
        weight_files("repo", ["model.safetensors.index.json"], lambda: index)


def test_consolidated_beside_the_real_weights_is_ignored():
    names = ["consolidated.safetensors", "model.safetensors"]
    assert weight_files("repo", names, dict) == (["model.safetensors"], None)


def test_stale_index_and_missing_shards_are_refused():
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    names = ["model.safetensors.index.json", "model-1-of-2.safetensors"]
    with pytest.raises(
        CheckpointError, match=r"repo/model-2-of-2.safetensors: is missing"
    ) as error:
        weight_files("repo", names, lambda: index)
    assert "1 of 2 shards" in str(error.value)
    with pytest.raises(CheckpointError, match="one of the two is stale"):
        weight_files("repo", [*names, "model.safetensors"], lambda: index)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n")
    with pytest.raises(
        CheckpointError, match=r"w\.safetensors: is a git-lfs pointer.*git lfs pull"
    ):
        read_header(path)
