"""The real huggingface_hub downloads from a hub that the test runs on the loopback."""

import contextlib
import hashlib
import json
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from ligermodels import (
    AutoLiger,
    LigerClassifier,
    LigerLlama,
    LlamaConfig,
    Tokenizer,
    load_pretrained,
)
from ligermodels.converters import hub
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.checkpoint_files import HEADS_NAME
from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError, LigerError

from .conftest import TOKENIZER

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some/model"


class FakeHub:
    """A server of the files of `repos` (name -> folder) with the hub's API and a log."""

    def __init__(self):
        self.repos: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.log: list[str] = []
        self.tokens: set[str | None] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request):
        self.log.append(f"{request.command} {request.path}")
        self.tokens.add(request.headers.get("Authorization"))
        path = request.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(.+)|/tree/.+)?", path):
            repo, rest, revision = match.groups()
            if repo not in self.repos:
                return self.send(request, 401, headers={"X-Error-Code": "RepoNotFound"})
            if revision not in (None, "main", COMMIT):
                return self.send(request, 404, headers={"X-Error-Code": "RevisionNotFound"})
            files = (p for p in self.repos[repo].rglob("*") if p.is_file())
            names = sorted(p.relative_to(self.repos[repo]).as_posix() for p in files)
            if rest and rest.startswith("/tree"):
                files = [(n, (self.repos[repo] / n).stat().st_size) for n in names]
                body = [{"type": "file", "path": n, "size": s, "oid": "0"} for n, s in files]
            else:
                body = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            return self.send(request, 200, json.dumps(body).encode())
        match = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path)
        if match and match[1] in self.gated:
            return self.send(request, 403, headers={"X-Error-Code": "GatedRepo"})
        if match and (self.repos[match[1]] / match[2]).is_file():
            body = (self.repos[match[1]] / match[2]).read_bytes()
            etag = hashlib.sha1(body).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            return self.send(request, 200, body, headers)
        return self.send(request, 404, headers={"X-Error-Code": "EntryNotFound"})

    def send(self, request, status, body=b"", headers=None):
        request.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    def fetched(self):
        return {line.rpartition("/")[2] for line in self.log if line.startswith("GET /some/model/")}


