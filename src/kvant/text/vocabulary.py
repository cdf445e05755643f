"""The bytes that the strings of a vocabulary stand for."""

from collections.abc import Sequence

SPACE = "▁".encode()


def _table() -> dict[str, int]:
    """The letters of byte-level vocabularies, GPT-2's: a byte that is a visible character stands for itself."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTES = _table()


def token_bytes(pieces: Sequence[str | None], *, byte_level: bool) -> list[bytes]:
    """The bytes that each of a vocabulary's strings stands for; none for an id that it does not have."""
    if byte_level:
        return [byte_level_bytes(piece or "") for piece in pieces]
    return [byte_fallback_bytes(piece or "")[0] for piece in pieces]


def byte_level_bytes(piece: str) -> bytes:
    """A token that has any other letter, such as an added one with a space, stands for itself."""
    found = [BYTES.get(letter) for letter in piece]
    return piece.encode("utf-8", "replace") if None in found else bytes(byte for byte in found if byte is not None)


def byte_fallback_bytes(piece: str) -> tuple[bytes, bool]:
    """The bytes, and whether they are one of those a character may be made of, written <0xE2>."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)]), True
        except ValueError:
            pass
    return piece.encode("utf-8", "replace").replace(SPACE, b" "), False
