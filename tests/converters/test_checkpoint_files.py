from functools import partial

import pytest

from ligermodels.converters.files import copied_files, weight_files
from ligermodels.errors import CheckpointError


def test_folders_without_readable_weights_say_what_to_do(subtests):
    for names, message in (
        (["pytorch_model.bin"], r"pytorch_model.bin: the file holds pickled.*save_pretrained"),
        (["pytorch_model-00001-of-00002.bin", "training_args.bin"], "pytorch_model-00001"),
        (["consolidated.safetensors"], "consolidated.safetensors: the file is not in the HF lay"),
        (["adapter_config.json", "adapter_model.safetensors"], "this is an adapter"),
        (["model-00001-of-00002.safetensors"], "index.json, which names the shards, is missing"),
        (["m.Q4.gguf"], "does not read GGUF"),
        (["config.json"], "holds no weights"),
    ):
        with subtests.test(str(names)):
            with pytest.raises(CheckpointError, match=message):
                weight_files("repo", names, dict)


def test_weight_map_names_are_plain(subtests):
    places = ("../x", "/x", "a/x", "a\\x", "c:x", "x\0", "x\n", "\ud800", "x" * 300, "")
    names = [f"{place}.safetensors" for place in places]
    for name in (*names, "..", "x.bin", "", 7, None, [], {}, True):
        with subtests.test(repr(name)[:60]):
            index = {"weight_map": {"k": name}}
            with pytest.raises(CheckpointError, match=r"'weight_map' puts 'k' into .* not a plain"):
                weight_files("repo", ["model.safetensors.index.json"], partial(dict, index))


def test_an_index_without_a_map_is_refused(subtests):
    for index in ({}, {"weight_map": {}}, {"weight_map": [1]}):
        with subtests.test(str(index)):
            with pytest.raises(CheckpointError, match="'weight_map' is missing or empty"):
                weight_files("repo", ["model.safetensors.index.json"], partial(dict, index))


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


def test_copied_files_are_read_whole_or_are_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"a\r\n\0")
    (tmp_path / "notes.txt").write_text("the user's")
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("b")
    (templates / ".hidden").mkdir()
    expected = {"tokenizer.json": b"a\r\n\0", "additional_chat_templates/rag.jinja": b"b"}
    assert copied_files(tmp_path) == expected
    assert copied_files(tmp_path / "absent") == {}
    (templates / "folder.jinja").mkdir()
    with pytest.raises(CheckpointError, match=r"folder.jinja: the file cannot be read: Is a dir"):
        copied_files(tmp_path)


def test_hostile_names_do_not_reach_the_terminal():
    index = {"weight_map": {"\x1b[2Jk\ud800": "x\n.safetensors"}}
    with pytest.raises(CheckpointError) as caught:
        weight_files("repo", ["model.safetensors.index.json"], lambda: index)
    assert str(caught.value).isprintable() and r"'\x1b[2Jk\ud800' into 'x\n" in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        weight_files("repo", ["\x1b[2J.bin"], dict)
    assert str(caught.value).isprintable()
