"""A hub of our own on the loopback, spoken to by the real huggingface_hub."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ligermodels.converters import hub
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError

from .conftest import TOKENIZER

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some/model"


class FakeHub:
    """Serves the files of `repos` (name -> folder) as the hub's API does, and keeps a log."""

    def __init__(self):
        self.repos: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.log: list[str] = []
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


@pytest.mark.parametrize(
    "name",
    ["/no/where", "./absent", "../a/b", "a/b/c", "~/absent/x", "a b"]
    + ["~nobody-of-this-name/x", "x" * 200, "a/" * 3000, "a\0b", "a\nb", "\ud800"],
)
def test_what_cannot_be_an_id_is_an_absent_folder(name):
    with pytest.raises(CheckpointError, match="there is no such folder, and the name is not a"):
        resolve(name)


def test_no_name_is_not_the_current_folder():
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve("")


def test_a_file_is_not_a_folder(make):
    folder, _ = make()
    with pytest.raises(CheckpointError, match="is a file; pass the folder"):
        resolve(folder / "config.json")


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
    resolutions = [line for line in fake.log if re.search(r"models/some/model($|/revision)", line)]
    assert len(resolutions) == 1
    ours = [line for line in fake.log if REPO in line]
    assert [line for line in ours if COMMIT not in line] == resolutions


def test_without_weights_only_small_files_come(fake):
    folder = resolve(REPO, weights=False)
    assert {p.name for p in folder.iterdir()} == {"config.json", *TOKENIZER} == fake.fetched()


def test_additional_chat_templates_come_too(fake):
    templates = fake.repos[REPO] / "additional_chat_templates"
    (templates / "deeper").mkdir(parents=True)
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "deeper" / "no.jinja").write_text("")
    found = resolve(REPO) / "additional_chat_templates"
    assert [p.relative_to(found).as_posix() for p in found.rglob("*")] == ["tool_use.jinja"]


def test_what_is_cached_is_not_fetched_again(fake):
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


def test_offline_and_not_or_half_cached(fake, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set, and nothing .* unset") as e:
        resolve(REPO)
    assert "pass the path of a local folder" in str(e.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    resolve(REPO, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the cached copy is incomplete; unset HF_HUB_OFF"):
        resolve(REPO)


def test_no_connection_and_nothing_cached(fake, monkeypatch):
    point_at(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"^some/model: .* no connection .* connect to downl"):
        resolve(REPO)


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


def test_a_broken_download_says_so(fake, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(CheckpointError, match=r"could not be downloaded: .*No space left"):
        resolve(REPO)


def test_a_progress_bar_shows(fake, capfd):
    huggingface_hub.utils.enable_progress_bars()  # other tests silence transformers, and it this
    resolve(REPO)
    assert "Fetching" in capfd.readouterr().err


def test_hub_ids():
    for name in ("gpt2", "meta-llama/Llama-3.2-1B", "a_b/c.d-e"):
        assert hub._REPO_ID.fullmatch(name)
