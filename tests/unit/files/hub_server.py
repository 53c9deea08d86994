"""A Hugging Face hub of one's own, as much of its HTTP interface as huggingface_hub asks for when it fetches a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34


@dataclass
class HubServer:
    url: str
    served: list[str] = field(default_factory=list)
    """Files whose content was sent."""


@contextmanager
def hub_server(repo: str, files: dict[str, bytes]) -> Iterator[HubServer]:
    """Serve one repository; `org/gated` asks for consent, every other name is unknown."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:  # the base class's name
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            api, resolve = f"/api/models/{repo}", f"/{repo}/resolve/{COMMIT}/"
            if path == api or path == f"{api}/revision/{COMMIT}":
                self.answer(200, json.dumps(described(repo, files)).encode())
            elif path.startswith(f"{api}/tree/{COMMIT}"):
                self.answer(200, json.dumps([entry(name, content) for name, content in files.items()]).encode())
            elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                name = path.removeprefix(resolve)
                if self.command == "GET":
                    server.served.append(name)
                self.answer(200, files[name], ETag=f'"{oid(files[name])}"')
            elif path.startswith("/api/models/org/gated"):
                self.answer(403, b"{}", **{"X-Error-Code": "GatedRepo"})
            else:
                self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = HubServer(f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def described(repo: str, files: dict[str, bytes]) -> dict[str, object]:
    return {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files], "private": False}


def entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": oid(content)}


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
