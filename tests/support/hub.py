"""A hub on loopback that speaks enough of the protocol for huggingface_hub, and misbehaves when told to.

What it answers: a model's listing (/api/models/...?blobs=true), and its files
(/owner/repository/resolve/...): small ones directly, safetensors by a redirect to another host with
X-Linked-Etag and X-Linked-Size, in ranges. Errors carry X-Error-Code as the hub's do.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"
ENDLESS_BYTES = 100_000_000  # then it does end, for a test's sake


class Request(NamedTuple):
    """One that came, the part of the file it asked for, and the login it brought."""

    method: str
    path: str
    range: str | None
    host: str
    login: str | None


@dataclass
class Hub:
    """What the server holds, what it was asked, and how it misbehaves: for every listing, or by a file's
    name.
    """

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # repository, commit, name
    branches: dict[str, dict[str, str]] = field(default_factory=dict)  # repository, branch or tag
    requests: list[Request] = field(default_factory=list)
    refusal: tuple[int, str] | None = None  # status and X-Error-Code of every listing
    file_refusal: tuple[int, str] | None = None
    sent: dict[str, bytes] = field(default_factory=dict)  # instead of the listed ones
    # after so many it sets held, waits for release, hangs up, once
    hold: dict[str, int] = field(default_factory=dict)
    # of the listing; None is sent as null
    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    listing: bytes | None = None
    headers: dict[str, dict[str, str]] = field(default_factory=dict)  # in place of those sent with a file
    moved: set[str] = field(default_factory=set)  # files that a redirect leads to another place of the hub
    endless: set[str] = field(default_factory=set)  # files, "listing" or statuses, whose content does not end
    streamed: int = 0  # bytes of such content that were taken
    # it hangs up after so many, in turns, and knows no ranges
    cuts: dict[str, list[int]] = field(default_factory=dict)
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        content = json.dumps({name: sha256(data) for name, data in files.items()}, sort_keys=True)
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits.setdefault(repository, {})[commit] = files
        self.branches.setdefault(repository, {})[branch] = commit
        return commit

    def fetched(self, name: str) -> list[Request]:
        place = "cdn" if name.endswith(LARGE) else "resolve"
        return [
            r for r in self.requests if r.method == "GET" and r.path.endswith(f"/{name}") and place in r.path
        ]


def git_id(data: bytes) -> str:
    """The id git gives a blob, as `git hash-object` prints it."""
    return hashlib.sha1(b"blob " + str(len(data)).encode() + b"\0" + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
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
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = (self.headers[name] for name in ("Range", "Host", "Authorization"))
        self.hub.requests.append(Request(self.command, path, *asked))
        parts = path.removeprefix("/moved").strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        elif parts[0] == "cdn":
            self._large("/".join(parts[1:3]), *parts[3:])
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "")

    def _list(self, repository: str, revision: str) -> None:
        commits = self.hub.commits.get(repository)
        if self.hub.refusal:
            return self._refuse(*self.hub.refusal)
        if commits is None:
            return self._refuse(404, "RepoNotFound")
        commit = self.hub.branches[repository].get(revision, revision)
        if commit not in commits:
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for name, data in commits[commit].items():
            sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": git_id(data)}
            if name.endswith(LARGE):
                sibling["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            siblings.append(sibling | self.hub.entries.get(name, {}))
        answer = json.dumps({"id": repository, "sha": commit, "siblings": siblings, "tags": []}).encode()
        return self._send(200, answer if self.hub.listing is None else self.hub.listing, {}, of="listing")

    def _file(self, repository: str, commit: str, name: str) -> None:
        if self.hub.file_refusal:
            return self._refuse(*self.hub.file_refusal, self.hub.headers.get(name, {}))
        if name in self.hub.moved and not self.path.startswith("/moved"):
            return self._send(307, b"moved", {"Location": f"/moved{self.path}"})
        commit = self.hub.branches[repository].get(commit, commit)
        data = self.hub.commits[repository][commit][name]
        headers = {"X-Repo-Commit": commit}
        if name.endswith(LARGE):
            headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
            # By another name: huggingface_hub follows a redirect to the hub's own when it asks for a file's
            # facts.
            headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{repository}/{commit}/{name}"
            return self._send(302, b"", headers | self.hub.headers.get(name, {}))
        headers |= {"ETag": f'"{git_id(data)}"'} | self.hub.headers.get(name, {})
        return self._send(200, self.hub.sent.get(name, data), headers, of=name)

    def _large(self, repository: str, commit: str, name: str) -> None:
        data = self.hub.sent.get(name, self.hub.commits[repository][commit][name])
        if cuts := self.hub.cuts.get(name):
            return self._send(200, data, {}, cuts[len(self.hub.fetched(name)) % len(cuts)])
        start = (
            int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if self.headers["Range"]
            else 0
        )
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        end = self.hub.hold.pop(name, None)
        self._send(206 if start else 200, data[start:], headers, end, of=name)
        if end:
            self.wfile.flush()
            self.hub.held.set()
            self.hub.release.wait(60)
        return None

    def _refuse(self, status: int, code: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code} | dict(headers))

    def _send(
        self, status: int, data: bytes, headers: Mapping[str, str], end: int | None = None, of: str = ""
    ) -> None:
        """Answer with the first ``end`` bytes; without end if it is the content ``of`` what is endless."""
        endless = not self.hub.endless.isdisjoint({of, str(status)})
        length = {"Connection": "close"} if endless else {"Content-Length": str(len(data))}
        self.send_response(status)
        for name, value in (dict(headers) | length).items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = endless or end is not None
        if self.command != "GET":
            return
        if not endless:
            self.wfile.write(data[:end])
            return
        with contextlib.suppress(OSError):  # the other side hangs up
            while self.hub.streamed < ENDLESS_BYTES:
                self.hub.streamed += self.wfile.write(data * (1 + 100_000 // len(data)))
