"""The real huggingface_hub downloads from a hub on the loopback."""

import contextlib
import json
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import save_file

from ligermodels import (
    AutoLiger,
    LigerClassifier,
    LigerLlama,
    LlamaConfig,
    Tokenizer,
    load_pretrained,
)
from ligermodels.converters import hub as hub_module
from ligermodels.converters.files import ADDED_WEIGHTS
from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError, LigerError
from tests.converters.loopback_hub import COMMIT, REPO, File, loopback_hub

from .conftest import TOKENIZER

(HEADS,) = ADDED_WEIGHTS


@pytest.fixture
def remote(make):
    return make("remote", shards=2)[0]


@pytest.fixture
def hub(remote, tmp_path):
    with loopback_hub(remote, tmp_path / "cache") as found:
        yield found


offline = partial(patch.object, constants, "HF_HUB_OFFLINE", True)


def test_local_folders_are_taken_as_they_are(make, monkeypatch):
    folder, _ = make()
    monkeypatch.chdir(folder)
    for name in (folder, str(folder), ".", "./", "../" + folder.name, Path()):
        assert resolve(name).samefile(folder)
    with pytest.raises(CheckpointError, match="is a local folder, so revision 'v1' cannot"):
        resolve(folder, revision="v1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "there is no such folder, and the name is not") for name in
          ("/no/where", "./absent", "a/b/c", "~/absent/x", "a b", "x" * 200, "a\0b", "\ud800")),
        ("", "name is empty"),
        ("file", "is a file; pass the folder"),
        ("run/checkpoint-500", "^run/checkpoint-500: this is a checkpoint of a run, not"),
        ("run/checkpoints/step-00000500", "step-00000500: this is a checkpoint of a run, not"),
    ],
)  # fmt: skip
def test_a_name_that_is_no_model_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoints" / "step-00000500").mkdir(parents=True)
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(CheckpointError, match=message):
        resolve(name)


@pytest.mark.parametrize("name", ["org/step-5", "org/checkpoint-5"])
def test_a_hub_id_may_end_as_a_checkpoint_of_a_run(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").touch()
    with patch.object(hub_module, "_fetch", return_value=tmp_path):
        assert resolve(name) == tmp_path


def test_only_needed_files_come_once(hub, remote):
    needed = set(hub.files)
    for name in ("README.md", "pytorch_model.bin", "onnx.onnx"):
        (remote / name).write_bytes(b"not needed")
    templates = remote / "additional_chat_templates"
    (templates / "deeper").mkdir(parents=True)
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "deeper" / "no.jinja").write_text("no")
    hub.read(remote)
    small = resolve(REPO, weights=False)
    template = "additional_chat_templates/tool_use.jinja"
    assert set(hub.sent) == {"config.json", *TOKENIZER, template}
    assert resolve(REPO) == small
    assert sorted(hub.sent) == sorted([*needed, template])
    hub.sent.clear()
    assert resolve(REPO) == small and not hub.sent


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_the_cache_serves_without_a_connection(hub, monkeypatch, caplog, revision):
    hub.files[HEADS] = File(b"heads")
    folder = resolve(REPO, revision=revision)
    hub.asked.clear()
    with offline():
        assert resolve(REPO, revision=revision) == folder
    assert not hub.asked and not caplog.text
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve(REPO, revision=revision) == folder
    assert "no answer that can be used" in caplog.text and "the cached copy" in caplog.text


def test_an_incomplete_cache_does_not_count_as_the_whole(hub):
    lost = "model-00001-of-00002.safetensors"
    with (
        offline(),
        pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE.* nothing is cached"),
    ):
        resolve(REPO)
    for name in hub.files.keys() - {lost}:
        huggingface_hub.hf_hub_download(REPO, name)
    with (
        offline(),
        pytest.raises(CheckpointError, match=r"is incomplete(.|\n)*model-00001"),
    ):
        resolve(REPO)
    folder = resolve(REPO)
    assert (folder / lost).exists()
    (folder / "tokenizer.json").unlink()
    with (
        offline(),
        pytest.raises(CheckpointError, match=r"incomplete(.|\n)*tokenizer.json did not"),
    ):
        resolve(REPO)


def test_a_cache_of_single_files_is_used_with_a_warning(hub, caplog):
    for name in hub.files.keys() - {"tokenizer.json"}:
        huggingface_hub.hf_hub_download(REPO, name)
    with offline():
        resolve(REPO)
    assert "has no tokenizer.json; the hub may have it" in caplog.text
    assert "generation_config" not in caplog.text
    with (
        offline(),
        patch.object(huggingface_hub, "get_cached_repo_tree", side_effect=TypeError("a fault")),
        pytest.raises(TypeError, match="a fault"),
    ):
        resolve(REPO)


