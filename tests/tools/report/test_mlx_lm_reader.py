"""mlx-lm's caches in the report, against mlx-lm's own attention to them, and NumPy."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from support.bridged import bridged, write_mlx_lm
from support.command import call, refusal
from support.oracle import Array

from kvant.errors import KvantError
from kvant.models import Decoder
from kvant.tools.report.measure import measure
from kvant.tools.report.mlx_lm_reader import MLX_LM_FORMATS, MlxLmFormat, MlxLmReader, mlx_lm_readers
from kvant.tools.report.texts import Text

Pocket = tuple[Decoder, Any]
LABELS = ["mlx-lm:0", "mlx-lm:8g32", "mlx-lm:8g64", "mlx-lm:4g32", "mlx-lm:4g64"]


def _log_softmax(logits: mx.array) -> Array:
    rows = np.array(logits, np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("own", MLX_LM_FORMATS[1:], ids=lambda own: own.label)
def test_logits_are_mlx_lms(own: MlxLmFormat, pocket_mlx_lm: nn.Module, heldout_ids: list[int]) -> None:
    """It attends to packed tokens, the reader to their floats: a chunk, then tokens one by one.

    A sum that is rounded in another order tips some values over to the next of the format.
    """
    ids = heldout_ids[:300]  # more than the 256 that the cache grows by
    kinds: list[Any] = [
        [QuantizedKVCache(own.kv_group_size, own.kv_bits) for _ in pocket_mlx_lm.layers],
        make_prompt_cache(pocket_mlx_lm),
    ]
    reader = MlxLmReader(pocket_mlx_lm, 1280, own, 300)
    for part in (ids[:280], *([token] for token in ids[280:])):
        expected, full = (pocket_mlx_lm(mx.array([part]), cache=cache)[0] for cache in kinds)
        given = reader.logits(reader.read(part))
        error = mx.abs(given - expected).mean().item()
        assert error < 0.1 * mx.abs(full - expected).mean().item()
    reader.begin(0)
    assert mx.allclose(reader.read(ids[:1]), pocket_mlx_lm(mx.array([ids[:1]]))[0], atol=1.0).item()


def test_figures_are_mlx_lms(
    pocket: Pocket, pocket_folder: Path, pocket_mlx_lm: nn.Module, heldout_ids: list[int]
) -> None:
    """Both legs, from the logits of mlx-lm's loop and its own quantized attention."""
    ids = heldout_ids[:160]
    report = measure("pocket", pocket[0], Text("a text", (tuple(ids),), 0), [], mlx_lm=pocket_folder)
    assert [result.format.label for result in report.results] == LABELS
    prompt = report.prompt
    assert prompt == 119
    full: Array = _log_softmax(pocket_mlx_lm(mx.array([ids]), cache=make_prompt_cache(pocket_mlx_lm))[0])
    for result in report.results:
        own = result.format
        if not own.kv_bits:
            assert result.prefill.mean_kld_nats < 1e-9
            assert result.decode.mean_kld_nats < 1e-9
            continue
        cache = [QuantizedKVCache(own.kv_group_size, own.kv_bits) for _ in pocket_mlx_lm.layers]
        parts = [ids[:prompt], *([token] for token in ids[prompt:-1])]
        rows = [_log_softmax(pocket_mlx_lm(mx.array([part]), cache=cache)[0]) for part in parts]
        for given, figures, place in (
            (rows[0], result.prefill, 0),
            (np.concatenate(rows[1:]), result.decode, prompt),
        ):
            right = full[place : place + len(given)]
            klds = (np.exp(right) * (right - given)).sum(axis=-1)
            assert figures.positions == len(klds)
            assert figures.mean_kld_nats == pytest.approx(klds.mean(), rel=0.05)
            assert figures.p99_kld_nats == pytest.approx(np.percentile(klds, 99), rel=0.1)
            loss = -given[np.arange(len(given)), ids[place + 1 : place + 1 + len(given)]].mean()
            assert figures.perplexity == pytest.approx(math.exp(loss), rel=1e-2)


def test_bytes_are_those_of_half_precision(pocket: Pocket, pocket_folder: Path) -> None:
    """mlx-lm's own count of a cache of a bfloat16 model, in whole steps of 256 tokens."""
    half = mlx_lm_readers(pocket_folder, pocket[0], 300)
    for own, reader in half.items():
        reader.read([5, 6, 7])
        cache: Any = [
            QuantizedKVCache(own.kv_group_size, own.kv_bits) if own.kv_bits else None for _ in range(4)
        ]
        for each in cache if own.kv_bits else ():
            each.update_and_fetch(*mx.zeros((2, 1, 2, 512, 64), mx.bfloat16))
        expected = sum(each.nbytes for each in cache) if own.kv_bits else 512 * 4096
        assert reader.nbytes == expected


def test_a_cache_it_does_not_quantize(pocket_folder: Path, tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path / "model", "gemma3_text")  # layers with a window
    with pytest.raises(KvantError, match=r"does not quantize .*Rotating.* leave out --compare"):
        mlx_lm_readers(folder, bridged("gemma3_text"), 64)


def test_the_command() -> None:
    flags = ("--tokens", "64", "--formats", "8g32", "--compare", "mlx-lm", "--json")
    done = call("report", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["formats"]
    assert [own["format"] for own in found] == ["8g32", *LABELS]
    assert found[4]["flags"] == "--kv-bits 4 --kv-group-size 32 --quantized-kv-start 0"
    assert found[4]["layer_attention_errors"] == []
    assert found[4]["prefill"]["mean_kld_nats"] > found[2]["prefill"]["mean_kld_nats"] > 0
    printed = call("report", *flags[:-1]).stdout
    assert printed.count(" mlx-lm:4g64 ") == 2  # once in each leg's table
    assert "needs --reference; expected mlx-lm" in refusal(2, "report", "--compare", "vllm")
    assert "leave one out" in refusal(2, "report", "--compare", "mlx-lm", "--adapter-path", "x")
