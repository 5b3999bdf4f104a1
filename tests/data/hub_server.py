"""A server that speaks the part of the Hugging Face hub's protocol that fetching a data set needs, faults included."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"


class Hub:
    """Serves `files` (path -> bytes) of one data set repository.

    Attributes:
        cut: path -> bytes after which the first answer with the file's content breaks off.
        listed_sizes: path -> size that the listing states instead of the true one.
        fetched: per path, the ranges that were asked for (None: the whole file).
        busy, most_busy: answers with content under way, now and at most.
    """

    def __init__(self, repository: str, files: dict[str, bytes]):
        self.repository, self.files = repository, dict(files)
        self.cut: dict[str, int] = {}
        self.listed_sizes: dict[str, int] = {}
        self.fetched: dict[str, list[str | None]] = {}
        self.requests: Counter = Counter()
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.gate: threading.Barrier | None = None
        self.held: str | None = None  # a file of which nothing is sent until `let_go`, and then nothing either
        self.let_go = threading.Event()

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub._answer(self, body=True)

            def do_HEAD(self):
                hub._answer(self, body=False)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests[path.split("/resolve/")[0]] += 1
        api = f"/api/datasets/{self.repository}"
        resolve = f"/datasets/{self.repository}/resolve/"
        if path in (api, f"{api}/revision/main"):
            self._send_json(request, {"id": self.repository, "sha": COMMIT, "siblings": [], "tags": []}, body)
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            self._send_json(request, self._tree(), body)
        elif path.startswith(resolve) and path.removeprefix(resolve).split("/", 1)[1] in self.files:
            self._send_file(request, path.removeprefix(resolve).split("/", 1)[1], body)
        else:
            self._send_json(request, {"error": "not found"}, body, 404)

    def _tree(self) -> list[dict]:
        entries = [{"type": "directory", "oid": 40 * "1", "size": 0, "path": "data"}]
        for path, content in self.files.items():
            size = self.listed_sizes.get(path, len(content))
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
            entries.append({"type": "file", "oid": 40 * "2", "size": size, "path": path, "lfs": lfs})
        return entries

    def _send_json(self, request, value, body: bool, status: int = 200) -> None:
        data = json.dumps(value).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if body:
            request.wfile.write(data)

    def _send_file(self, request, path: str, body: bool) -> None:
        content = self.files[path]
        asked = request.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked and body else 0
        request.send_response(206 if start else 200)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(content) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if not body:
            return
        with self.lock:
            self.fetched.setdefault(path, []).append(asked)
            end = self.cut.pop(path, len(content))
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        try:
            if self.gate is not None:
                self.gate.wait(20)
            if path == self.held:
                self.let_go.wait(60)
                request.close_connection = True
                return
            request.wfile.write(content[start:end])
            request.wfile.flush()
            if end < len(content):
                request.close_connection = True
                request.connection.shutdown(2)
        finally:
            with self.lock:
                self.busy -= 1
