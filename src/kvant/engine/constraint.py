"""Grammars in the engine: a request's grammar is found, its masks are applied to logits."""

from collections.abc import Collection, Sequence

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


def for_answer(
    processors: Sequence[LogitsProcessor], vocab_size: int, stop_tokens: Collection[int], begun: Sequence[int] = ()
) -> tuple[Change, ...]:
    """The processors of one answer, for a loop that calls them with its tokens so far.

    ``begun``: the answer's first tokens, where the prompt ends with them; a grammar goes on after them.
    """
    changes, grammar = apart(processors)
    if grammar is None:
        return changes
    grammar.check(vocab_size, stop_tokens)
    return *changes, Constraint(grammar, begun)


def allowed_only(logits: mx.array, masks: Sequence[bytes]) -> mx.array:
    """The logits (B, vocab) of tokens that a row's mask allows; of all others minus infinity.

    ``masks``: of each row, as :meth:`kvant.text.grammar.Matcher.mask` gives them.
    """
    allowed = mx.array(memoryview(b"".join(masks)))  # type: ignore[arg-type]  # it takes any buffer
    return mx.where(allowed.reshape(logits.shape) != 0, logits, -mx.inf)


class Constraint:
    """A grammar as a function of tokens and logits. It learns the tokens of its answer from one call to the next."""

    def __init__(self, grammar: Grammar, begun: Sequence[int]) -> None:
        self._matcher = grammar.matcher()
        for token in begun:
            self._matcher.take(token)
        self._taken: int | None = None  # tokens that were there at the last call

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        length = tokens.shape[0]
        new: list[int] = [] if self._taken is None else tokens[self._taken :].tolist()  # type: ignore[assignment]
        for token in new:
            self._matcher.take(token)
        self._taken = length
        return allowed_only(logits, [self._matcher.mask()])