LOADS = {
    "AutoLiger": AutoLiger.from_hf,
    "a family": LigerLlama.from_hf,
    "its config": LlamaConfig.from_hf,
    "Tokenizer": Tokenizer.from_hf,
    "LigerClassifier": LigerClassifier.from_hf,
    "load_pretrained": partial(load_pretrained, torch.nn.Linear(1, 1)),
}


@pytest.mark.parametrize("what", LOADS)
def test_every_load_takes_the_options_of_the_hub(hub, tmp_path, what):
    """The model is no Llama that can be loaded, so an error comes after the download."""
    options = {"token": "hf_mine", "cache_dir": tmp_path / "mine"}
    for more in ({}, {"local_files_only": True}):
        hub.asked.clear()
        with contextlib.suppress(LigerError):
            LOADS[what](REPO, **options, **more)
        assert bool(hub.asked) is not bool(more)
    assert hub.tokens == {"Bearer hf_mine"}
    assert [path.name for path in (tmp_path / "mine").glob("models*")] == ["models--some--model"]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(CheckpointError, match="local_files_only is set, and nothing is cached; do"):
        LOADS[what](REPO, local_files_only=True)
    with pytest.raises(TypeError, match="'force_download'"):
        LOADS[what](REPO, force_download=True)


def test_the_model_of_an_adapter_takes_the_options_of_the_hub(hub, tmp_path):
    config = {"base_model_name_or_path": REPO, "r": 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"x.lora_A.weight": torch.zeros(1, 1)}, tmp_path / "adapter_model.safetensors")
    with contextlib.suppress(LigerError):
        AutoLiger.from_hf(tmp_path, token="hf_mine", cache_dir=tmp_path / "mine")
    assert hub.tokens == {"Bearer hf_mine"} and (tmp_path / "mine").is_dir()


def test_what_is_not_there_says_what_to_do(hub, monkeypatch):
    with pytest.raises(CheckpointError, match=r"^no/such: .*no such model on the .*hf auth login"):
        resolve("no/such")
    with pytest.raises(CheckpointError, match="has no revision 'v9'"):
        resolve(REPO, revision="v9")
    hub.gated = True
    with pytest.raises(CheckpointError, match=r"is gated; accept its licence .* `hf auth login`"):
        resolve(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"^some/model: .* no answer .* nothing is cached"):
        resolve(REPO)


@pytest.mark.parametrize("name", ["remtoe", "./remtoe"])
def test_a_folder_of_almost_this_name_is_suggested(hub, remote, monkeypatch, name):
    monkeypatch.chdir(remote.parent)
    with pytest.raises(
        CheckpointError, match=rf"^{name}: .*no such folder.*did you mean 'remote'\?"
    ):
        resolve(name)


def test_an_alias_is_an_id_and_a_folder_comes_first(hub, make, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "ALIASES", {"small": REPO})
    monkeypatch.chdir(tmp_path)
    with (
        offline(),
        pytest.raises(CheckpointError, match=rf"^small is .* a folder small .*; {REPO}: "),
    ):
        resolve("small")
    assert resolve("small") == resolve(REPO)
    folder, _ = make("small")
    assert resolve("small").samefile(folder)


def test_unreadable_weights_are_refused_before_any_download(hub):
    for name in [name for name in hub.files if name.startswith("model")]:
        del hub.files[name]
    hub.files["pytorch_model.bin"] = hub.files["config.json"]
    with pytest.raises(CheckpointError, match=r"model/pytorch_model.bin: the file holds pickled"):
        resolve(REPO)
    del hub.files["config.json"]
    with pytest.raises(CheckpointError, match=r"model/config.json: the file is missing on the hub"):
        resolve(REPO)
    assert not hub.sent


def test_files_that_did_not_arrive_are_named(hub, monkeypatch):
    folder = resolve(REPO)
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json did not arrive; try again"):
        resolve(REPO)


@pytest.mark.parametrize("status", [401, 503])
def test_an_answer_of_the_hub_is_told(hub, monkeypatch, caplog, status):
    resolve(REPO)
    hub.answer = status, {"X-Error-Message": "Invalid credentials"}, b"<html>"
    resolve(REPO)
    assert f"'{status} " in caplog.text and "using the cached copy" in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "empty")
    with pytest.raises(CheckpointError, match=f"{status}.* nothing is cached"):
        resolve(REPO)


@pytest.mark.parametrize(
    ("call", "fault", "words"),
    [
        ("hf_hub_download", OSError(28, "No space left on device"), "downloaded: .*No space left"),
        ("HfApi.model_info", GatedRepoError("no", response=Mock()), "is gated; accept its lic"),
    ],
)
def test_a_request_that_fails_says_so(hub, monkeypatch, call, fault, words):
    monkeypatch.setattr(f"huggingface_hub.{call}", Mock(side_effect=fault))
    with pytest.raises(CheckpointError, match=words):
        resolve(REPO)
