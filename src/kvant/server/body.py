"""A request's body as a typed structure; what is wrong with it is a 400 that names the field."""

import re
from typing import TypeVar

import msgspec

from kvant.server.errors import ApiError

T = TypeVar("T")


class Fields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Base of all bodies: a field that is not declared is refused by name."""


def decode(body: bytes, kind: type[T]) -> T:
    """A JSON body as ``kind``.

    Raises:
        ApiError: 400: not JSON, a field that is not known, one that is missing, or one of another type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        field = re.search(r"(?:unknown|required) field `([^`]*)`", text)
        place = re.search(r" - at `\$\.?([^`]*)`", text)
        names = [found[1] for found in (place, field) if found]
        raise ApiError(text, param=".".join(names) or None) from error
