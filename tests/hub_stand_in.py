"""A small stand-in for the Hugging Face hub on the loopback interface: one repository and its files."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the hub has and how it misbehaves. `requests` are method and path, in order."""

    repository: str
    files: dict[str, bytes]
    endpoint: str = ""
    status: int = 200  # of every answer, where it is not 200
    error_code: str = ""  # the hub's X-Error-Code
    cut_after: int | None = None  # bytes of the first body sent before the connection is dropped
    requests: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """Answers for the hub of its server: the API's model page, and the files with HEAD, GET and ranges."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub = self.server.hub
        path = urlsplit(self.path).path
        hub.requests.append((self.command, path))
        if hub.status != 200:
            self.send(b"{}", hub.status, {"X-Error-Code": hub.error_code})
        elif path == f"/api/models/{hub.repository}":
            self.send(model_info(hub).encode(), 200, {"Content-Type": "application/json"})
        elif path.startswith(prefix := f"/{hub.repository}/resolve/main/") and path[len(prefix) :] in hub.files:
            self.send_file(hub.files[path[len(prefix) :]])
        else:
            known = path.startswith(f"/{hub.repository}/")
            self.send(b"", 404, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

    def send_file(self, content):
        hub = self.server.hub
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        asked = self.headers.get("Range")
        if self.command == "GET":
            hub.ranges.append(asked)
        if asked is None:
            return self.send(content, 200, headers)
        begin = int(asked.removeprefix("bytes=").split("-")[0])
        headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        return self.send(content[begin:], 206, headers)

    def send(self, body, status, headers):
        hub = self.server.hub
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = hub.cut_after if headers.get("ETag") else None
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            hub.cut_after = None
            self.close_connection = True

    def log_message(self, *_): ...


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` while the block runs; its endpoint is filled in."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.hub = hub
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def model_info(hub: Hub) -> str:
    siblings = [{"rfilename": name, "size": len(content)} for name, content in hub.files.items()]
    return json.dumps({"_id": "1", "id": hub.repository, "sha": COMMIT, "siblings": siblings})
