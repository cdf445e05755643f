"""The decoder on a checkpoint in shards, with a head it does not need, and on the embedded model; offsets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.checkpoints import change_tensors, check_three_ways, reference_logits
from support.numbers import relative_error

from kvant.cache import FullKVCache
from kvant.errors import ContextError
from kvant.models import Decoder, load_decoder

TOLERANCE = 1e-4  # of the largest logit
IDS = [(7 + 31 * i) % 300 for i in range(20)]


def test_shards_and_a_head_that_is_not_read(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    folder, reference = make_checkpoint(shards=3)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 3
    change_tensors(files[0], {"lm_head.weight": mx.zeros((300, 128))})  # tied
    assert relative_error(load_decoder(folder)(mx.array([IDS]))[0], reference_logits(reference, IDS)) < TOLERANCE


def test_pocket_model(pocket: tuple[Decoder, Any], pocket_mlx_lm: nn.Module, heldout_ids: list[int]) -> None:
    ids = heldout_ids[:96]
    check_three_ways(pocket[0], reference_logits(pocket_mlx_lm, ids), ids)


def test_a_batch_is_its_rows(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    model = load_decoder(make_checkpoint()[0])
    rows = [IDS[:10], IDS[10:]]
    cache = model.make_cache(16, batch=2)
    batch = mx.concatenate(
        [model(mx.array(rows)[:, :6], cache=cache), model(mx.array(rows)[:, 6:], cache=cache)], axis=1
    )
    for row, logits in zip(rows, batch, strict=True):
        one = model.make_cache(16)
        assert relative_error(logits, model(mx.array([row]), cache=one)[0]) < TOLERANCE


def test_an_offset_can_only_confirm_the_cache(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    model = load_decoder(make_checkpoint()[0])
    cache = model.make_cache(16)
    model(mx.array([[1, 2, 3]]), offset=0, cache=cache)
    assert [layer.offset for layer in cache] == [3, 3]
    model(mx.array([[4]]), offset=3, cache=cache)
    with pytest.raises(ValueError, match="offset is 3; the cache holds 4 tokens"):
        model(mx.array([[5]]), offset=3, cache=cache)
    with pytest.raises(ValueError, match="offset is 2; the cache holds 0 tokens"):
        model(mx.array([[5]]), offset=2)
    assert [layer.offset for layer in cache] == [4, 4]
    for ids in ([[300]], [[-1]], [[10**8]]):
        with pytest.raises(ValueError, match="the model knows 0 to 299"):
            model(mx.array(ids), cache=cache)
    with pytest.raises(ValueError, match="expected integer token ids"):
        model(mx.array([[1.0]]), cache=cache)
    with pytest.raises(ValueError, match="offset is False"):
        model(mx.array([[1]]), offset=False)
    with pytest.raises(ValueError, match="offset is 5; the cache holds 0 tokens"):  # two sequences, none there yet
        model(mx.array([[5], [6]]), offset=5, cache=[FullKVCache() for _ in model.layers])
    with pytest.raises(ContextError, match="this machine has"):
        model.make_cache(10**12)
    with pytest.raises(ValueError, match="the cache has 1 layers; expected 2"):
        model(mx.array([[5]]), cache=cache[:1])
    with pytest.raises(ValueError, match=r"expected \(B, S\) token ids"):
        model(mx.array([1, 2]))
