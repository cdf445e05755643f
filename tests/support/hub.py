"""A hub on loopback that speaks enough of the protocol for huggingface_hub itself, and misbehaves when told to.

What it answers: a model's listing (/api/models/...?blobs=true), and its files (/owner/repository/resolve/...): small
ones directly, safetensors by a redirect to another host with X-Linked-Etag and X-Linked-Size, in ranges. Errors carry
X-Error-Code as the hub's do.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"


@dataclass
class Request:
    """One that came, the part of the file it asked for, and the login it brought."""

    method: str
    path: str
    range: str | None
    host: str
    login: str | None


@dataclass
class Repository:
    """Commits by digest, each its files by name; branches and tags by name."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]


@dataclass
class Hub:
    """What the server holds, what it was asked, and how it misbehaves.

    Attributes:
        refusal: status and X-Error-Code of the answer to every listing.
        file_refusal: the same of every file.
        sent: name -> the bytes sent instead of the listed ones.
        listed: name -> the size and digest listed instead of the true ones.
        cut: name -> after how many bytes the connection ends, once, or every time where ``always_cut`` is set.
        hold: name -> after how many bytes the server waits for ``release``, once; then ``held`` is set.
        entries: name -> what its entry of the listing has instead; a value of None is sent as null.
        listing: the bytes sent as every listing.
        etags: name -> the ETag and X-Linked-Etag sent.
        ranges: the Content-Range of every answer that has one, from {start}, {end} and {size}.
        whole: a range that is asked for is ignored.
        drip: name, or "listing" -> a piece that is sent again and again without end, and the seconds between.
        encodings: name -> the Content-Encoding it is said to have.
        elsewhere: name -> where it is redirected to.
        slow_head: seconds between the bytes of an answer's head, which never ends; 0: it is sent at once.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    file_refusal: tuple[int, str] | None = None
    sent: dict[str, bytes] = field(default_factory=dict)
    listed: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    always_cut: bool = False
    hold: dict[str, int] = field(default_factory=dict)
    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    listing: bytes | None = None
    etags: dict[str, str] = field(default_factory=dict)
    ranges: str = "bytes {start}-{end}/{size}"
    whole: bool = False
    drip: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    encodings: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    slow_head: float = 0.0
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cdn(self) -> str:
        """By another name: huggingface_hub follows a redirect to the hub's own when it asks for a file's facts."""
        return f"http://localhost:{self.port}"

    def add(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A commit on a branch; its digest."""
        content = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()}, sort_keys=True)
        commit = hashlib.sha1(content.encode()).hexdigest()
        held = self.repositories.setdefault(repository, Repository({}, {}))
        held.commits[commit] = files
        held.branches[branch] = commit
        return commit

    def fetched(self, name: str) -> list[Request]:
        """The downloads of a file, by its name or, of a large one, its digest."""
        digests = {
            hashlib.sha256(files[name]).hexdigest()
            for repository in self.repositories.values()
            for files in repository.commits.values()
            if name in files
        }
        ends = (f"/{name}", *(f"/cdn/{digest}/{name}" for digest in digests))
        large = name.endswith(LARGE)
        return [
            r for r in self.requests if r.method == "GET" and r.path.endswith(ends) and (not large or "/cdn/" in r.path)
        ]


def git_id(data: bytes) -> str:
    """The id git gives a blob, as `git hash-object` prints it."""
    return hashlib.sha1(b"blob " + str(len(data)).encode() + b"\0" + data).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """The hub, answering on a port of its own."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.release.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = (self.headers[name] for name in ("Range", "Host", "Authorization"))
        self.hub.requests.append(Request(self.command, path, *asked))
        parts = path.strip("/").split("/")
        if self.hub.slow_head:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
            self._endless(b"x", self.hub.slow_head)
        elif parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        elif parts[0] == "cdn":
            self._large(parts[1], "/".join(parts[2:]))
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
        else:
            self._refuse(404, "EntryNotFound")

    def _list(self, name: str, revision: str) -> None:
        repository = self.hub.repositories.get(name)
        if self.hub.refusal:
            return self._refuse(*self.hub.refusal)
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for file, data in repository.commits[commit].items():
            size, digest = self.hub.listed.get(file, (len(data), hashlib.sha256(data).hexdigest()))
            sibling = {"rfilename": file, "size": size, "blobId": git_id(data)}
            if file.endswith(LARGE):
                sibling["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append(sibling | self.hub.entries.get(file, {}))
        if "listing" in self.hub.drip:
            return self._drip("listing")
        answer = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}).encode()
        answer = answer if self.hub.listing is None else self.hub.listing
        return self._send(200, answer, {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str, body: bool) -> None:
        if self.hub.file_refusal:
            return self._refuse(*self.hub.file_refusal)
        data = self.hub.repositories[name].commits[revision][file]
        common = {"X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        if file in self.hub.elsewhere:
            return self._send(302, b"", common | {"Location": self.hub.elsewhere[file]})
        if file.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": self.hub.etags.get(file, f'"{digest}"'), "X-Linked-Size": str(len(data))}
            return self._send(302, b"", common | linked | {"Location": f"{self.hub.cdn}/cdn/{digest}/{file}"})
        if file in self.hub.drip:
            return self._drip(file)
        etag = {"ETag": self.hub.etags.get(file, f'"{git_id(data)}"')}
        if file in self.hub.encodings:
            etag["Content-Encoding"] = self.hub.encodings[file]
        return self._send(200, self.hub.sent.get(file, data), common | etag, body)

    def _large(self, digest: str, file: str) -> None:
        data = next(
            files[file]
            for repository in self.hub.repositories.values()
            for files in repository.commits.values()
            if file in files and hashlib.sha256(files[file]).hexdigest() == digest
        )
        data = self.hub.sent.get(file, data)
        if file in self.hub.drip:
            self._drip(file)
            return
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if self.headers["Range"] else 0
        start = 0 if self.hub.whole else start
        headers = {"ETag": self.hub.etags.get(file, f'"{digest}"')}
        if start >= len(data) > 0:
            self._refuse(416, "")
            return
        if start:
            headers["Content-Range"] = self.hub.ranges.format(start=start, end=len(data) - 1, size=len(data))
        self._start(206 if start else 200, len(data) - start, headers)
        rest = memoryview(data)[start:]
        if file in self.hub.cut:
            size = self.hub.cut[file] if self.hub.always_cut else self.hub.cut.pop(file)
            self.wfile.write(rest[:size])
            self.close_connection = True
        elif file in self.hub.hold:
            size = self.hub.hold.pop(file)
            self.wfile.write(rest[:size])
            self.wfile.flush()
            self.hub.held.set()
            self.hub.release.wait(60)
            self.close_connection = True
        else:
            self.wfile.write(rest)

    def _drip(self, file: str) -> None:
        """A body without a length and an end."""
        piece, pause = self.hub.drip[file]
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self._endless(piece, pause)

    def _endless(self, piece: bytes, pause: float) -> None:
        with contextlib.suppress(OSError):
            while not self.hub.release.wait(pause):
                self.wfile.write(piece)
        self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool = True) -> None:
        self._start(status, len(data), headers)
        if body and self.command == "GET":
            self.wfile.write(data)

    def _start(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
