"""Grammars in the engine: a request's grammar is found, its masks are applied to logits."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.engine.processors import Change, LogitsProcessor
from kvant.text.grammar import Grammar


def apart(processors: Sequence[LogitsProcessor]) -> tuple[tuple[Change, ...], Grammar | None]:
    """Processors that change logits, and the grammar among them. It is applied last, wherever it stands."""
    changes: list[Change] = []
    grammars: list[Grammar] = []
    for processor in processors:
        if isinstance(processor, Grammar):
            grammars.append(processor)
        else:
            changes.append(processor)
    if len(grammars) > 1:
        raise ValueError(f"logits_processors has {len(grammars)} grammars; expected one at most")
    return tuple(changes), grammars[0] if grammars else None


def allowed_only(logits: mx.array, masks: Sequence[bytes]) -> mx.array:
    """The logits (B, vocab) of tokens that a row's mask allows; of all others minus infinity.

    ``masks``: of each row, as :meth:`kvant.text.grammar.Matcher.mask` gives them.
    """
    allowed = mx.array(memoryview(b"".join(masks)))  # type: ignore[arg-type]  # it takes any buffer
    return mx.where(allowed.reshape(logits.shape) != 0, logits, -mx.inf)
