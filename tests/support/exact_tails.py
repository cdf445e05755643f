"""Which tokens a query reads exactly, and how floats are rounded there, written from the definition alone."""

import numpy as np

from support.oracle import Array

SINKS, TAIL, SLACK, RING, PAGE = 4, 108, 16, 124, 128
# In rows of a sequence's own page that it does not read: they are multiplied by weights of 0.
POISON = 3e4


def read_exactly(query: int, sinks: int = SINKS, start: int = SINKS) -> Array:
    """Return which tokens up to the query's own it reads exactly: boolean (query + 1,).

    Args:
        query: its position.
        sinks: how many of the first tokens the sequence has exact rows of.
        start: the first of the others that it has exact rows of.
    """
    token = np.arange(query + 1)
    return (token < sinks) | (token >= max(start, query + 1 - TAIL))


def exact_row(position: int) -> int:
    """Return the row of a token in its sequence's page."""
    return position if position < SINKS else SINKS + (position - SINKS) % RING


def in_bfloat16(tokens: Array) -> Array:
    """Return tokens as bfloat16 stores them, rounded to the nearest, and to the even one of two."""
    bits = tokens.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
