"""A hub on the loopback: it tells the truth until an attack changes what it says or sends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote

from huggingface_hub import _snapshot_download, constants, utils

assert _snapshot_download  # It is imported here, so that the forks need not import it.
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some/model"


@dataclass
class File:
    """A file of the repository: what the API says of it, and what is sent."""

    content: bytes
    etag: str
    said: dict[str, Any]
    commit: str = COMMIT
    status: int = 200  # of the download
    cut: int | None = None  # after so many bytes the connection is closed

    @classmethod
    def honest(cls, name: str, content: bytes) -> File:
        git_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        said: dict[str, Any] = {"size": len(content), "blobId": git_id}
        if not name.endswith(".safetensors"):
            return cls(content, git_id, said)
        sha256 = hashlib.sha256(content).hexdigest()
        said["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        return cls(content, sha256, said)

    def in_tree(self, name: str) -> dict[str, Any]:
        """Return the entry of the API's other list, which has other keys."""
        entry = {"type": "file", "path": name, "oid": self.said["blobId"]}
        entry["size"] = self.said["size"]
        if lfs := self.said.get("lfs"):
            entry["lfs"] = {**lfs, "oid": lfs["sha256"]}
        return entry


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # A connection beyond the queue would wait for seconds.


class Hub:
    """The server of one repository. Attacks change `files`, `api`, `tree` and `errors`."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, File] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                self.files[name] = File.honest(name, path.read_bytes())
        self.api: dict[str, Any] = {"id": REPO, "sha": COMMIT}
        self.absent: set[str] = set()  # names that the tree does not list
        # What to answer instead: "api", "tree" or "file" -> status, headers, body.
        self.errors: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.sent: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with contextlib.suppress(OSError):
                    outer.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        send = partial(self.send, request)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree|/revision)?(/.+)?", path):
            kind = "tree" if match[2] == "/tree" else "api"
            if match[1] != REPO:
                send(401, {"X-Error-Code": "RepoNotFound"})
            elif kind in self.errors:
                send(*self.errors[kind])
            elif kind == "tree":
                entries = [file.in_tree(name) for name, file in self.files.items()]
                entries = [entry for entry in entries if entry["path"] not in self.absent]
                send(200, {}, json.dumps(entries).encode())
            else:
                listed = [{"rfilename": name, **file.said} for name, file in self.files.items()]
                send(200, {}, json.dumps({"siblings": listed} | self.api).encode())
            return
        match = re.fullmatch(rf"/{REPO}/resolve/[^/]+/(.+)", path)
        name = unquote(match[1]) if match else ""
        file = self.files.get(name)
        if file is None:
            send(404, {"X-Error-Code": "EntryNotFound"})
        elif "file" in self.errors:
            send(*self.errors["file"])
        else:
            self.sent += [name] if request.command == "GET" else []
            headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": file.commit}
            send(file.status, headers, file.content, file.cut)

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
        cut: int | None = None,
    ) -> None:
        request.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body[:cut])
        if cut is not None:
            request.close_connection = True


@contextlib.contextmanager
def loopback_hub(checkpoint: Path, cache: Path) -> Iterator[Hub]:
    """Yield a hub of the checkpoint, which this process uses with the cache."""
    hub = Hub(checkpoint)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    with (
        mock.patch.multiple(constants, **values),
        mock.patch.dict("os.environ", NO_PROXY="127.0.0.1"),
        mock.patch.object(time, "sleep"),  # huggingface_hub waits before it tries again
    ):
        utils.disable_progress_bars()
        yield hub
