"""Every architecture of mlx-lm that a CPU can run: mlx-lm's model with kvant's cache, against its own
cache.
"""

import json
from importlib.metadata import version

import architectures as table
import mlx.core as mx
import pytest
from support.counts import count
from support.tiny_models import build

from kvant.bridge.architectures import NEEDS_METAL

RECORDED = json.loads(table.RECORDED.read_text("utf-8"))
FIGURES = RECORDED["architectures"]
AGREE = 1e-4  # of the largest logit
SAME_FIGURE = 2  # a recorded error and one measured here, on a machine that rounds differently


def test_at_least_120_are_measured() -> None:
    assert list(FIGURES) == table.measured()
    assert len(FIGURES) >= 120


@pytest.mark.parametrize("name", table.measured())
def test_an_architecture_through_kvant_s_cache(name: str) -> None:
    model, _ = build(name)
    tokens, expected = table.reference(name, model)
    if name not in table.AS_FED:
        assert table.worst(table.errors(table.in_one_call(model, tokens), expected)) < AGREE
    alone = table.finite(model(mx.array([tokens[-1:]]))[0, -1:])
    assert table.worst(table.errors(alone, expected[-1:])) > 0.1  # what is cached decides the logits
    assert table.kinds(model) == FIGURES[name]["caches"]
    assert table.has_sinks(model) == FIGURES[name]["sinks"]
    assert all(window < table.FEEDS[0] for window in table.windows(model))  # the text runs past them
    if count(False, True):
        check_figure(table.their_quantized(model, tokens, expected), FIGURES[name]["mlx-lm at 8 bits"])
    reserved = {bits: sum(table.key_value_bytes(table.kvant_cache(model, bits))) for bits in (0, 8, 4)}
    bits_in_turn = ((0, 8), (0,), (0, 4), (0,))[table.measured().index(name) % 4]
    for bits in count(bits_in_turn, (0, 8, 4)):
        cache = table.kvant_cache(model, bits)
        before = table.key_value_bytes(cache)
        _, logits = table.run(model, cache, tokens)
        assert table.key_value_bytes(cache) == before
        found = table.errors(logits, expected)
        if bits == 0:
            assert table.worst(found) < AGREE
            assert logits.argmax(axis=-1).tolist() == expected.argmax(axis=-1).tolist()
        else:
            check_figure(table.median(found), FIGURES[name][f"error at {bits} bits"])
    if table.has_rows(FIGURES[name]):
        assert reserved[0] > reserved[8] > reserved[4] > 0
    else:
        assert not any(reserved.values())


def check_figure(found: float | str, recorded: float | str) -> None:
    """Hold an error against the recorded one, or a text against its own."""
    if isinstance(found, str) or isinstance(recorded, str):
        assert found == recorded
    else:
        low, high = sorted(max(error, table.TINY) for error in (found, recorded))
        assert high < low * SAME_FIGURE


@pytest.mark.skipif(mx.metal.is_available(), reason="a machine with Metal runs them")
@pytest.mark.parametrize("name", sorted(NEEDS_METAL))
def test_what_is_not_measured_needs_metal(name: str) -> None:
    model, _ = build(name)
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        model(mx.array([[1]]))


def test_the_page_has_what_is_recorded() -> None:
    assert RECORDED["versions"]["mlx-lm"] == version("mlx-lm"), (
        "a new mlx-lm: run scripts/architectures.py again"
    )
    assert table.PAGE.read_text("utf-8") == table.page(RECORDED), "run scripts/architectures.py --page"
