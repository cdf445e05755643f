"""What the clients' programs share: where the server is, what they ask, and a line for each check.

KVANT_URL is a server without a key, KVANT_KEYED_URL one that wants KVANT_KEY; run.py starts both and sets
them.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL, KEYED_URL, KEY = os.environ["KVANT_URL"], os.environ["KVANT_KEYED_URL"], os.environ["KVANT_KEY"]
MODEL = "pocket"
STORY = "Tell me a story about a fox named Pip."  # the greedy answer is about Pip
WEATHER = "What is the weather in Rome?"
TOOL_RESULT = "It is sunny."
# More than a page of 128 tokens, so that a second turn shares it.
LONG = " ".join(
    f"On day {day} the little fox went to the green wood and met a happy bear, and they played by the river."
    for day in range(1, 13)
)


class Animal(BaseModel):
    """A structure of bounded size: an answer under its schema ends by itself."""

    name: Literal["Pip", "Max", "Luna"]
    legs: Literal[2, 3, 4]  # clients drop the bounds of numbers
    happy: bool


NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}


def raises(kind: type[BaseException], call: Callable[[], object], *words: str) -> Any:
    """The error of this class that the call ends with; its text has all the words."""
    try:
        found = call()
    except kind as error:
        raised = error
    else:
        raise AssertionError(f"no {kind.__name__}, but {found!r:.300}")
    missing = [word for word in words if word not in str(raised)]
    assert not missing, f"the error lacks {missing}: {raised}"
    return raised


def until(holds: Callable[[], bool], seconds: float, wanted: str) -> None:
    """Wait for something; an AssertionError if it does not come."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {wanted}"
        time.sleep(0.02)


def main(program: dict[str, Any]) -> None:
    """Run every function of the program whose name begins with check_, and say how each ended."""
    failed = 0
    for name, check in list(program.items()):
        if not name.startswith("check_"):
            continue
        started = time.monotonic()
        try:
            check()
        except Exception as error:
            failed += 1
            text = "".join(traceback.format_exception(error, limit=-3))
            print(f"FAILED {name.removeprefix('check_')}\n{text}", flush=True)
        else:
            print(f"ok     {name.removeprefix('check_')} ({time.monotonic() - started:.1f} s)", flush=True)
    sys.exit(1 if failed else 0)
