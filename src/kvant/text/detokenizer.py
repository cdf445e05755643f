"""Decode token ids to text as they come, whole characters only, like mlx-lm's streaming detokenizers."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

UNKNOWN = "\ufffd"
SPACE = "▁".encode()


class StreamingDetokenizer(ABC):
    """Decode a growing sequence of token ids."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new sequence."""
        self.text = ""  # the certain text so far
        self.tokens: list[int] = []  # the ids so far
        self.offset = 0

    @abstractmethod
    def add_token(self, token: int) -> None:
        """Add an id."""

    @abstractmethod
    def finalize(self) -> None:
        """Append the pending text at the end of the sequence."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of an id, which may be only part of a character."""

    @property
    def last_segment(self) -> str:
        """The text since this property was last read."""
        segment = self.text[self.offset :]
        self.offset = len(self.text)
        return segment


class ByteDetokenizer(StreamingDetokenizer):
    """For vocabularies whose tokens stand for bytes: byte-level ones, and those with byte fallback.

    The text equals the tokenizer's ``decode`` of all ids, except for runs of byte tokens that are not valid
    UTF-8. ``decode`` replaces the whole run; here the run's complete characters have already been returned.
    """

    def __init__(self, pieces: Sequence[str | None], *, byte_level: bool, strips: bool) -> None:
        """``pieces``: the vocabulary's strings by id; ``strips``: drop the text's first space."""
        self._pieces = pieces
        self._byte_level = byte_level
        self._strips = strips
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = self._strips

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        content, is_bytes = self._content(token)
        incomplete = b"" if is_bytes else self._decoder.getstate()[0]
        if incomplete:  # bytes of a character that will not be completed
            self._decoder.reset()
        self._append(UNKNOWN * len(incomplete) + self._decoder.decode(content))

    def finalize(self) -> None:
        incomplete = self._decoder.getstate()[0]
        rest = self._decoder.decode(b"", final=True)
        self._append(rest if self._byte_level else UNKNOWN * len(incomplete))

    def token_bytes(self, token: int) -> bytes:
        return self._content(token)[0]

    def _content(self, token: int) -> tuple[bytes, bool]:
        """Return a token's bytes, and whether they may be part of a character."""
        piece = self._pieces[token] if token < len(self._pieces) else None
        return _piece_bytes(piece or "", self._byte_level)

    def _append(self, text: str) -> None:
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        self.text += text


class WindowDetokenizer(StreamingDetokenizer):
    """For any tokenizer: decode the last tokens again with each new one, and append what was added."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._first = self._read = 0  # first token to decode again; first token whose text is pending
        self._known = ""

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        longer = self._decode(self.tokens[self._first :])
        if len(longer) > len(self._known) and not longer.endswith(UNKNOWN):
            self._take(longer)

    def finalize(self) -> None:
        self._take(self._decode(self.tokens[self._first :]))

    def token_bytes(self, token: int) -> bytes:
        return self._decode([token]).encode()

    def _take(self, longer: str) -> None:
        self.text += longer[len(self._known) :]
        self._first = self._read
        self._read = len(self.tokens)
        self._known = self._decode(self.tokens[self._first : self._read])


def _table() -> dict[str, int]:
    """Return GPT-2's letters of byte-level vocabularies; bytes of visible characters stand for themselves."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTES = _table()


def _piece_bytes(piece: str, byte_level: bool) -> tuple[bytes, bool]:
    """Return a piece's bytes, and whether they may be part of a character, like byte fallback's <0xE2>."""
    if byte_level:  # a piece with any other letter, such as an added token with a space, is plain text
        values = [BYTES.get(letter, -1) for letter in piece]
        return piece.encode("utf-8", "replace") if -1 in values else bytes(values), True
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)]), True
        except ValueError:
            pass
    return piece.encode("utf-8", "replace").replace(SPACE, b" "), False
