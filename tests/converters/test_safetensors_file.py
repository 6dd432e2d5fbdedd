import json
import os
import struct
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from ligermodels.converters import safetensors_file as weights
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.errors import CheckpointError

GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write(path, header, data=b"\0" * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"


def test_damaged_files_name_the_file(tmp_path, subtests):
    path = tmp_path / "w.safetensors"
    for header, data in (
        ({"x": GOOD}, b"\0" * 15),
        ({"x": GOOD}, b"\0" * 17),
        ({"x": {**GOOD, "dtype": "Q7"}}, b"\0" * 16),
        ({"x": {**GOOD, "shape": [-2, -2]}}, b"\0" * 16),
        ({"x": {**GOOD, "shape": [3, 2]}}, b"\0" * 16),
        ({"x": 3}, b"\0" * 16),
        ({"x": GOOD, "y": GOOD}, b"\0" * 16),
        ({"\ud800\n": 3}, b""),
        ({"__metadata__": {"a": 1}, "x": GOOD}, b"\0" * 16),
    ):
        with subtests.test(f"{header!r:.80}"):
            write(path, header, data)
            with pytest.raises(CheckpointError, match=f"^{path}: the file is truncated or d"):
                SafetensorsFile(path)
    for content, message in ((b"1234", "is not a safetensors file"), (LFS, "git lfs pull")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"^{path}: .*{message}"):
            SafetensorsFile(path)


def test_tensors_of_no_size_and_of_no_dimension(tmp_path):
    tensors = {"a": torch.zeros(0, 3), "b": torch.tensor(2.5), "c": torch.ones(2)}
    save_file(tensors, tmp_path / "w.safetensors")
    file = SafetensorsFile(tmp_path / "w.safetensors")
    for name, tensor in tensors.items():
        assert file.tensors[name].shape == tensor.shape
        assert torch.equal(
            torch.cat([tensor.flatten()[:0], *map(torch.flatten, file.read(name))]),
            tensor.flatten(),
        )


def test_any_rows_in_pieces_of_any_size(tmp_path, monkeypatch, subtests):
    for piece in (8, 24, 96, 2**20):
        with subtests.test(str(piece)):
            monkeypatch.setattr(weights, "_PIECE", piece)
            tensors = {
                "a": torch.randn(7, 3),
                "b": torch.randn(11).bfloat16(),
                "c": torch.randn(4, 2, 2),
            }
            save_file(tensors, tmp_path / "w.safetensors")
            file = SafetensorsFile(tmp_path / "w.safetensors")
            for name, tensor in tensors.items():
                for first, last in [(0, len(tensor)), (1, 3), (2, 2), (3, 4)]:
                    got = [part.clone() for part in file.read(name, first, last)]
                    assert torch.equal(torch.cat([tensor[:0], *got]), tensor[first:last])
                    assert all(part.nbytes <= max(piece, part[0].nbytes) for part in got)
                    out = torch.full_like(tensor[first:last], -7)
                    got = list(file.read_into(weights.byte_view(out), name, first))
                    assert torch.equal(out, tensor[first:last])
                    assert b"".join(got) == weights.byte_view(out).tobytes()


def test_a_file_changed_after_its_header_was_read(tmp_path, subtests):
    """A mapped file that is cut short would end the process by SIGBUS, without an exception."""
    for how in ("cut short", "cut before", "grown", "written"):
        with subtests.test(how):
            path = tmp_path / f"{how} w.safetensors"
            save_file({"a": torch.randn(100_000), "b": torch.randn(100_000)}, path)
            file = SafetensorsFile(path)
            message = "'b' cannot be read: the file was changed"
            if how != "cut before":
                next(file.read("a", 0, 5))
            if how.startswith("cut"):
                os.truncate(path, 1000)
            elif how == "grown":
                os.truncate(path, 10**6)
            elif how == "written":
                os.utime(path, ns=(0, 0))
            with pytest.raises(CheckpointError, match=message) as caught:
                list(file.read("b"))
            assert str(caught.value).startswith(f"{path}: ")


def test_a_disk_that_fails_is_an_error_that_names_the_tensor(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.randn(4)}, path)
    file = SafetensorsFile(path)
    fails = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(CheckpointError, match=r"w\.safetensors: 'a' cannot be read: Input/output"):
        list(file.read("a"))
    with path.open("rb") as opened:
        with pytest.raises(
            CheckpointError, match=r"w\.safetensors: the file cannot be read: Input"
        ):
            weights._read_header(path, Mock(wraps=opened, read=fails))
