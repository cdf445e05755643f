"""Server-Sent Events: bytes as they arrive to the data of each event (WHATWG HTML, section 9.2)."""

import re
from collections.abc import Iterable, Iterator

from kvant.errors import KvantError

MAX_EVENT_BYTES = 1024 * 1024
DONE = "[DONE]"  # the last data of OpenAI's streams
# A carriage return at the end of what has arrived may be the first half of a line's end.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_BOM = b"\xef\xbb\xbf"


def events(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Each event's kind and data as soon as its last byte is there; ``[DONE]`` without waiting for the blank line.

    Args:
        chunks: the bytes, however cut. An event the stream ends within is dropped.

    Returns:
        ("message", data), or the kind the server names; ("error", text) also for a field ``error``.

    Raises:
        KvantError: a line or an event of more than a megabyte.
    """
    kind, size = "message", 0
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield kind, "\n".join(data)
            kind, data, size = "message", [], 0
            continue
        name, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        size += len(line)
        if size > MAX_EVENT_BYTES:
            raise KvantError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        if name == "data" and value == DONE and not data:
            yield kind, DONE
        elif name == "data":
            data.append(value)
        elif name == "event":
            kind = value or "message"
        elif name == "error":  # no field of the standard; llama-server has used it
            yield "error", value


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends: CR LF, LF or CR."""
    rest, bom = b"", _BOM
    for chunk in chunks:
        *lines, rest = _LINE_END.split(rest + chunk)
        if len(rest) > MAX_EVENT_BYTES:
            raise KvantError(f"the server sent a line of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            yield line.removeprefix(bom)
            bom = b""
    if rest:  # the last line may lack its end; it may be [DONE]
        yield rest.rstrip(b"\r")
