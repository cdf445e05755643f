"""What a decoder refuses: offsets that are not its cache's, ids and caches of another shape."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from kvant.errors import ContextError
from kvant.models import load_decoder


def test_an_offset_can_only_confirm_the_cache(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    model = load_decoder(make_checkpoint()[0])
    cache = model.make_cache(16)
    model(mx.array([[1, 2]]), offset=0, cache=cache)
    model(mx.array([[3]]), offset=2, cache=cache)
    expected = r"expected an int or an array of integers \(1,\)"
    one = mx.array([[5]])
    refused: list[tuple[mx.array, Any, Any, str]] = [  # ids, offset, cache, and what is said
        (one, mx.array([3.0]), cache, rf"array of mlx.core.float32 \(1,\); {expected}"),
        (one, mx.array([3, 1]), cache, rf"array of mlx.core.int32 \(2,\); {expected}"),
        (one, mx.array(3), cache, rf"array of mlx.core.int32 \(\); {expected}"),
        (one, [3], cache, rf"offset is \[3\]; {expected}"),
        (one, 3.0, cache, rf"offset is 3.0; {expected}"),
        (one, False, None, "offset is False"),
        (one, 2, cache, "offset is 2; the cache holds 3 tokens"),
        (one, 2, None, "offset is 2; the cache holds 0 tokens"),
        (one, mx.array([1]), cache, r"offset is \[1\]; the cache holds 3 tokens"),
        (mx.array([[5], [6]]), mx.array([1, 0]), None, r"offset is \[1, 0\]; the cache holds 0 tokens"),
        (mx.array([[5], [6]]), 5, None, "offset is 5; the cache holds 0 tokens"),
        (mx.array([[5], [6], [7]]), None, cache, "inputs has 3 sequences; expected 1"),
        *((mx.array([[token]]), None, cache, "the model knows 0 to 299") for token in (300, -1, 10**8)),
        (mx.array([[1.0]]), None, cache, "expected integer token ids"),
        (mx.array([1, 2]), None, None, r"expected \(B, S\) token ids"),
        (one, None, cache[:1], "a list of 1 layers; expected all layers of one cache"),
        (one, None, 5, r"the cache is a int; expected the result of model\.make_cache"),
    ]
    for ids, offset, layers, message in refused:
        with pytest.raises(ValueError, match=message):
            model(ids, offset=offset, cache=layers)
    assert {layer.offset for layer in cache} == {3}
    model(one, offset=mx.array([3]), cache=cache)
    assert {layer.offset for layer in cache} == {4}
    cache[1].trim(1)
    assert {layer.offset for layer in cache} == {3}  # one cache: of every layer
    with pytest.raises(ContextError, match="this machine has"):
        model.make_cache(10**12)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "many"])
def test_a_refused_reservation_is_named_as_the_caller_wrote_it(
    make_checkpoint: Callable[..., tuple[Path, nn.Module]], wrong: Any
) -> None:
    """A cache of 0 tokens was refused as ``tokens``, and a text was added to a number."""
    model = load_decoder(make_checkpoint()[0])
    message = f"max_seq_len is {wrong!r}; expected a positive int"
    with pytest.raises(ValueError, match=message):
        model.make_cache(wrong)
    with pytest.raises(ValueError, match=message):
        model.make_pool(128, sequences=1, max_seq_len=wrong)
