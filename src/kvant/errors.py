"""Every error kvant raises on purpose.

KvantError
 +-- ModelError        a model folder that cannot be loaded: missing, unsupported or malformed
 |    +-- CheckpointError   its tensors: truncated, missing, of the wrong shape or dtype
 |    +-- WeightsError      a model of the hub that is not here, cannot be had, or is not what it should be
 +-- ContextError      a prompt or a conversation that does not fit the reserved context (also a ValueError)
 +-- PromptError       a prompt that cannot be used: empty, or a chat template that fails (also a ValueError)
 +-- BenchError        a measurement that could not be made: an engine that failed
 +-- ConvertError      a model that could not be converted

Wrong arguments of a function are plain ValueError and TypeError.
"""

__all__ = [
    "BenchError",
    "CheckpointError",
    "ContextError",
    "ConvertError",
    "KvantError",
    "ModelError",
    "PromptError",
    "WeightsError",
    "foreign",
    "one_line",
]

MAX_MESSAGE = 1000  # characters


class KvantError(Exception):
    """Base of every error kvant raises on purpose; its text is one line made for a person.

    What it quotes may be anybody's: characters that a terminal would obey are written as Python escapes, and a text
    that is too long is cut.
    """

    def __init__(self, message: str = "") -> None:
        text = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        if not text.isprintable():
            text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        super().__init__(text)


class ModelError(KvantError):
    """A model folder that cannot be loaded."""


class CheckpointError(ModelError):
    """Tensors that are truncated, missing, or of the wrong shape or dtype."""


class WeightsError(ModelError):
    """A model of the hub that is not here, cannot be had, or whose files are not those it should have."""


class ContextError(KvantError, ValueError):
    """A prompt or a conversation that does not fit the reserved context."""


class PromptError(KvantError, ValueError):
    """A prompt that cannot be used."""


class BenchError(KvantError):
    """A measurement that could not be made."""


class ConvertError(KvantError):
    """A model that could not be converted."""


def one_line(error: BaseException) -> str:
    """The first line of another library's error, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def foreign(error: BaseException) -> bool:
    """Whether this is a library's error rather than a wish to end: a panic in Rust is no Exception, but is one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
