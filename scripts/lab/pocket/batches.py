"""Batches: documents turned into rows of token ids of like length, with a weight for every token to be
learned.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from dataclasses import dataclass
from pathlib import Path
from queue import Full

import numpy as np
from corpus import documents
from curriculum import STAGES
from document import Document
from tokenizers import Tokenizer

#: The ids and the weights of one document.
Row = tuple[np.ndarray, np.ndarray]


@dataclass
class Batch:
    """Rows of ids and of weights; the weight at a position is that of the token there."""

    ids: np.ndarray
    weights: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.ids > 0).sum())


def encode(tokenizer: Tokenizer, pool: list[Document]) -> list[Row]:
    """Turn documents into ids and weights."""
    pieces = [document.pieces() for document in pool]
    encodings = iter(tokenizer.encode_batch_fast([text for parts in pieces for text, _ in parts]))
    out = []
    for parts in pieces:
        ids: list[int] = []
        weights: list[float] = []
        for _, weight in parts:
            found = next(encodings).ids
            ids += found
            weights += [weight] * len(found)
        out.append((np.array(ids, np.int64), np.array(weights, np.float32)))
    return out


def pack(rows: list[Row], size: int, step: int = 16) -> tuple[list[Batch], list[Row]]:
    """Cut rows, sorted by length, into batches of about `size` tokens; return them and the rows left over.

    The shapes are few, since a new shape costs time: lengths are one more than a multiple of `step`, and each
    length has its number of rows.
    """
    rows = sorted(rows, key=lambda row: -len(row[0]))
    batches = []
    while rows:
        length = -(-(len(rows[0][0]) - 1) // step) * step + 1
        count = max(1, size // length)
        if count > len(rows):
            break
        batches.append(_fill(rows[:count], count, length))
        rows = rows[count:]
    return batches, rows


def pack_all(rows: list[Row], size: int) -> list[Batch]:
    """Pack every row, with a smaller last batch."""
    batches, rest = pack(rows, size)
    return batches + ([_fill(rest, len(rest), len(rest[0][0]))] if rest else [])


def _fill(rows: list[Row], count: int, length: int) -> Batch:
    """Put rows into one batch, zeros after them."""
    ids, weights = np.zeros((count, length), np.int64), np.zeros((count, length), np.float32)
    for index, (row, weight) in enumerate(rows):
        ids[index, : len(row)], weights[index, : len(row)] = row, weight
    return Batch(ids, weights)


def _feed(queue: mp.Queue, stage: mp.Value, folder: str, seed: int, workers: int, context: int) -> None:
    """Fill the queue with steps: lists of batches that are learned from together."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    current, source, spare = -1, iter(()), []
    while True:
        if stage.value != current:
            current = stage.value
            source, spare = documents(seed * 100 + current, STAGES[current].mix), []
        rows, total = spare, sum(len(row[0]) for row in spare)
        while total < STAGES[current].tokens // workers:
            new = [
                row for row in encode(tokenizer, [next(source) for _ in range(16)]) if len(row[0]) <= context
            ]
            rows += new
            total += sum(len(row[0]) for row in new)
        batches, spare = pack(rows, STAGES[current].micro)
        while True:
            try:
                queue.put((current, batches), timeout=60)
                break
            except Full:
                if os.getppid() == 1:
                    return


class Feeder:
    """A process that makes batches of the current stage ahead of the trainer."""

    def __init__(self, folder: Path, seed: int, workers: int, context: int, stage: int) -> None:
        spawn = mp.get_context("spawn")
        self.stage = spawn.Value("i", stage)
        self.queue: mp.Queue = spawn.Queue(6)
        self.process = spawn.Process(
            target=_feed, args=(self.queue, self.stage, str(folder), seed, workers, context), daemon=True
        )
        self.process.start()

    def next(self) -> list[Batch]:
        """Return the next step's batches, passing over those of a stage that is done."""
        while True:
            stage, batches = self.queue.get()
            if stage == self.stage.value:
                return batches
