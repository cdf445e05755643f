"""A decoder whose matrices are multiplied where they are asked for: no step is computed that nobody reads."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from support.batches import ids_of, run_all, scheduler_of

from kvant import blas
from kvant.engine.load import load_model
from kvant.engine.request import Request
from kvant.models import Decoder, gemv
from kvant.operators import cpu_paged_attention

pytestmark = pytest.mark.skipif(blas.sgemv() is None, reason="MLX multiplies with its own BLAS")


@pytest.fixture(scope="module")
def model(pocket_folder: Any) -> Iterator[Decoder]:
    """Pocket, all of whose products of a few rows are BLAS's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemv, "BREAK_EVEN_ELEMENTS", 0)
        made = load_model(pocket_folder)
        assert isinstance(made, Decoder)
        assert made.computes_at_once
        yield made


@pytest.mark.parametrize("what", ["products", "attention"])
def test_as_many_steps_are_computed_as_tokens_are_handed_out(
    model: Decoder, pocket: Any, pocket_folder: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "attention":
        monkeypatch.setattr(gemv, "BREAK_EVEN_ELEMENTS", 1 << 30)
        model = load_model(pocket_folder)  # type: ignore[assignment]
        assert not model.computes_at_once
        monkeypatch.setattr(cpu_paged_attention, "LONG_TOKENS", 1)
    steps = 0
    next_logits = model.next_logits

    def counted(*given: Any) -> mx.array:
        nonlocal steps
        steps += 1
        return next_logits(*given)

    monkeypatch.setattr(model, "next_logits", counted)
    _, tokenizer = pocket
    scheduler, _ = scheduler_of(model, 8)
    request = Request(tokenizer.encode("Once upon a time"), max_tokens=12)
    tokens = []
    for token in scheduler.answer([request]):
        tokens.append(token)
        assert steps == len(tokens)
    assert len(tokens) == 12


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_tokens_in_company_are_those_alone(model: Decoder, pocket: Any, bits: int) -> None:
    _, tokenizer = pocket
    texts = ["Once upon a time", "The fox said", "There was a little boat on the sea. It", "Pip"]
    requests = [Request(tokenizer.encode(text), max_tokens=16) for text in texts]
    scheduler, _ = scheduler_of(model, bits)
    found = run_all(scheduler, requests)
    for request in requests:
        assert ids_of(found[request]) == ids_of(run_all(scheduler_of(model, bits)[0], [request])[request])


def test_logits_are_those_of_mlx(model: Decoder, pocket_mlx_lm: Any) -> None:
    """Token by token, beside mlx-lm's model."""
    ids = [3, 14, 159, 26, 5, 35]
    cache = model.make_cache(16, kv_bits=0)
    ours = mx.concatenate([model(mx.array([[each]]), cache=cache) for each in ids], axis=1)
    theirs = pocket_mlx_lm(mx.array([ids]))
    assert mx.abs(ours - theirs).max() < 5e-5 * mx.abs(theirs).max()
