"""A model hub on 127.0.0.1: as much of the protocol as fetching files of one commit takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = {"main", "v1", COMMIT}


class Handler(BaseHTTPRequestHandler):
    """Serves the folders of `repositories` under their hub ids."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, Path]

    def do_HEAD(self) -> None:
        self.answer(send_body=False)

    def do_GET(self) -> None:
        self.answer(send_body=True)

    def answer(self, *, send_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/models/"):
            self.answer_api(path.removeprefix("api/models/"), send_body=send_body)
            return
        repository, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repository not in self.repositories:
            self.refuse("RepoNotFound", 401)
        elif revision not in REVISIONS:
            self.refuse("RevisionNotFound", 404)
        elif not (file := self.repositories[repository] / name).is_file():
            self.refuse("EntryNotFound", 404)
        else:
            self.send(file.read_bytes(), send_body=send_body)

    def answer_api(self, path: str, *, send_body: bool) -> None:
        repository = "/".join(path.split("/")[:2])
        rest = path.split("/")[2:]
        if repository not in self.repositories:
            self.refuse("RepoNotFound", 401)
            return
        files = sorted(file for file in self.repositories[repository].iterdir() if file.is_file())
        if rest[:1] == ["revision"] and rest[1] not in REVISIONS:
            self.refuse("RevisionNotFound", 404)
        elif rest[:1] == ["tree"]:
            listing = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": digest(file.read_bytes())}
                for file in files
            ]
            self.send(json.dumps(listing if len(rest) < 3 else []).encode(), send_body=send_body)
        else:
            info = {
                "id": repository,
                "modelId": repository,
                "sha": COMMIT,
                "siblings": [{"rfilename": file.name} for file in files],
                "tags": [],
            }
            self.send(json.dumps(info).encode(), send_body=send_body)

    def send(self, body: bytes, *, send_body: bool) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{digest(body)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def refuse(self, code: str, status: int) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        if code == "EntryNotFound":
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def digest(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@contextmanager
def serve(repositories: dict[str, Path]) -> Iterator[str]:
    """Serve folders as repositories; yields the endpoint."""
    handler = type("BoundHandler", (Handler,), {"repositories": repositories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
