"""Read log-probabilities that ``llama-perplexity --kl-divergence-base FILE`` of llama.cpp wrote.

The file has a text in pieces of equal length, and the model's predictions for the second half of each piece,
in 16 bits each. Source: tools/perplexity/perplexity.cpp of llama.cpp.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from kvant.errors import KvantError, one_line
from kvant.files import open_user_file
from kvant.tools.report.divergence import log_probabilities
from kvant.tools.report.texts import Text

MAGIC = b"_logits_"
HEADER = len(MAGIC) + 3 * 4  # magic, tokens per piece, size of the vocabulary, number of pieces
LEAST = -16.0
ROW_HEADER = 8  # bytes: a float32 by which the 16-bit numbers are multiplied, and one that is added


@dataclass(frozen=True, slots=True)
class Reference:
    path: Path
    text: Text  # the tokens that were fed to the model
    vocabulary: int  # probabilities per prediction
    start: int  # offset of the first prediction in bytes

    def rows(self, piece: int) -> mx.array:
        """Return (N, vocabulary) float32 log-probabilities after the last N tokens but one of a piece."""
        stored = self._stored(piece)
        # Very unlikely tokens were all raised to one value; drop them as llama.cpp does. The remaining values
        # were rounded and do not sum to 1.
        return log_probabilities(mx.where(stored > LEAST, stored, -math.inf))

    def comparable_rows(self, expected: mx.array, piece: int) -> mx.array:
        """Return :meth:`rows`, restricted to tokens that ``expected`` for the same piece has not dropped."""
        stored = self._stored(piece)
        likely = mx.where(stored > LEAST, stored, -math.inf)
        sums = mx.logsumexp(likely, axis=-1, keepdims=True)
        return mx.where(expected > -math.inf, stored - sums, -math.inf)

    def _stored(self, piece: int) -> mx.array:
        """Return (N, vocabulary) float32 values as they were rounded."""
        length = len(self.text.pieces[0])
        count = _predictions(length)
        width = _row_bytes(self.vocabulary)
        with open_user_file(self.path) as file:
            file.seek(self.start + piece * count * width)
            data = bytearray(file.read(count * width))
        rows = mx.array(memoryview(data)).reshape(count, width)  # type: ignore[arg-type]
        factor, least = mx.split(rows[:, :ROW_HEADER].view(mx.float32), 2, axis=1)
        values = rows[:, ROW_HEADER:].view(mx.uint16)[:, : self.vocabulary].astype(mx.float32)
        return values * factor + least


def read_reference(path: Path, vocab_size: int, bos: int | None) -> Reference:
    """Read the file's header and text; predictions are read piece by piece later.

    If the tokenizer begins texts with ``bos``, llama.cpp fed it instead of each piece's first token, which
    the file contains.
    """
    try:
        with open_user_file(path) as file:
            head = file.read(HEADER)
            if len(head) < HEADER or not head.startswith(MAGIC):
                raise KvantError(f"{path}: not a file of llama-perplexity --kl-divergence-base")
            length, vocabulary, count = (
                int.from_bytes(head[8 + 4 * n : 12 + 4 * n], "little") for n in range(3)
            )
            if vocabulary != vocab_size:
                raise KvantError(
                    f"{path}: from a model with {vocabulary} tokens in its vocabulary; expected {vocab_size}"
                )
            start = HEADER + 4 * length * count
            expected = start + count * _predictions(length) * _row_bytes(vocabulary)
            if length < 4 or count < 1 or os.fstat(file.fileno()).st_size != expected:
                raise KvantError(
                    f"{path}: incomplete; {count} pieces of {length} tokens take {expected} bytes"
                )
            stored = bytearray(file.read(start - HEADER))
            tokens = mx.array(memoryview(stored)).view(mx.int32)  # type: ignore[arg-type]
            ids: list[int] = tokens.tolist()  # type: ignore[assignment]
    except OSError as error:
        raise KvantError(f"{path}: cannot be read: {one_line(error)}") from error
    if not all(0 <= token < vocabulary for token in ids):
        raise KvantError(f"{path}: has a token that is not in the vocabulary")
    pieces = [ids[first : first + length] for first in range(0, len(ids), length)]
    if bos is not None:
        pieces = [[bos, *piece[1:]] for piece in pieces]
    return Reference(
        path, Text(f"the tokens of {path.name}", tuple(map(tuple, pieces)), 0), vocabulary, start
    )


def _predictions(length: int) -> int:
    """Return the number of predictions per piece: the second half without the last token."""
    return length - 1 - length // 2


def _row_bytes(vocabulary: int) -> int:
    return ROW_HEADER + 2 * (vocabulary + vocabulary % 2)
