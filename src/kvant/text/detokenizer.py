"""Token ids to text as they come: whole characters only. The interface is that of mlx-lm's streaming
detokenizers.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

UNKNOWN = "\ufffd"
SPACE = "▁".encode()


class StreamingDetokenizer(ABC):
    """Text of a growing sequence of token ids."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.text = ""  # the certain text so far
        self.tokens: list[int] = []  # the ids so far
        self.offset = 0

    @abstractmethod
    def add_token(self, token: int) -> None:
        """Take an id."""

    @abstractmethod
    def finalize(self) -> None:
        """Give out the text that was held back."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of UTF-8 that an id stands for; of a whole character, or of a part of one."""

    @property
    def last_segment(self) -> str:
        """The text since this was last asked for."""
        segment = self.text[self.offset :]
        self.offset = len(self.text)
        return segment


class ByteDetokenizer(StreamingDetokenizer):
    """For vocabularies whose tokens stand for bytes: byte-level ones, and those that fall back to bytes.

    The text is that of the tokenizer's ``decode`` for all ids, but for a run of byte tokens that is not UTF-8
    throughout. ``decode`` makes replacement characters of the whole run. Here its whole characters were given
    out.
    """

    def __init__(self, pieces: Sequence[str | None], *, byte_level: bool, strips: bool) -> None:
        """``pieces``: the vocabulary's strings by id; ``strips``: the first space goes."""
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
        held = b"" if is_bytes else self._decoder.getstate()[0]
        if held:  # bytes of a character that is not going to be whole
            self._decoder.reset()
        self._append(UNKNOWN * len(held) + self._decoder.decode(content))

    def finalize(self) -> None:
        held = self._decoder.getstate()[0]
        rest = self._decoder.decode(b"", final=True)
        self._append(rest if self._byte_level else UNKNOWN * len(held))

    def token_bytes(self, token: int) -> bytes:
        return self._content(token)[0]

    def _content(self, token: int) -> tuple[bytes, bool]:
        """Its bytes, and whether they may be a part of a character."""
        piece = self._pieces[token] if token < len(self._pieces) else None
        return _piece_bytes(piece or "", self._byte_level)

    def _append(self, text: str) -> None:
        if self._strip and text:
            text = text.removeprefix(" ")
            self._strip = False
        self.text += text


class WindowDetokenizer(StreamingDetokenizer):
    """For any tokenizer: decodes the last tokens again with each new one, and takes the text they gained."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._first = self._read = 0  # the first token decoded again; the first whose text is not out yet
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
    """The letters of byte-level vocabularies, GPT-2's: a byte that is a visible character stands for
    itself.
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTES = _table()


def _piece_bytes(piece: str, byte_level: bool) -> tuple[bytes, bool]:
    """The bytes, and whether they may be a part of a character; of a vocabulary with byte fallback those
    as <0xE2>.
    """
    if byte_level:  # one that has any other letter, such as an added one with a space, stands for itself
        found = [BYTES.get(letter, -1) for letter in piece]
        return piece.encode("utf-8", "replace") if -1 in found else bytes(found), True
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)]), True
        except ValueError:
            pass
    return piece.encode("utf-8", "replace").replace(SPACE, b" "), False
