"""Log-probabilities that llama.cpp wrote, with ``llama-perplexity --kl-divergence-base FILE``.

The file has a text in pieces of one length, and of the second half of each the model's predictions, in 16
bits each.
Source: tools/perplexity/perplexity.cpp of llama.cpp.
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
HEADER = len(MAGIC) + 3 * 4  # and the tokens of a piece, of the vocabulary, and pieces
LEAST = -16.0
ROW_HEADER = 8  # bytes: a float32 that the 16 bits are multiplied by, and one that is added


@dataclass(frozen=True, slots=True)
class Reference:
    path: Path
    text: Text  # its tokens, as they were given to the model
    vocabulary: int  # probabilities of a prediction
    start: int  # bytes before the first prediction

    def rows(self, piece: int) -> mx.array:
        """(N, vocabulary) float32 log-probabilities after the last tokens of a piece but its very last, N
        of them.
        """
        found = self._stored(piece)
        # What is far below the likeliest is raised to one value; llama.cpp leaves it out, too. The rest,
        # rounded, does not sum to 1.
        return log_probabilities(mx.where(found > LEAST, found, -math.inf))

    def comparable_rows(self, expected: mx.array, piece: int) -> mx.array:
        """As :meth:`rows`, of the tokens that other predictions of the same piece have not left out."""
        found = self._stored(piece)
        kept = mx.where(found > LEAST, found, -math.inf)
        sums = mx.logsumexp(kept, axis=-1, keepdims=True)
        return mx.where(expected > -math.inf, found - sums, -math.inf)

    def _stored(self, piece: int) -> mx.array:
        """(N, vocabulary) float32, as they were rounded."""
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
    """The file's text, its predictions to be read a piece at a time.

    llama.cpp puts ``bos`` in place of each piece's first token, if the tokenizer begins a text with it; the
    file has the text's own there.
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
                    f"{path}: of a model with {vocabulary} tokens in its vocabulary; expected {vocab_size}"
                )
            start = HEADER + 4 * length * count
            expected = start + count * _predictions(length) * _row_bytes(vocabulary)
            if length < 4 or count < 1 or os.fstat(file.fileno()).st_size != expected:
                raise KvantError(
                    f"{path}: not whole; {count} pieces of {length} tokens take {expected} bytes"
                )
            stored = bytearray(file.read(start - HEADER))
            ids: list[int] = mx.array(memoryview(stored)).view(mx.int32).tolist()  # type: ignore[arg-type, assignment]
    except OSError as error:
        raise KvantError(f"{path}: cannot be read: {one_line(error)}") from error
    if not all(0 <= token < vocabulary for token in ids):
        raise KvantError(f"{path}: it has a token that is not in the vocabulary")
    pieces = [ids[first : first + length] for first in range(0, len(ids), length)]
    if bos is not None:
        pieces = [[bos, *piece[1:]] for piece in pieces]
    return Reference(
        path, Text(f"the tokens of {path.name}", tuple(map(tuple, pieces)), 0), vocabulary, start
    )


def _predictions(length: int) -> int:
    """How many of a piece there are: of its second half, but for the last token, which nothing follows."""
    return length - 1 - length // 2


def _row_bytes(vocabulary: int) -> int:
    return ROW_HEADER + 2 * (vocabulary + vocabulary % 2)