@pytest.fixture
def fake(tmp_path, monkeypatch, make):
    server = FakeHub()
    point_at(monkeypatch, server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server.repos[REPO] = make("remote", shards=2)[0]
    yield server
    server.stop()


def point_at(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_local_folders_are_taken_as_they_are(make, monkeypatch):
    folder, _ = make()
    assert resolve(folder) == folder and resolve(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve(folder.name) == Path(folder.name)
    monkeypatch.chdir(folder)
    for name in (".", "./", "../" + folder.name, Path()):
        assert resolve(name).samefile(folder)
    with pytest.raises(CheckpointError, match="is a local folder, so revision 'v1' cannot"):
        resolve(folder, revision="v1")


def test_a_name_that_is_no_hub_id_is_an_absent_folder(subtests):
    for name in (
        *("/no/where", "./absent", "../a/b", "a/b/c", "~/absent/x", "a b"),
        *("~nobody-of-this-name/x", "x" * 200, "a/" * 3000, "a\0b", "a\nb", "\ud800"),
    ):
        with subtests.test(repr(name)[:60]):
            with pytest.raises(
                CheckpointError, match="there is no such folder, and the name is not a"
            ):
                resolve(name)


def test_no_name_is_not_the_current_folder():
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve("")


def test_a_file_is_not_a_folder(make):
    folder, _ = make()
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        resolve(folder / "config.json")


def test_a_checkpoint_of_a_run_is_no_model(tmp_path, monkeypatch):
    """Such a name is not looked for on the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    for name in ("run/checkpoint-500", str(tmp_path / "run" / "checkpoint-500")):
        with pytest.raises(CheckpointError, match=f"^{name}: this is a checkpoint of a run, not"):
            resolve(name)


def test_only_needed_files_come_all_from_one_commit(fake):
    remote = fake.repos[REPO]
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx.onnx"):
        (remote / name).write_bytes(b"not needed")
    folder = resolve(REPO)
    wanted = {p.name for p in remote.iterdir()}
    wanted -= {"README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx.onnx"}
    assert {p.name for p in folder.iterdir()} == wanted == fake.fetched()
    assert len(Checkpoint(folder).tensors) == 21
    assert all((folder / n).read_bytes() == content for n, content in TOKENIZER.items())
    asked = re.compile(r"models/some/model($|[?]|/revision)")
    resolutions = [line for line in fake.log if asked.search(line)]
    assert len(resolutions) == 1
    ours = [line for line in fake.log if REPO in line]
    assert [line for line in ours if COMMIT not in line] == resolutions


def test_without_weights_only_small_files_come(fake):
    folder = resolve(REPO, weights=False)
    assert {p.name for p in folder.iterdir()} == {"config.json", *TOKENIZER} == fake.fetched()


def test_additional_chat_templates_are_downloaded(fake):
    templates = fake.repos[REPO] / "additional_chat_templates"
    (templates / "deeper").mkdir(parents=True)
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "deeper" / "no.jinja").write_text("")
    found = resolve(REPO) / "additional_chat_templates"
    assert [p.relative_to(found).as_posix() for p in found.rglob("*")] == ["tool_use.jinja"]


def test_cached_files_are_not_fetched_again(fake):
    first = resolve(REPO)
    fake.log.clear()
    assert resolve(REPO) == first
    assert not fake.fetched()


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_uses_the_cache(fake, monkeypatch, revision):
    first = resolve(REPO, revision=revision)
    fake.log.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(REPO, revision=revision) == first
    assert not fake.log


def test_without_a_connection_the_cache_serves_with_a_warning(fake, monkeypatch, caplog):
    first = resolve(REPO)
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert resolve(REPO) == first
    assert "no connection" in caplog.text and "using the cached copy" in caplog.text


def test_offline_without_a_whole_cached_copy_is_refused(fake, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set, and nothing .* unset") as e:
        resolve(REPO)
    assert "pass the path of a local folder" in str(e.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    resolve(REPO, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the cached copy is incomplete; unset HF_HUB_OFF"):
        resolve(REPO)


def test_offline_without_the_heads_that_were_cached_is_refused(fake, monkeypatch):
    (fake.repos[REPO] / HEADS_NAME).write_bytes(b"heads")
    (resolve(REPO) / HEADS_NAME).resolve().unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=rf"copy is incomplete; unset(.|\n)*{HEADS_NAME}"):
        resolve(REPO)


def test_no_connection_and_nothing_cached(fake, monkeypatch):
    point_at(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"^some/model: .* no connection .* connect to downl"):
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
def test_every_load_takes_the_options_of_the_hub(fake, tmp_path, what):
    """The model is no Llama that can be loaded, so an error comes after the download."""
    options = {"token": "hf_mine", "cache_dir": tmp_path / "mine"}
    for more in ({}, {"local_files_only": True}):
        fake.log.clear()
        with contextlib.suppress(LigerError):
            LOADS[what](REPO, **options, **more)
        assert bool(fake.log) is not bool(more)
    assert fake.tokens == {"Bearer hf_mine"}
    assert [path.name for path in (tmp_path / "mine").glob("models*")] == ["models--some--model"]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(CheckpointError, match="local_files_only is set, and nothing is cached; le"):
        LOADS[what](REPO, local_files_only=True)
    with pytest.raises(TypeError, match="'force_download'"):
        LOADS[what](REPO, force_download=True)


def test_the_model_of_an_adapter_takes_the_options_of_the_hub(fake, tmp_path):
    for name, text in (
        ("adapter_config.json", json.dumps({"base_model_name_or_path": REPO, "r": 1})),
        ("tokenizer.json", "{}"),
    ):
        (tmp_path / name).write_text(text)
    save_file({"x.lora_A.weight": torch.zeros(1, 1)}, tmp_path / "adapter_model.safetensors")
    with contextlib.suppress(LigerError):
        AutoLiger.from_hf(tmp_path, token="hf_mine", cache_dir=tmp_path / "mine")
    assert fake.tokens == {"Bearer hf_mine"} and (tmp_path / "mine").is_dir()


def test_absent_repository_and_revision(fake):
    with pytest.raises(
        CheckpointError, match=r"^no/such: .*no such model on the hub.*hf auth login"
    ):
        resolve("no/such")
    with pytest.raises(CheckpointError, match="has no revision 'v9'"):
        resolve(REPO, revision="v9")


def test_gated_repository(fake):
    fake.gated.add(REPO)
    with pytest.raises(CheckpointError, match=r"is gated; accept its licence .* `hf auth login`"):
        resolve(REPO)


def test_unreadable_weights_are_refused_before_any_download(fake):
    remote = fake.repos[REPO]
    for path in remote.glob("model*"):
        path.unlink()
    (remote / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(CheckpointError, match=r"model/pytorch_model.bin: the file holds pickled"):
        resolve(REPO)
    assert not fake.fetched()
    (remote / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model/config.json: the file is missing on the hub"):
        resolve(REPO)


def test_a_revision_must_be_a_possible_name(fake, subtests):
    for name in ("../../x", "/x", "a/../b", "x\\y", "a b", "", "x" * 300, ".git", "a\nb", "\udc80"):
        with subtests.test(repr(name)[:20]):
            with pytest.raises(CheckpointError, match=r"revision .* is not a possible name"):
                resolve(REPO, revision=name)
    assert not fake.log
    for name in ("main", "refs/pr/1", "v1.0", "feature/x_y-z", COMMIT):
        assert hub._is_revision(name)


def test_the_hub_must_name_a_commit(fake, monkeypatch, tmp_path, subtests):
    send = FakeHub.send
    for sha in (str(tmp_path / "x"), "../x", "main", None, 5, COMMIT[1:], COMMIT[::-1]):

        def lie(self, request, status, body=b"", headers=None, sha=sha):
            body = body.replace(json.dumps(COMMIT).encode(), json.dumps(sha).encode())
            send(self, request, status, body, headers)

        with subtests.test(repr(sha)):
            monkeypatch.setattr(FakeHub, "send", lie)
            with pytest.raises(CheckpointError, match=r"the hub .* commit"):
                resolve(REPO, revision=COMMIT)
    assert not (tmp_path / "x").exists()


def test_an_answer_is_not_a_missing_connection(fake, monkeypatch, caplog, subtests):
    resolve(REPO)
    send = FakeHub.send
    for status, headers, words in (
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "log in again"),
        (403, None, "log in again"),
        (500, None, "try again later"),
        (503, None, "try again later"),
        (200, None, "cannot be understood"),
    ):

        def broken(self, request, *_, status=status, headers=headers):
            send(self, request, status, b"<html>", headers)

        with subtests.test(str(status)), monkeypatch.context() as patch:
            patch.setattr(FakeHub, "send", broken)
            caplog.clear()
            resolve(REPO)
            assert "no connection" not in caplog.text and "using the cached copy" in caplog.text
            patch.setattr(constants, "HF_HUB_CACHE", str(fake.repos[REPO] / "empty"))
            with pytest.raises(CheckpointError, match="nothing is cached") as error:
                resolve(REPO)
            assert words in str(error.value) and "no connection" not in str(error.value)


def test_a_broken_download_says_so(fake, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(CheckpointError, match=r"could not be downloaded: .*No space left"):
        resolve(REPO)


def test_a_progress_bar_shows(fake, capfd):
    # Other tests silence transformers' bars, and transformers silences these.
    huggingface_hub.utils.enable_progress_bars()
    resolve(REPO)
    assert "Fetching" in capfd.readouterr().err


def test_hub_ids():
    for name in ("gpt2", "meta-llama/Llama-3.2-1B", "a_b/c.d-e"):
        assert hub._REPO_ID.fullmatch(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GatedRepoError", "is gated; accept its licence"),
        ("HFValidationError", "not a valid hub id"),
    ],
)
def test_refusals_of_the_first_question(monkeypatch, name, message):
    """Of a hub that refuses even the list of files, and of a name that it cannot have."""
    kind = getattr(huggingface_hub.errors, name)
    fault = kind("no") if name == "HFValidationError" else kind("no", response=Mock())
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", Mock(side_effect=fault))
    with pytest.raises(CheckpointError, match=rf"^some/model.*{message}"):
        resolve(REPO)


def test_offline_with_the_heads_that_were_cached(fake, monkeypatch):
    (fake.repos[REPO] / HEADS_NAME).write_bytes(b"heads")
    folder = resolve(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(REPO) == folder and (folder / HEADS_NAME).read_bytes() == b"heads"
