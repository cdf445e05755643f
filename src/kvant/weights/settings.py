"""huggingface_hub's settings. kvant keeps them: the cache, the hub, how long to wait for it."""

import os
from pathlib import Path
from types import ModuleType

from kvant.errors import WeightsError

SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")  # huggingface_hub fails on its import where one is odd
MAX_SECONDS = 86_400


def cache_folder() -> Path:
    """The folder of huggingface_hub's downloads: HF_HUB_CACHE, else under HF_HOME, else its default."""
    return Path(_constants().HF_HUB_CACHE).expanduser().resolve()


def repository_folder(repository: str) -> Path:
    """A repository's place in that cache."""
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT, or its default."""
    return str(_constants().ENDPOINT)


def timeout_s() -> float:
    """Seconds to wait for a connection, or for the next bytes of one."""
    return float(_constants().HF_HUB_DOWNLOAD_TIMEOUT)


def login() -> str | None:
    """The user's token, of `hf auth login` or HF_TOKEN, unless HF_HUB_DISABLE_IMPLICIT_TOKEN keeps it here."""
    if _constants().HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    from huggingface_hub import get_token

    return get_token()


def links_allowed() -> bool:
    """Whether a snapshot's files may be links: HF_HUB_DISABLE_SYMLINKS."""
    return not _constants().HF_HUB_DISABLE_SYMLINKS


def _constants() -> ModuleType:
    """huggingface_hub's own module of settings. The import takes a tenth of a second, so it comes late.

    Raises:
        WeightsError: a variable that it cannot read.
    """
    for name in SECONDS:
        text = os.environ.get(name)
        if text is not None and not _is_seconds(text):
            raise WeightsError(f"{name} is {text[:80]!r}; expected a whole number of seconds, at most {MAX_SECONDS}")
    from huggingface_hub import constants

    return constants


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= int(text) <= MAX_SECONDS
    except ValueError:
        return False
