"""A pool's windows: their pages move along, and how far a sequence can go back."""

import mlx.core as mx
import pytest
from support.pools import check_pages, close, decode, prefill, tiny_model

from kvant.cache.pool import Pool
from kvant.errors import ContextError
from kvant.models import Decoder

TEXT = [(7 * i * i + 3 * i) % 290 for i in range(1000)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Layers that see everything, and two widths of windows."""
    return tiny_model(tmp_path_factory.mktemp("windows"), (None, 40, 200))


def _pool(model: Decoder, tokens: int = 4096, sequences: int = 4) -> Pool:
    return model.make_pool(tokens, sequences=sequences, kv_bits=0, prefill_step_size=128)


def _expected(model: Decoder, ids: list[int]) -> mx.array:
    return model.logits(model.hidden_states(mx.array([ids]))[:, -1])


def test_pages_move_along_with_the_window(model: Decoder) -> None:
    """A window of 40 and chunks of 128 take at most 3 pages, one of 200 at most 4, whatever the text's length."""
    pool = _pool(model)
    full, narrow, wide = pool.parts
    assert [part.window for part in pool.parts] == [None, 40, 200]
    assert [part.pages.num for part in pool.parts] == [32, 3 * 4, 4 * 4]
    sequences = [pool.sequence(1000) for _ in range(3)]
    lengths = (500, 129, 700)
    for sequence, length in zip(sequences, lengths, strict=True):
        prefill(model, pool, sequence, TEXT[:length])
    for step in range(30):
        ids = [TEXT[length + step] for length in lengths]
        logits = decode(model, pool, sequences, ids)
        assert all(len(sequence.tables[1].pages) <= 2 for sequence in sequences)
        check_pages(pool, sequences)
    for b, length in enumerate(lengths):
        assert close(logits[b : b + 1], _expected(model, TEXT[: length + 30]))
    assert full.num_free == 32 - 24
    assert (narrow.num_free, wide.num_free) == (12 - 9, 16 - 12)


def test_a_window_always_finds_its_page(model: Decoder) -> None:
    """Every page is promised, the index holds what it can, and all sequences go on to their ends."""
    pool = _pool(model, 4 * 512)
    sequences = [pool.sequence(512) for _ in range(4)]
    assert not any(part.num_free for part in pool.parts)
    for first in range(0, 512, 64):
        for sequence in sequences:
            logits = prefill(model, pool, sequence, TEXT[first : first + 64], step=64)
            sequence.share_prefix()
        check_pages(pool, sequences)
    assert close(logits, _expected(model, TEXT[:512]))


def test_how_far_it_goes_back(model: Decoder) -> None:
    """To every length whose window is still there, exactly; other lengths are refused."""
    pool = _pool(model)
    sequence = pool.sequence(1000)
    prefill(model, pool, sequence, TEXT[:700])
    possible = [length for length in range(701) if sequence.can_trim_to(length)]
    oldest = sequence.tables[2].first
    assert oldest == (640 - 199) // 128 * 128, "what the last chunk saw"
    assert possible == [0, *range(max(oldest + 199, sequence.tables[1].first + 39), 701)]
    with pytest.raises(
        ValueError, match="500 of 700 tokens are to be forgotten; the pages of a window that 200 tokens"
    ):
        sequence.trim(500)
    assert sequence.length == 700
    sequence.trim_to(possible[1])
    logits = prefill(model, pool, sequence, TEXT[800:830])
    assert close(logits, _expected(model, TEXT[: possible[1]] + TEXT[800:830]))
    assert sequence.trim(10_000) == possible[1] + 30
    assert close(prefill(model, pool, sequence, TEXT[300:450]), _expected(model, TEXT[300:450]))
    check_pages(pool, [sequence])


def test_what_sequences_may_hold_is_reserved(model: Decoder) -> None:
    """A pool for two texts has a ring for each: a third finds pages in the full layers, and none in the windows."""
    pool = model.make_pool(4096, sequences=2, kv_bits=0, prefill_step_size=128)
    sequence = pool.sequence(1000)
    assert pool.fits(1000)
    other = sequence.fork()
    for own in (sequence, other):
        prefill(model, pool, own, TEXT[:300])
    with pytest.raises(ContextError, match="the pool is for 2 sequences"):
        pool.sequence(1)
    check_pages(pool, [sequence, other])


def test_a_window_as_wide_as_a_sequence_is_none(model: Decoder) -> None:
    pool = model.make_pool(1024, sequences=4, kv_bits=0, max_seq_len=200)
    assert [part.window for part in pool.parts] == [None, 40]
    sequence = pool.sequence(200)
    assert close(prefill(model, pool, sequence, TEXT[:190]), _expected(model, TEXT[:190]))


def test_layers_that_all_have_windows(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Then a sequence's pages are those of its ring, however long it gets."""
    model = tiny_model(tmp_path_factory.mktemp("all"), (40, 200))
    pool = model.make_pool(1024, sequences=1, kv_bits=0, prefill_step_size=128)
    assert (pool.num_pages, pool.num_free, pool.pages_needed(1000)) == (4, 4, 4)
    sequence = pool.sequence(1000)
    assert (pool.num_free, pool.fits(1)) == (0, False)
    assert close(prefill(model, pool, sequence, TEXT[:900]), _expected(model, TEXT[:900]))
