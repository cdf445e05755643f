"""A pool's windows: their pages move along, and how far a sequence can go back."""

from pathlib import Path

import pytest
from support.pools import TEXT, check_pages, close, next_logits, prefill, tiny_model

from kvant.models import Decoder


def test_how_far_it_goes_back(windows: Decoder) -> None:
    pool = windows.make_pool(4096, sequences=4, kv_bits=0, prefill_step_size=128)
    sequence = pool.sequence(1000)
    prefill(windows, pool, sequence, TEXT[:700])
    possible = [length for length in range(701) if sequence.can_trim_to(length)]
    oldest = sequence.tables[2].first
    assert oldest == (640 - 199) // 128 * 128, "what the last chunk saw"
    assert sequence.oldest == max(oldest + 199, sequence.tables[1].first + 39)
    assert possible == [0, *range(sequence.oldest, 701)]
    with pytest.raises(
        ValueError, match=f"500 of 700 tokens are to be forgotten; .* no further than to {sequence.oldest} "
    ):
        sequence.trim(500)
    assert sequence.length == 700
    sequence.trim_to(possible[1])
    logits = prefill(windows, pool, sequence, TEXT[800:830])
    assert close(logits, next_logits(windows, TEXT[: possible[1]] + TEXT[800:830]))
    assert sequence.trim(10_000) == possible[1] + 30
    assert close(prefill(windows, pool, sequence, TEXT[300:450]), next_logits(windows, TEXT[300:450]))
    check_pages(pool, [sequence])


def test_a_window_as_wide_as_a_sequence_is_none(windows: Decoder) -> None:
    pool = windows.make_pool(1024, sequences=4, kv_bits=0, max_seq_len=200)
    assert [part.window for part in pool.parts] == [None, 40]
    assert close(prefill(windows, pool, pool.sequence(200), TEXT[:190]), next_logits(windows, TEXT[:190]))


def test_layers_that_all_have_windows(tmp_path: Path) -> None:
    """Then a sequence's pages are those of its ring, however long it gets."""
    model = tiny_model(tmp_path, (40, 200))
    pool = model.make_pool(1024, sequences=1, kv_bits=0, prefill_step_size=128)
    assert (pool.num_pages, pool.num_free, pool.pages_needed(1000)) == (4, 4, 4)
    sequence = pool.sequence(1000)
    assert (pool.num_free, pool.fits(1)) == (0, False)
    assert close(prefill(model, pool, sequence, TEXT[:900]), next_logits(model, TEXT[:900]))
