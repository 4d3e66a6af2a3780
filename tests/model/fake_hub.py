"""A Hugging Face hub on 127.0.0.1: the endpoints that huggingface_hub uses, and every way in which they can fail."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]

    @property
    def range_start(self) -> int | None:
        found = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("range", ""))
        return int(found[1]) if found else None


@dataclass
class FakeHub:
    """`repos` has the contents of each file by repository; files over 100 bytes count as LFS files.

    drop_after       end the connection after this many bytes of a file, in this many answers (`drops`)
    stated_sha256    said of every LFS file in place of the right one
    listing_details  whether the listing has sizes and digests, or leaves them to the headers of each file
    ranges           whether Range is heeded
    status           answer everything so: (status, X-Error-Code); file_status: every file
    cdn              where downloads are redirected to
    """

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    drop_after: int = 0
    drops: int = 0
    stated_sha256: str | None = None
    listing_details: bool = True
    ranges: bool = True
    status: tuple[int, str] | None = None
    file_status: tuple[int, str] | None = None
    cdn: str | None = None

    def downloads(self, name: str) -> list[Request]:
        """The GET requests for one file."""
        return [request for request in self.requests if request.method == "GET" and request.path.endswith(f"/{name}")]

    def listing(self, repo: str) -> dict:
        siblings = []
        for name, content in self.repos[repo].items():
            entry = {"rfilename": name}
            if self.listing_details:
                entry |= {"size": len(content), "blobId": git_blob(content)}
                if is_lfs(content):
                    entry["lfs"] = {"sha256": self.sha256(content), "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings}

    def sha256(self, content: bytes) -> str:
        return self.stated_sha256 or hashlib.sha256(content).hexdigest()


def is_lfs(content: bytes) -> bool:
    return len(content) > 100


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub, answering at `hub.url`."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        hub.requests.append(Request(self.command, path, headers))
        if hub.status is not None:
            return self._refuse(*hub.status)
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path)
        if listing:
            if listing[1] not in hub.repos:
                return self._refuse(401 if "authorization" not in headers else 404, "RepoNotFound")
            return self._send(json.dumps(hub.listing(listing[1])).encode(), {"Content-Type": "application/json"})
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not file or file[1] not in hub.repos:
            return self._refuse(404, "RepoNotFound")
        if hub.file_status is not None:
            return self._refuse(*hub.file_status)
        content = hub.repos[file[1]].get(file[3])
        if content is None:
            return self._refuse(404, "EntryNotFound")
        if hub.cdn and self.command == "GET":
            return self._send(b"", {"Location": f"{hub.cdn}{path}"}, status=302)
        self._send_file(content, headers)

    def _send_file(self, content: bytes, headers: dict[str, str]) -> None:
        etag = self.hub.sha256(content) if is_lfs(content) else git_blob(content)
        answer = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if is_lfs(content):
            answer |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        requested = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if requested and self.hub.ranges:
            start = int(requested[1])
            answer["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(content[start:], answer, status=206)
        self._send(content, answer)

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": f"refused: {code}"}, status=status)

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.command == "HEAD":
            return
        hub = self.hub
        if "ETag" in headers and hub.drops > 0:
            hub.drops -= 1
            body = body[: hub.drop_after]
        self.wfile.write(body)
