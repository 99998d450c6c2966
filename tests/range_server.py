"""The hub of `hub_server` with byte ranges: what is sent is counted, and files may lie at another address."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hub_server import COMMIT, REVISIONS, Handler


@dataclass
class Served:
    """What a server was asked for.

    Attributes:
        endpoint: Where it listens.
        sent: Bytes of file content sent, by file name.
        requests: Requests for file content.
    """

    endpoint: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class RangeHandler(Handler):
    """Sends parts of files; with `redirects` from another address, with `ignores_ranges` whole files instead."""

    served: Served
    ignores_ranges = False
    redirects = False
    fails_once = False

    def answer(self, *, send_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        stored = path.startswith("stored/")
        repository, _, rest = path.removeprefix("stored/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        file = self.repositories.get(repository, Path("/nowhere")) / name
        if path.startswith("api/") or revision not in REVISIONS or not file.is_file():
            super().answer(send_body=send_body)
        elif self.redirects and not stored:
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/stored/{path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.fails_once and self.take_failure():
            self.refuse("", 503)
        else:
            self.send_part(file, send_body=send_body)

    def take_failure(self) -> bool:
        with self.served.lock:
            type(self).fails_once = False
        return True

    def send_part(self, file: Path, *, send_body: bool) -> None:
        size = file.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if self.ignores_ranges:
            match, begin, end = None, 0, size
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"etag"')
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if not send_body:
            return
        with self.served.lock:
            self.served.requests += 1
        with file.open("rb") as stream:
            stream.seek(begin)
            while begin < end and (part := stream.read(min(1 << 16, end - begin))):
                try:
                    self.wfile.write(part)
                except OSError:  # the client has seen enough
                    return
                begin += len(part)
                with self.served.lock:
                    self.served.sent[file.name] = self.served.sent.get(file.name, 0) + len(part)


@contextmanager
def serve_ranges(repositories: dict[str, Path], **behaviour: bool) -> Iterator[Served]:
    """Serve folders as repositories; yields what is counted.

    Args:
        repositories: Folders by hub id.
        **behaviour: ``ignores_ranges``, ``redirects``, ``fails_once``.
    """
    served = Served()
    handler = type("BoundRangeHandler", (RangeHandler,), {"repositories": repositories, "served": served} | behaviour)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
