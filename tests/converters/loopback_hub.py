"""A hub on the loopback, for the real huggingface_hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

from huggingface_hub import constants, utils

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some/model"


@dataclass
class File:
    """A file of the repository."""

    content: bytes

    @property
    def etag(self) -> str:
        return hashlib.sha1(self.content).hexdigest()


class Hub:
    """The server of one repository.

    Attributes: files are what it has; answer replaces the API's answer (status, headers,
        body); gated refuses each download; asked, sent and tokens are what clients asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, File] = {}
        self.read(folder)
        self.answer: tuple[int, dict[str, str], bytes] | None = None
        self.gated = False
        self.asked: list[str] = []
        self.sent: list[str] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with contextlib.suppress(OSError):
                    hub.handle(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def read(self, folder: Path) -> None:
        """Serve the files of a folder."""
        self.files.clear()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                self.files[name] = File(path.read_bytes())

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(request.path.partition("?")[0])
        self.tokens.add(request.headers.get("Authorization"))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.asked.append(path)
            listed = [{"rfilename": name} for name in self.files]
            answer = 200, {}, json.dumps({"siblings": listed, "id": REPO, "sha": COMMIT}).encode()
            if self.answer is not None:
                answer = self.answer
            elif match[1] != REPO:
                answer = 401, {"X-Error-Code": "RepoNotFound"}, b""
            elif match[2] not in (None, "main", COMMIT):
                answer = 404, {"X-Error-Code": "RevisionNotFound"}, b""
            return self.send(request, *answer)
        if path == f"/api/models/{REPO}/tree/{COMMIT}":
            listed = [
                {"type": "file", "path": name, "size": len(file.content), "oid": file.etag}
                for name, file in self.files.items()
            ]
            return self.send(request, 200, {}, json.dumps(listed).encode())
        match = re.fullmatch(rf"/{REPO}/resolve/[^/]+/(.+)", path)
        file = self.files.get(match[1]) if match else None
        if self.gated:
            self.send(request, 403, {"X-Error-Code": "GatedRepo"}, b"")
        elif match is None or file is None:
            self.send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"")
        else:
            self.sent += [match[1]] if request.command == "GET" else []
            headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": COMMIT}
            self.send(request, 200, headers, file.content)

    def send(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes
    ) -> None:
        request.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@contextlib.contextmanager
def loopback_hub(folder: Path, cache: Path) -> Iterator[Hub]:
    """Serve a checkpoint as the only hub that huggingface_hub knows, with an empty cache."""
    hub = Hub(folder)
    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    with (
        mock.patch.multiple(constants, **values),
        mock.patch.dict("os.environ", NO_PROXY="127.0.0.1"),
        mock.patch("time.sleep"),  # huggingface_hub waits before it tries again
    ):
        utils.disable_progress_bars()
        yield hub
    hub.server.shutdown()
    hub.server.server_close()
