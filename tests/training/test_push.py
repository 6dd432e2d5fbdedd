"""The export is sent to a hub on the loopback."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from ligermodels.errors import ConfigError, SaveError
from ligermodels.training.reports import check_login, push
from tests.training.tiny_run import run


class Hub(BaseHTTPRequestHandler):
    """Knows one user, and takes the files of commits."""

    def do_GET(self):
        if self.path == "/api/whoami-v2" and self.headers["Authorization"] == "Bearer hf_right":
            return self.send({"type": "user", "name": "me"})
        return self.send({"error": "Invalid credentials"}, 401)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        if self.path == "/api/repos/create":
            server.created.append(json.loads(body))
            return self.send({"url": f"{server.url}/me/tiny", "id": "me/tiny", "name": "me/tiny"})
        if self.path == "/api/models/me/tiny/preupload/main":
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return self.send({"files": files})
        if self.path == "/api/models/me/tiny/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = line["value"]
                    server.files[file["path"]] = base64.b64decode(file["content"])
            return self.send({"commitUrl": f"{server.url}/me/tiny/commit/1", "commitOid": "1" * 40})
        return self.send({"error": "You have no right to write here"}, 403)

    def send(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.created, server.files = [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield server
    server.shutdown()


def test_a_run_is_pushed_at_its_end(hub, checkpoint, text, tmp_path):
    given = {"max_steps": 1, "push_to_hub": "me/tiny", "hub_private_repo": True}
    done = run(checkpoint, text, tmp_path / "run", **given)
    assert hub.created[0]["name"] == "tiny" and "private" in hub.created[0].values()
    local = {path.name: path.read_bytes() for path in done.model_dir.iterdir() if path.is_file()}
    assert hub.files == local and "model.safetensors" in local
    assert any(note == f"pushed to {hub.url}/me/tiny" for note in done.notes)


def test_nobody_logged_in_is_found_before_the_run(hub, checkpoint, text, tmp_path, monkeypatch):
    check_login()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="push_to_hub: the hub does not say who is logged in"):
        run(checkpoint, text, tmp_path / "run", push_to_hub="me/tiny")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_pushed_stays(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hub.RequestHandlerClass = type(
        "Refuses", (Hub,), {"do_POST": lambda self: self.send({"error": "no"}, 403)}
    )
    with pytest.raises(SaveError, match=rf"push_to_hub: me/tiny: .*; the model is in {tmp_path}"):
        push(tmp_path, "me/tiny", private=False)
