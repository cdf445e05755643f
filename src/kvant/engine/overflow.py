"""What of a conversation stays when the context is full: the system prompt and the newest turns."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvant.text.prompt import Message

Overflow = Literal["forget", "stop"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages that end with a question, as the model is given them.

    Attributes:
        text: the rendered messages.
        ids: token ids of the text.
        answer: ids of an answer that was begun; they are fed after the text's.
    """

    messages: list[Message]
    text: str
    ids: list[int]
    answer: list[int]

    def __len__(self) -> int:
        return len(self.ids) + len(self.answer)


def questions(messages: Sequence[Message]) -> list[int]:
    """Where turns begin. A turn is a question and what follows until the next."""
    return [place for place, message in enumerate(messages) if message["role"] == "user"]


def newest_turns(messages: Sequence[Message], make: Callable[[list[Message]], Prompt], limit: int) -> Prompt:
    """The prompt of the newest turns, where all of them do not fit; what comes before the first turn stays.

    Half of what the last question leaves free is kept free. Every turn would forget something otherwise, and feed
    all others again.

    Args:
        messages: they end with a question.
        make: messages to their prompt.
        limit: tokens that fit.

    Returns:
        the prompt; of the last question alone where no more fits, and longer than ``limit`` where that does not fit.
    """
    starts = questions(messages)
    head = messages[: starts[0]]

    def without(turns: int) -> Prompt:
        return make([*head, *messages[starts[turns] :]])

    shortest = without(len(starts) - 1)
    wanted = (limit + len(shortest)) // 2
    if len(starts) < 3 or len(shortest) > limit:
        return shortest
    drops = range(1, len(starts) - 1)
    place = bisect_left(drops, True, key=lambda turns: len(without(turns)) <= wanted)
    return without(drops[place]) if place < len(drops) else shortest
