"""How far an imported model's predictions are from those of the file's own values."""

from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np

from kvant.files import read_json
from kvant.models.checkpoint import load_decoder
from kvant.models.config import ModelConfig
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.gguf.importer import Progress, in_order, write_json
from kvant.tools.gguf.layout import places
from kvant.tools.gguf.reader import open_gguf
from kvant.tools.report.divergence import Figures, Tally, log_probabilities
from kvant.tools.report.texts import built_in_text

TOKENS = 256


def check_import(path: Path, folder: Path, progress: Progress | None = None) -> Figures:
    """Compare the model in ``folder`` with the dense float32 expansion of the file it was imported from.

    Both predict the token after each of 256 tokens of kvant's held-out texts, with exact caches. The expansion is
    written beside ``folder`` and removed afterwards; it takes four bytes a weight, on disk and in memory.

    Raises:
        CheckpointError: the machine has no memory for the expansion.
    """
    tokenizer = load_tokenizer(folder)
    (ids,) = built_in_text(tokenizer, TOKENS, TOKENS).pieces
    with TemporaryDirectory(prefix=".check.", dir=folder.parent) as scratch:
        _expand(path, folder, Path(scratch), progress or (lambda done, total: None))
        expected = _predictions(Path(scratch), ids)
    tally = Tally()
    tally.add(expected, _predictions(folder, ids), ids[1:])
    return tally.figures()


def _predictions(folder: Path, ids: tuple[int, ...]) -> mx.array:
    """(S,) tokens -> (S, vocab) float32 log-probabilities."""
    logits = log_probabilities(load_decoder(folder)(mx.array([ids]))[0])
    mx.eval(logits)
    return logits


def _expand(path: Path, folder: Path, dense: Path, progress: Progress) -> None:
    raw = {key: value for key, value in read_json(folder / "config.json").items() if key != "quantization"}
    write_json(dense / "config.json", raw)
    arrays = {}
    with open_gguf(path) as file:
        placed = [*places(file, ModelConfig.from_dict(raw))]
        for done, place in enumerate(placed, start=1):
            tensor = file.tensors[place.source]
            values = tensor.kind.expand(file.blocks(place.source)).reshape(tensor.shape)
            arrays[f"{place.module}.{place.part}"] = in_order(
                mx.array(np.ascontiguousarray(values)), place.interleaved_heads
            )
            progress(done, len(placed))
        mx.save_safetensors(str(dense / "model.safetensors"), arrays)
