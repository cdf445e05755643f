"""``--prompt-cache-file``: save the cache at the end of one command for the start of the next."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvant.cache import ModelCache
from kvant.cache.snapshot import read_header
from kvant.cli.terminal import say
from kvant.engine.conversation import KEY, Conversation
from kvant.errors import SnapshotError


def check(path: str | None) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if path is None:
        return
    if not Path(path).parent.is_dir():
        raise SnapshotError(f"{path}: cannot be written: the folder does not exist")
    if Path(path).is_dir():
        raise SnapshotError(f"{path}: a folder; expected a file")


def take(path: str | None, cache: ModelCache, ids: Sequence[int], *, quiet: bool) -> list[int]:
    """Load the file if it exists, and reuse a common beginning; return the ids to feed, at least one."""
    if path is None or not Path(path).exists():
        return list(ids)
    if KEY in read_header(Path(path)).metadata:
        raise SnapshotError(f"{path}: contains a conversation; kvant chat --prompt-cache-file continues it")
    cache.load(path)
    reused = cache.keep_common(ids)
    say(f"prompt cache: {reused} of the prompt's {len(ids)} tokens are in {path}", quiet)
    return list(ids[reused:])


def tokens_in(path: str | None) -> int:
    """Return the number of tokens in the file; 0 if there is none."""
    return read_header(Path(path)).length if path is not None and Path(path).exists() else 0


@contextmanager
def persisted(
    path: str | None, conversation: Conversation, system_prompt: str | None, *, quiet: bool
) -> Iterator[None]:
    """Load a conversation from the file if it exists, and save it after the block, however that ends."""
    if path is None:
        yield
        return
    if Path(path).exists():
        conversation.load(path)
        if system_prompt is not None:
            conversation.set_system_prompt(system_prompt)
        say(f"prompt cache: loaded {len(conversation.messages)} messages from {path}", quiet)
    try:
        yield
    finally:
        if conversation.messages or Path(path).exists():
            _save(conversation, path)


def _save(conversation: Conversation, path: str) -> None:
    """Save the conversation; if that fails, ask a user at a terminal for another path."""
    try:
        return conversation.save(path)
    except SnapshotError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        problem = str(error)
        while problem:
            print(
                f"{problem}\nsave the conversation where? (empty: do not save) ",
                end="",
                file=sys.stderr,
                flush=True,
            )
            path = os.path.expanduser(sys.stdin.readline().strip())
            if not path:
                raise
            problem = f"{path} exists already" if os.path.lexists(path) else ""
        return _save(conversation, path)
