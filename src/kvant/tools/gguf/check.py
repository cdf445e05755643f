"""Measure how far an imported model's predictions are from those of the unconverted values."""

import math
from pathlib import Path

import mlx.core as mx

from kvant.errors import ConvertError
from kvant.files import read_json
from kvant.models.checkpoint import Progress, load_decoder
from kvant.models.config import ModelConfig
from kvant.sizes import format_bytes, physical_memory
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.convert.new_folder import check_space, part_folder
from kvant.tools.gguf.blocks import Packed
from kvant.tools.gguf.importer import write_json, write_tensors
from kvant.tools.gguf.layout import Place, places
from kvant.tools.gguf.reader import GGUFFile, open_gguf
from kvant.tools.report.divergence import Figures, Tally, log_probabilities
from kvant.tools.report.texts import built_in_text

TOKENS = 256


def check_import(path: Path, folder: Path, progress: Progress = lambda done, total: None) -> Figures:
    """Compare the model in ``folder`` with the dense float32 expansion of the file it was imported from.

    Both predict the next token at 256 positions of kvant's held-out texts, with exact caches. The expansion
    is written next to ``folder`` and removed afterwards; it takes four bytes per weight, on disk and in
    memory.

    Raises:
        ConvertError: there is not enough disk space or memory for the expansion.
    """
    tokenizer = load_tokenizer(folder)
    (ids,) = built_in_text(tokenizer, TOKENS, TOKENS).pieces
    raw = {key: value for key, value in read_json(folder / "config.json").items() if key != "quantization"}
    with open_gguf(path) as file, part_folder(folder) as expanded:
        placed = places(file, ModelConfig.from_dict(raw))
        needed = 4 * sum(math.prod(place.tensor.shape) for place in placed)
        if needed > physical_memory():
            memory = format_bytes(physical_memory())
            raise ConvertError(f"the check takes {format_bytes(needed)} of memory; this machine has {memory}")
        check_space(folder.parent, needed)
        write_json(expanded / "config.json", raw)
        write_tensors(file, placed, expanded, _expand, progress)
        expected = _predictions(expanded, ids)
    tally = Tally()
    tally.add(expected[:-1], _predictions(folder, ids)[:-1], ids[1:])
    return tally.figures()


def _predictions(folder: Path, ids: tuple[int, ...]) -> mx.array:
    """(S,) tokens -> (S, vocab) float32 log-probabilities."""
    logits = log_probabilities(load_decoder(folder)(mx.array([ids]))[0])
    mx.eval(logits)
    return logits


def _expand(file: GGUFFile, place: Place) -> Packed:
    return {
        "weight": mx.array(place.tensor.kind.expand(file.blocks(place.tensor))).reshape(place.tensor.shape)
    }
