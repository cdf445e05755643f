"""How long answers may be, where they end, and how many there are: checked alike for every interface."""

from collections.abc import Sequence

from kvant.server.errors import ApiError
from kvant.server.service import Service

MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # texts of stop, and characters of one


def max_tokens(given: int | None, name: str = "max_tokens") -> int | None:
    """The tokens of an answer; None: as many as there is room for.

    Raises:
        ApiError: 400: less than one.
    """
    if given is not None and given < 1:
        raise ApiError(f"{name} is {given}; expected at least 1", param=name)
    return given


def stops(given: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """The texts that end an answer.

    Raises:
        ApiError: too many, or one that is empty or too long.
    """
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > MAX_STOPS:
        raise ApiError(f"{name} has {len(found)} texts; expected at most {MAX_STOPS}", param=name)
    for text in found:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            expected = f"expected 1 to {MAX_STOP_LENGTH}"
            raise ApiError(f"{name} has a text of {len(text)} characters; {expected}", param=name)
    return found


def number_of_answers(n: int | None, service: Service) -> int:
    """How many answers.

    Raises:
        ApiError: more than run at once.
    """
    if n is None:
        return 1
    most = service.settings.sequences
    if not 1 <= n <= most:
        raise ApiError(f"n is {n}; expected 1 to {most}, the sequences of this server", param="n")
    return n
