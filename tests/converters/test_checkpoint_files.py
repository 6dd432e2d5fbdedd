import os

import pytest

from ligermodels.converters.checkpoint_files import file_names, weight_files
from ligermodels.errors import CheckpointError


@pytest.mark.parametrize(
    "names, message",
    [
        (["pytorch_model.bin"], r"pytorch_model.bin: the file holds pickled.*save_pretrained"),
        (["pytorch_model-00001-of-00002.bin", "training_args.bin"], "pytorch_model-00001"),
        (["consolidated.safetensors"], "consolidated.safetensors: the file is not in the HF lay"),
        (["adapter_config.json", "adapter_model.safetensors"], "this is an adapter"),
        (["model-00001-of-00002.safetensors"], "index.json: the file is missing"),
        (["m.Q4.gguf"], "does not read GGUF"),
        (["config.json"], "holds no weights"),
    ],
)
def test_folders_without_readable_weights_say_what_to_do(names, message):
    with pytest.raises(CheckpointError, match=message):
        weight_files("repo", names, dict)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../x.safetensors",
            "/x.safetensors",
            "a/x.safetensors",
            "a\\x.safetensors",
            "c:x.safetensors",
        ),
        *("..", "x.bin", "", ".safetensors", "x\0.safetensors", "x\n.safetensors"),
        *("\ud800.safetensors", "x" * 300 + ".safetensors", 7, None, [], {}, True),
    ],
)
def test_weight_map_names_are_plain(name):
    names = ["model.safetensors.index.json"]
    with pytest.raises(CheckpointError, match=r"'weight_map' puts 'k' into .* not a plain"):
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
        CheckpointError, match=r"repo/model-2-of-2.safetensors: the file is missing"
    ) as error:
        weight_files("repo", names, lambda: index)
    assert "1 of 2 shards" in str(error.value)
    with pytest.raises(CheckpointError, match="one of the two is stale"):
        weight_files("repo", [*names, "model.safetensors"], lambda: index)


def test_names_of_a_folder_leave_out_links_to_nothing(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    assert file_names(tmp_path) == {"file", "link", "pipe"}
    with pytest.raises(CheckpointError, match="absent: the folder cannot be read"):
        file_names(tmp_path / "absent")


@pytest.mark.parametrize("name", ["MODEL.safetensors", "model.safetensors.Index.json"])
def test_a_name_in_capitals_is_pointed_out(name):
    with pytest.raises(CheckpointError, match=f"repo/{name}: the name must be in lower case"):
        weight_files("repo", [name, "config.json"], dict)


def test_hostile_names_do_not_reach_the_terminal():
    index = {"weight_map": {"\x1b[2Jk\ud800": "x\n.safetensors"}}
    with pytest.raises(CheckpointError) as caught:
        weight_files("repo", ["model.safetensors.index.json"], lambda: index)
    assert str(caught.value).isprintable() and r"'\x1b[2Jk\ud800' into 'x\n" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        weight_files("repo", ["\x1b[2J.bin"], dict)
    assert str(caught.value).isprintable()
