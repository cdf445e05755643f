"""How many tokens a cache is reserved for, and whether this machine has the memory."""

from kvant.errors import ContextError
from kvant.models.language_model import LanguageModelConfig
from kvant.sizes import format_bytes, physical_memory

DEFAULT_RESERVATION = 4096  # tokens


def default_reservation(config: LanguageModelConfig) -> int:
    """Tokens where none are said, as mlx-lm calls ``make_cache``: the model's context, at most 4,096."""
    return min(config.max_position_embeddings or DEFAULT_RESERVATION, DEFAULT_RESERVATION)


def check_memory(max_seq_len: int, num_bytes: int) -> None:
    """Raise a ContextError unless this machine has the bytes that a cache of so many tokens needs."""
    if num_bytes > (memory := physical_memory()):
        raise ContextError(
            f"a cache of {max_seq_len} tokens needs {format_bytes(num_bytes)}; this machine has {format_bytes(memory)}"
        )
