"""The memory that a pool will need: pages, rows and bytes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from kvant.cache.layer_format import LayerFormat, stored_bytes
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.cache.window_layer_group import window_pages
from kvant.operators.exact_rows import SLACK


def pool_bytes(
    formats: Iterable[LayerFormat] | Mapping[LayerFormat, int],
    *,
    tokens: int,
    sequences: int,
    max_seq_len: int,
    prefill_step_size: int,
    checkpoints: int = 0,
    single: bool = False,
) -> int:
    """Return :attr:`Pool.nbytes` for these arguments, without states and without making the pool.

    ``formats``: the format of each layer, or the number of layers for each format.
    """
    total = 0
    for layer, count in Counter(formats).items():
        _, rows = pages_and_rows(
            layer.window, tokens, sequences, prefill_step_size, checkpoints, single=single
        )
        stored = [*layer.arrays(rows).values(), *layer.tables().values(), *layer.transform_arrays]
        stored += layer.tail_pages(sequences + checkpoints)
        if layer.window is not None and single:  # a checkpoint copies the rows that the window sees
            stored += list(layer.arrays(min(layer.window, max_seq_len)).values()) * checkpoints
        if layer.split_pairs is not None:
            stored.append(("F32", (2, len(layer.split_pairs), max_seq_len)))  # cosines and sines
        total += count * sum(map(stored_bytes, stored))
    return total


def pages_and_rows(
    window: int | None, tokens: int, sequences: int, step_size: int, checkpoints: int, *, single: bool
) -> tuple[int, int]:
    """Return the numbers of pages and rows of a layer that sequences and checkpoints can use."""
    num_pages = pages_for(tokens)
    if window is not None:
        num_pages = min(num_pages, sequences * window_pages(window, step_size))
    if single:  # rows for its tokens only, no pages for checkpoints
        return num_pages, min(num_pages * PAGE_SIZE, tokens)
    num_pages += checkpoints * (1 if window is None else pages_for(window) + 1)
    return num_pages, num_pages * PAGE_SIZE


def check_sizes(**sizes: int) -> None:
    """Raise a ValueError that names the first size that is not a positive int."""
    for name, number in sizes.items():
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} is {number!r}; expected a positive int")


def single_sizes(max_seq_len: int) -> dict[str, Any]:
    """Return the sizes of a pool for one conversation.

    Its windows have room for steps of ``SLACK + 1`` new tokens; longer ones are written on commit.
    """
    sizes = {"tokens": max_seq_len, "sequences": 1, "max_seq_len": max_seq_len}
    return {**sizes, "prefill_step_size": SLACK + 1, "single": True}


def single_rows(window: int | None, max_seq_len: int) -> int:
    """Return the number of rows of a layer in the pool of one conversation."""
    return pages_and_rows(window, max_seq_len, 1, SLACK + 1, 0, single=True)[1]
