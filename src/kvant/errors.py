"""Every error kvant raises on purpose.

KvantError
 +-- ModelError        a model folder that cannot be loaded: missing, unsupported or malformed
 |    +-- CheckpointError   its tensors: truncated, missing, of the wrong shape or dtype
 +-- ContextError      a prompt or a conversation that does not fit the reserved context (also a ValueError)
 +-- PromptError       a prompt that cannot be used: empty, or a chat template that fails (also a ValueError)

Wrong arguments of a function are plain ValueError and TypeError.
"""

__all__ = ["CheckpointError", "ContextError", "KvantError", "ModelError", "PromptError"]


class KvantError(Exception):
    """Base of every error kvant raises on purpose; its text is one line made for a person."""


class ModelError(KvantError):
    """A model folder that cannot be loaded."""


class CheckpointError(ModelError):
    """Tensors that are truncated, missing, or of the wrong shape or dtype."""


class ContextError(KvantError, ValueError):
    """A prompt or a conversation that does not fit the reserved context."""


class PromptError(KvantError, ValueError):
    """A prompt that cannot be used."""
