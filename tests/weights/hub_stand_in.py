"""A stand-in for the hub: the part of its interface that a download uses, serving a folder from this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as `owner/name`; the address, and the requests as they come."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            requests.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            for name, folder in repositories.items():
                for revision in ("main", "v1", COMMIT):
                    if path == f"/api/models/{name}/revision/{revision}":
                        files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(folder.iterdir())]
                        return self.send(
                            json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode(), {}, with_body
                        )
                    if path == f"/api/models/{name}/tree/{revision}":
                        files = [
                            {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": COMMIT}
                            for p in sorted(folder.iterdir())
                        ]
                        return self.send(json.dumps(files).encode(), {}, with_body)
                    start = f"/{name}/resolve/{revision}/"
                    if path.startswith(start) and (folder / path[len(start) :]).is_file():
                        content = (folder / path[len(start) :]).read_bytes()
                        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                        return self.send(content, headers, with_body)
            self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, with_body, 404)

        def send(self, content: bytes, headers: dict[str, str], with_body: bool, status: int = 200) -> None:
            self.send_response(status)
            for key, value in {
                "Content-Length": str(len(content)),
                "Content-Type": "application/json",
                **headers,
            }.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
