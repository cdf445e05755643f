"""A cache format of llama.cpp, represented by a file of its predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from kvant.tools.report.reference import Reference
from kvant.tools.report.runs import STEP_SIZE, logits_at_once


@dataclass(frozen=True, slots=True)
class FileFormat:
    """The cache format with which llama-perplexity wrote a file. The file does not name it."""

    path: Path
    kv_bits: None = None
    kv_group_size: None = None
    bias_split: bool = False
    flags: str = ""

    @property
    def label(self) -> str:
        return self.path.stem


class FileReader:
    """Return a file's predictions instead of reading the text; those that the file lacks are zeros."""

    nbytes = 0  # unknown

    def __init__(self, file: Reference, expected: Reference) -> None:
        """``expected``: the predictions with which the file's are compared."""
        self.vocab_size = file.vocabulary
        self.step_size = min(STEP_SIZE, logits_at_once(file.vocabulary))
        self._file = file
        self._expected = expected
        self.begin(0)

    def begin(self, piece: int) -> None:
        self._place = 0  # position in the piece
        self._rows = self._file.comparable_rows(self._expected.rows(piece), piece)

    def read(self, ids: Sequence[int]) -> mx.array:
        lacking = len(self._file.text.pieces[0]) - 1 - len(self._rows)
        low, high = (max(0, place - lacking) for place in (self._place, self._place + len(ids)))
        self._place += len(ids)
        return mx.concatenate([mx.zeros((len(ids) - high + low, self.vocab_size)), self._rows[low:high]])

    def logits(self, states: mx.array) -> mx.array:
        return states
