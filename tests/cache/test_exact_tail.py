"""Exact tails through a model: no way of feeding, going back, copying or interrupting reads a wrong row.

Exact rows hold NaN until they are written.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.counts import count
from support.exact_tails import POISON, RING, SINKS, SLACK, TAIL
from support.interruption import Interruption
from support.numbers import peak_bytes
from support.pools import TEXT, check_pages, close, decode, prefill

from kvant.cache import CacheOptions, ModelCache, exact_tail
from kvant.cache.disk import DiskCache
from kvant.cache.identity import Identity
from kvant.cache.layer_format import stored_bytes
from kvant.cache.pool import Pool, PoolSequence, pool_bytes
from kvant.models import Decoder
from kvant.models.caches import count_formats, longest_sequence
from kvant.operators.exact_rows import ExactSpan

LONG = 400  # tokens: more than a tail has
TAIL_OPTIONS = CacheOptions(4)
ROUNDING = 1e-3  # of the largest logit; without a tail, or with half of it, they differ by far more


def _poisoned(pool: Pool) -> Pool:
    for layer in pool.layers:
        for array in layer.exact_arrays:
            array[:] = mx.full(array.shape, POISON, array.dtype)
            mx.eval(array)
    return pool


def _pool(model: Decoder, options: CacheOptions = TAIL_OPTIONS, **sizes: Any) -> Pool:
    sizes = {"sequences": 4, "prefill_step_size": 300, "max_seq_len": 1000} | sizes
    return _poisoned(model.make_pool(6000, **sizes, options=options))


def _cache(model: Decoder, reserved: int = 1000, **options: Any) -> ModelCache:
    cache = model.make_cache(reserved, **{"kv_bits": 4} | options)
    _poisoned(cache.pool)
    return cache


def _fed(model: Decoder, length: int, step: int = 100) -> PoolSequence:
    """Return a sequence of a pool with the first tokens of the text."""
    pool = _pool(model)
    sequence = pool.sequence(1000)
    if length:
        prefill(model, pool, sequence, TEXT[:length], step)
    return sequence


def _span(sequence: PoolSequence) -> ExactSpan:
    assert sequence.tail is not None
    return sequence.tail


def _next(model: Decoder, sequence: PoolSequence, ids: Sequence[int]) -> mx.array:
    """Return the logits (1, vocab) after more tokens."""
    logits = prefill(model, sequence.pool, sequence, ids, len(ids))
    assert mx.isfinite(logits).all()
    return logits


def _every_logits(model: Decoder, sequence: PoolSequence, ids: Sequence[int], step: int) -> mx.array:
    """Return the logits (S, vocab) of all tokens of a text, which is fed in chunks."""
    batch = sequence.pool.batch([sequence])
    found = []
    for first in range(0, len(ids), step):
        found.append(model.every_logits(mx.array([ids[first : first + step]]), batch)[0])
        mx.eval(found[-1])
        batch.commit()
    return mx.concatenate(found)


def _limited(model: Decoder, length: int, like: ExactSpan) -> PoolSequence:
    """Return a sequence of so many tokens that uses no other exact rows than a span has."""
    made = _fed(model, length)
    span = _span(made)
    assert like.start >= min(span.start, length)
    span.start = max(span.start, like.start)
    span.sinks = like.sinks
    return made


@pytest.mark.parametrize("kind", ["plain", "windows"])
@pytest.mark.parametrize("alone", [False, True])
def test_logits_do_not_depend_on_the_chunks(request: pytest.FixtureRequest, kind: str, alone: bool) -> None:
    model: Decoder = request.getfixturevalue(kind)
    found = []
    for step in (300, 1, 3, 17, 18, 100):
        sequence = _cache(model).sequence if alone else _pool(model).sequence(1000)
        found.append(_every_logits(model, sequence, TEXT[:300], step))
    without = _pool(model, replace(TAIL_OPTIONS, tail=False)).sequence(1000)
    assert not close(_every_logits(model, without, TEXT[:300], 300), found[0], 20 * ROUNDING)
    for logits in found[1:]:
        assert close(logits, found[0], ROUNDING)
        assert (logits.argmax(axis=-1) == found[0].argmax(axis=-1)).mean().item() > 0.99


def test_sequences_in_company_have_the_logits_of_each_alone(plain: Decoder) -> None:
    lengths = (300, 2, 110, 123)
    pool = _pool(plain)
    sequences = [pool.sequence(400) for _ in lengths]
    alone = [_pool(plain).sequence(400) for _ in lengths]
    for length, *own in zip(lengths, sequences, alone, strict=True):
        for sequence in own:
            prefill(plain, sequence.pool, sequence, TEXT[:length], 100)
    for new in (1, 4, 18, 40, 1, 17):
        ids = [TEXT[sequence.length :][:new] for sequence in sequences]
        batch = pool.batch(sequences)
        logits = plain.every_logits(mx.array(ids), batch)
        mx.eval(logits)
        batch.commit()
        for b, sequence in enumerate(alone):
            expected = _every_logits(plain, sequence, ids[b], new)
            assert close(logits[b], expected, ROUNDING)


@pytest.mark.parametrize("kind", ["plain", "windows"])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("new", [4, 17, 18, 60])
def test_rejected_drafts_leave_no_trace(
    request: pytest.FixtureRequest, kind: str, alone: bool, new: int
) -> None:
    """Steps that are committed in part or not at all, one after the other."""
    model: Decoder = request.getfixturevalue(kind)
    drafting = _cache(model).sequence if alone else _pool(model).sequence(1000)
    plain = _pool(model).sequence(1000)
    for sequence in (drafting, plain):
        prefill(model, sequence.pool, sequence, TEXT[:200], 100)
    batch = drafting.pool.batch([drafting])
    for right in (0, 1, new // 2, 0, new - 1, new, 2):
        ids = TEXT[drafting.length :][:right]
        mx.eval(model.every_logits(mx.array([[*ids, *[5] * (new - right)]]), batch))
        batch.commit(right)
        if ids:
            _next(model, plain, ids)
        assert _span(drafting).is_whole(drafting.length)
        if right == 2:
            mx.eval(model.every_logits(mx.array([[7] * new]), batch))  # it is never committed
        fork = drafting.fork() if not alone else drafting.pool.make_cache(1000).sequence
        if alone:
            fork.load(drafting)
        expected = plain.fork()
        for token in TEXT[drafting.length :][:3]:
            assert close(_next(model, fork, [token]), _next(model, expected, [token]), ROUNDING)
        fork.release()
        expected.release()


@pytest.mark.parametrize("new", [5, 17, 18, 60])
def test_an_abandoned_step_is_not_written_by_a_later_one(plain: Decoder, new: int) -> None:
    """Its batch takes another step after other batches of the sequence had theirs."""
    sequence, expected = _fed(plain, 200), _fed(plain, 200)
    abandoned = sequence.pool.batch([sequence])
    mx.eval(plain.every_logits(mx.array([[5] * new]), abandoned))
    _next(plain, sequence, TEXT[200 : 200 + new])
    _next(plain, expected, TEXT[200 : 200 + new])
    ids = mx.array([TEXT[200 + new : 203 + new]])
    logits = plain.every_logits(ids, abandoned)
    assert close(logits[:, -1], _next(plain, expected, ids[0].tolist()), ROUNDING)


@pytest.mark.parametrize("before", [2, 130, 300])
@pytest.mark.parametrize("new", [5, 40, 130])
def test_ctrl_c_at_any_line_of_a_step(plain: Decoder, before: int, new: int) -> None:
    """The sequence has a part of its exact rows then, or all; none that was not written."""
    base = _fed(plain, before)
    pool = base.pool
    ids = TEXT[before : before + new]

    def step(sequence: PoolSequence) -> None:
        batch = pool.batch([sequence])
        mx.eval(plain.next_logits(mx.array([ids]), batch))
        batch.commit()

    counted = Interruption(0)
    first = base.fork()
    counted.of(partial(step, first))
    first.release()
    lines = counted.lines
    seen = set()
    for at in [*range(1, lines, count(lines // 6, 7)), *range(lines - 130, lines, count(3, 1))]:
        sequence = base.fork()
        assert Interruption(at).of(partial(step, sequence))
        assert sequence.length in (before, before + new)
        seen.add((sequence.length, _span(sequence).is_whole(sequence.length)))
        expected = _limited(plain, sequence.length, _span(sequence))
        more = TEXT[sequence.length :][:3]
        assert close(_next(plain, sequence, more), _next(plain, expected, more), ROUNDING), at
        sequence.release()
    check_pages(pool, [base])
    assert (before + new, True) in seen
    assert (before, True) in seen


@pytest.mark.parametrize("before", [2, 150])
def test_ctrl_c_and_the_same_batch_again(plain: Decoder, before: int) -> None:
    """What was committed and not yet written is written by the batch's next step."""
    base = _fed(plain, before)
    pool = base.pool

    def commit(batch: Any) -> None:
        batch.commit()

    lines = 0
    at = 0
    while at <= lines:
        sequence = base.fork()
        batch = pool.batch([sequence])
        mx.eval(plain.next_logits(mx.array([TEXT[before : before + 40]]), batch))
        interruption = Interruption(at)
        assert interruption.of(partial(commit, batch)) == bool(at)
        lines = lines or interruption.lines
        expected = _fed(plain, sequence.length)
        for _ in range(2):
            more = TEXT[sequence.length :][:2]
            logits = plain.next_logits(mx.array([more]), batch)
            mx.eval(logits)
            batch.commit()
            given = _next(plain, expected, more)
            # A write that was interrupted itself may leave fewer exact rows.
            if _span(sequence).start <= max(SINKS, before + 41 - TAIL):
                assert close(logits, given, ROUNDING), at
            assert mx.isfinite(logits).all()
        sequence.release()
        at += 1 if at == 0 else count(2, 1)


def test_ctrl_c_at_any_line_of_a_trim(plain: Decoder) -> None:
    base = _fed(plain, LONG)
    counted = Interruption(0)
    sequence = base.fork()
    counted.of(partial(sequence.trim_to, 250))
    sequence.release()
    lengths = set()
    for at in range(1, counted.lines + 1):
        sequence = base.fork()
        assert Interruption(at).of(partial(sequence.trim_to, 250))
        lengths.add(sequence.length)
        if at % count(4, 1) == 0:
            span = _span(sequence)
            expected = _limited(plain, sequence.length, replace(span, start=min(span.start, sequence.length)))
            for new in (3, 20):
                more = TEXT[sequence.length :][:new]
                assert close(_next(plain, sequence, more), _next(plain, expected, more), ROUNDING), at
        sequence.release()
    assert lengths == {LONG, 250}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("back", [1, 16, 17, 50, 120, 200, 398])
@pytest.mark.parametrize("step", [100, 10])
def test_what_a_trimmed_sequence_reads(plain: Decoder, step: int, back: int, alone: bool) -> None:
    """Exactly what it had, within the slack. Farther back, quantized rows in place of those that are
    gone.
    """
    sequence = _cache(plain).sequence if alone else _pool(plain).sequence(1000)
    prefill(plain, sequence.pool, sequence, TEXT[:LONG], step)
    sequence.trim(back)
    left = LONG - back
    assert _span(sequence).start == max(SINKS, min(left, LONG - RING))
    assert _span(sequence).sinks == SINKS
    if back <= SLACK + 1:
        expected = _fed(plain, left)
        assert _span(sequence).is_whole(left)
    else:
        expected = _limited(plain, left, _span(sequence))
        assert not _span(sequence).is_whole(left) or left < SINKS
    for new in (1, 3, 20, 70, 1):
        more = TEXT[sequence.length :][:new]
        assert close(_next(plain, sequence, more), _next(plain, expected, more), ROUNDING)


def test_a_long_trim_costs_some_exactness(plain: Decoder) -> None:
    """Else the tests of partial tails could not fail."""
    sequence = _fed(plain, LONG)
    sequence.trim_to(250)
    fresh = _fed(plain, 250)
    more = TEXT[250:270]
    given = _every_logits(plain, sequence, more, 1)
    assert not close(given, _every_logits(plain, fresh, more, 1), 5 * ROUNDING)


def test_a_conversation_goes_back_so_far_that_its_tail_is_whole_again(plain: Decoder) -> None:
    cache = _cache(plain)
    prefill(plain, cache.pool, cache.sequence, TEXT[:LONG], 100)
    assert cache.keep_common([*TEXT[: LONG - 10], 5, 6]) == LONG - 10
    assert cache.keep_common([*TEXT[:250], 5, 6]) == 250 - TAIL
    _next(plain, cache.sequence, TEXT[250 - TAIL : 250])
    assert _span(cache.sequence).is_whole(250)
    assert cache.keep_common([*TEXT[:60], 5, 6]) == 0
    assert (_span(cache.sequence).sinks, _span(cache.sequence).start) == (SINKS, SINKS)
    expected = _next(plain, _pool(plain).sequence(1000), TEXT[:300])
    assert close(_next(plain, cache.sequence, TEXT[:300]), expected, ROUNDING)


@pytest.mark.parametrize("kind", ["plain", "windows"])
def test_a_conversation_goes_back_to_a_checkpoint_with_its_tail(
    request: pytest.FixtureRequest, kind: str
) -> None:
    model: Decoder = request.getfixturevalue(kind)
    cache = _cache(model, checkpoints=2)
    prefill(model, cache.pool, cache.sequence, TEXT[:200], 100)
    cache.sequence.share_prefix(last_page=True)
    kept = model.make_cache(1000, kv_bits=4)
    kept.sequence.load(cache.sequence)
    prefill(model, cache.pool, cache.sequence, TEXT[200:700], 100)
    assert cache.keep_common([*TEXT[:240], 5, 6]) == 200
    assert _span(cache.sequence).is_whole(200)
    more = [TEXT[200:203], [5], TEXT[:30]]
    for ids in more:
        assert mx.array_equal(_next(model, cache.sequence, ids), _next(model, kept.sequence, ids))
    assert cache.keep_common([*TEXT[:200], 5]) == 200
    assert _span(cache.sequence).is_whole(200)


@pytest.mark.parametrize("kind", ["plain", "windows"])
@pytest.mark.parametrize("length", [0, 2, 60, 300])
@pytest.mark.parametrize("back", [0, 1, 150])
def test_copies_go_on_with_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, length: int, back: int
) -> None:
    """Forks, sequences of other pools, and files."""
    model: Decoder = request.getfixturevalue(kind)
    cache = _cache(model)
    if length:
        prefill(model, cache.pool, cache.sequence, TEXT[:length], 100)
    if cache.can_trim_to(max(0, length - back)):
        cache.trim(back)
    copies = [_cache(model, reserved).sequence for reserved in (400, 1000)]
    copies.append(_pool(model).sequence(500))
    for made in copies:
        made.load(cache.sequence)
    copies += [copies[-1].fork(), cache.fork().sequence]
    cache.save(tmp_path / "saved")
    loaded = _cache(model, 600)
    loaded.load(tmp_path / "saved")
    loaded.save(tmp_path / "again")
    again = _cache(model, 600)
    again.load(tmp_path / "again")
    copies += [loaded.sequence, again.sequence]
    for ids in (TEXT[300:301], TEXT[301:304], TEXT[304:330], [5]):
        expected = _next(model, cache.sequence, ids)
        for number, sequence in enumerate(copies):
            assert mx.array_equal(_next(model, sequence, ids), expected), number


@pytest.mark.parametrize("loads", ["file", "sequence"])
def test_caches_with_a_tail_and_without_one_take_each_others_tokens(
    plain: Decoder, tmp_path: Path, loads: str
) -> None:
    for given, taken in ((False, True), (True, False)):
        source, cache = _cache(plain, kv_tail=given), _cache(plain, kv_tail=taken)
        prefill(plain, source.pool, source.sequence, TEXT[:300], 100)
        if loads == "file":
            source.save(tmp_path / "saved")
            cache.load(tmp_path / "saved")
        else:
            cache.sequence.load(source.sequence)
        assert cache.ids == TEXT[:300]
        for layer, other in zip(cache.pool.layers, source.pool.layers, strict=True):
            rows = cache.sequence.copied_rows(layer, 0)
            assert all(map(mx.array_equal, rows, source.sequence.copied_rows(other, 0)))
        if taken:
            assert (_span(cache.sequence).sinks, _span(cache.sequence).start) == (0, 300)
            prefill(plain, cache.pool, cache.sequence, TEXT[300:330], 30)
            again = _cache(plain)
            if loads == "file":
                cache.save(tmp_path / "again")
                again.load(tmp_path / "again")
            else:
                again.sequence.load(cache.sequence)
            assert _span(again.sequence) == _span(cache.sequence)
            expected = _next(plain, cache.sequence, TEXT[330:340])
            assert mx.array_equal(_next(plain, again.sequence, TEXT[330:340]), expected)
        else:
            assert cache.sequence.tail is None
        for new in (1, 3, 30, 100, 1):
            _next(plain, cache.sequence, TEXT[cache.offset :][:new])
        if taken:
            assert _span(cache.sequence).is_whole(cache.offset)


def test_ctrl_c_at_any_line_of_a_load(plain: Decoder) -> None:
    source = _fed(plain, 150)
    counted = Interruption(0)
    cache = _cache(plain)
    counted.of(lambda: cache.sequence.load(source))
    for at in [
        *range(1, counted.lines, count(counted.lines // 12, 3)),
        *range(counted.lines - 60, counted.lines, count(2, 1)),
    ]:
        cache.reset()
        _poisoned(cache.pool)
        assert Interruption(at).of(lambda: cache.sequence.load(source))
        assert cache.offset in (0, 150)
        ids = TEXT[cache.offset :][:30]
        _next(plain, cache.sequence, ids)
        _next(plain, cache.sequence, [5])


def _share(model: Decoder, pool: Pool, length: int, **options: Any) -> PoolSequence:
    sequence = pool.sequence(1000)
    prefill(model, pool, sequence, TEXT[:length], 100)
    sequence.share_prefix(last_page=True, **options)
    return sequence


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_sequence_begins_at_a_checkpoint_with_its_exact_rows(plain: Decoder, is_exact: bool) -> None:
    pool = _pool(plain, replace(TAIL_OPTIONS, checkpoints=2))
    first = _share(plain, pool, 300)
    begins = {"whole_pages": False, "is_exact": is_exact}
    second = pool.sequence(1000, TEXT[:400], **begins)
    assert second.length == 300
    assert _span(second) == replace(_span(first), page=_span(second).page)
    assert mx.array_equal(_next(plain, second, TEXT[300:310]), _next(plain, first, TEXT[300:310]))
    assert pool.sequence(1000, TEXT[:400], is_exact=is_exact).length == (0 if is_exact else 128)
    second.release()
    shorter = pool.sequence(1000, [*TEXT[:280], 5, 6], **begins)
    assert shorter.length == (0 if is_exact else 280 - TAIL)


@pytest.mark.parametrize("is_exact", [False, True])
def test_windows_begin_at_a_checkpoint_or_not_at_all(windows: Decoder, is_exact: bool) -> None:
    """What they no longer have cannot be fed again."""
    for checkpoints in (0, 2):
        pool = _pool(windows, replace(TAIL_OPTIONS, checkpoints=checkpoints))
        first = _share(windows, pool, 256)
        second = pool.sequence(1000, TEXT[:400], is_exact=is_exact)
        assert second.length == (256 if checkpoints else 0)
        span = _span(second)
        if not checkpoints:
            assert span == replace(_span(_fed(windows, 0)), page=span.page)
            continue
        assert span == replace(_span(first), page=span.page)
        for ids in (TEXT[second.length : 270], [5]):
            assert close(_next(windows, second, ids), _next(windows, first, ids), ROUNDING)


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_a_sequence_that_begins_within_anothers_text_feeds_a_tails_tokens_again(
    plain: Decoder, checkpoints: int
) -> None:
    pool = _pool(plain, replace(TAIL_OPTIONS, checkpoints=checkpoints))
    _share(plain, pool, 384)
    for shared, whole_pages, length in (
        (380, True, 128),
        (380, False, 272),
        (250, False, 128),
        (60, False, 0),
    ):
        prompt = [*TEXT[:shared], 5, 6]
        sequence = pool.sequence(1000, prompt, whole_pages=whole_pages)
        assert sequence.length == length
        span = _span(sequence)
        assert (span.sinks, span.start) == ((0, length) if length else (SINKS, SINKS))
        expected = _limited(plain, length, span)
        for ids in (prompt[length:], [7], [8]):
            assert close(_next(plain, sequence, ids), _next(plain, expected, ids), ROUNDING)
        sequence.release()
        exactly = pool.sequence(1000, prompt, is_exact=True)
        assert exactly.length == 0
        exactly.release()


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_what_a_disk_cache_gives_back(plain: Decoder, tmp_path: Path, checkpoints: int) -> None:
    disk = DiskCache(tmp_path / "disk")
    options = replace(TAIL_OPTIONS, checkpoints=checkpoints)

    def pool() -> Pool:
        made = _pool(plain, options)
        made.identity = Identity("a" * 64, "b" * 64)
        made.use_disk(disk)
        return made

    first = _share(plain, pool(), 256)
    disk.flush(30)
    again = pool()
    assert not again.prefixes.fetch(TEXT[:400], most=99)
    sequence = again.sequence(1000, TEXT[:400])
    assert sequence.length == (256 if checkpoints else 128)
    expected = first if checkpoints else _limited(plain, 128, _span(sequence))
    for ids in (TEXT[sequence.length : 270], [5]):
        assert close(_next(plain, sequence, ids), _next(plain, expected, ids), ROUNDING)
    disk.close()


def test_a_conversation_reads_its_tail_from_a_disk_cache(plain: Decoder, tmp_path: Path) -> None:
    disk = DiskCache(tmp_path / "disk")
    caches = [_cache(plain) for _ in range(2)]
    for cache in caches:
        cache.pool.identity = Identity("a" * 64, "b" * 64)
        cache.use_disk(disk)
    first, second = caches
    prefill(plain, first.pool, first.sequence, TEXT[:256], 100)
    first.sequence.share_prefix(last_page=True)
    disk.flush(30)
    assert second.pool.sequence(1000, TEXT[:400]).length == 256
    for ids in (TEXT[256:270], [5]):
        assert mx.array_equal(_next(plain, second.sequence, ids), _next(plain, first.sequence, ids))
    disk.close()


WRONG: list[Callable[[exact_tail.TailCopy], exact_tail.TailCopy]] = [
    lambda own: replace(own, length=255),
    lambda own: replace(own, sinks=3),
    lambda own: replace(own, start=2),
    lambda own: replace(own, start=257),
    lambda own: replace(own, start=256 - RING - 1),
    lambda own: replace(own, start=own.start + 1),
    lambda own: replace(own, rows=own.rows[:1]),
    lambda own: replace(own, rows=[*own.rows, own.rows[0]]),
    lambda own: replace(own, rows=[array.astype(mx.float32) for array in own.rows]),
    lambda own: replace(own, rows=[array[:, :1] for array in own.rows]),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_tail_on_disk_is_none_and_goes(plain: Decoder, tmp_path: Path, number: int) -> None:
    disk = DiskCache(tmp_path / "disk")
    pool = _pool(plain)
    pool.identity = Identity("a" * 64, "b" * 64)
    pool.use_disk(disk)
    sequence = pool.sequence(1000)
    prefill(plain, pool, sequence, TEXT[:256], 100)
    tail = sequence.copied_tail()
    files = pool.disk
    assert tail is not None
    assert files is not None
    for name, own in ((b"right", tail), (b"wrong", WRONG[number](tail))):
        files.put_end(name, [], own)
    disk.flush(30)
    assert len(list(disk.folder.glob("*.kv"))) == 2
    states, right = files.end(b"right", 256)
    assert states is None
    assert right is not None
    assert all(map(mx.array_equal, right.rows, tail.rows))
    assert files.end(b"wrong", 256) == (None, None)
    assert len(list(disk.folder.glob("*.kv"))) == 1
    disk.close()


@pytest.mark.parametrize("bits", [(8, True), (4, None), (4, False), (0, None)])
def test_its_bytes_are_those_that_were_planned(windows: Decoder, bits: tuple[int, bool | None]) -> None:
    sizes = {"tokens": 3000, "sequences": 3, "prefill_step_size": 300}
    kv_bits, kv_tail = bits
    stored = CacheOptions.from_keywords(kv_bits=kv_bits, kv_tail=kv_tail, checkpoints=2)
    pool = windows.make_pool(**sizes, options=stored)
    pairs = [len(layer.self_attn.qkv_bias.pairs) for layer in windows.layers]
    most = longest_sequence(windows.config, sizes["tokens"], None)
    formats = count_formats(windows.config, stored, dtype=windows.dtype, max_seq_len=most, split_pairs=pairs)
    planned = pool_bytes(formats, **sizes, max_seq_len=most, checkpoints=stored.checkpoints)
    assert pool.nbytes == planned
    tails = sum(array.nbytes for layer in pool.layers for array in layer.exact_arrays)
    page = sum(stored_bytes(own) for layer in pool.layers for own in layer.format.tail_pages(1))
    assert tails == 3 * page
    assert bool(page) == ((kv_bits == 4 and kv_tail is not False) or bool(kv_tail))
    sequences = [_share(windows, pool, 300) for _ in range(2)]
    decode(windows, pool, sequences, [5, 6])
    assert pool.nbytes == planned
    assert tails == sum(array.nbytes for layer in pool.layers for array in layer.exact_arrays)


def test_exact_rows_are_written_in_place(plain: Decoder) -> None:
    """What a step takes does not depend on how many sequences there could be."""
    peaks = []
    for number in (4, 400):
        pool = _pool(plain, replace(TAIL_OPTIONS, checkpoints=1), sequences=number)
        sequences = [pool.sequence(900) for _ in range(3)]
        for sequence in sequences:
            prefill(plain, pool, sequence, TEXT[:200], 100)
        copies: list[Any] = []
        work: list[Callable[[], object]] = [
            lambda pool=pool, own=sequences: decode(plain, pool, own, [5, 6, 7]),
            lambda pool=pool, own=sequences: _next(plain, own[0], TEXT[:100]),
            lambda pool=pool, own=sequences: _next(plain, own[0], TEXT[:10]),
            lambda own=sequences, copies=copies: copies.append(own[1].copied_tail()),
            lambda own=sequences, copies=copies: own[1].take_tail(copies[0]),
            lambda own=sequences: own[0].fork(500).release(),
            lambda own=sequences: own[2].share_prefix(last_page=True),
            lambda pool=pool, own=sequences: decode(plain, pool, own, [5, 6, 7]),
        ]
        peaks.append([max(0, peak_bytes(step)) for step in work])
    smallest = min(array.nbytes for layer in pool.layers for array in layer.exact_arrays)
    assert max(abs(a - b) for a, b in zip(*peaks, strict=True)) < 1_000_000 < smallest / 1.5


@pytest.mark.parametrize("new", [1, 9])
def test_writes_that_no_query_reads_do_not_wait(windows: Decoder, new: int) -> None:
    """A window of 40 tokens is inside the exact tail: its quantized rows were never read, and each write
    waited with its tokens, for as long as the sequence grew.
    """
    pool = _pool(windows)
    sequence = pool.sequence(900)
    prefill(windows, pool, sequence, TEXT[:300], 100)

    def decode_some() -> None:
        for first in range(0, 20 * new, new):
            mx.eval(_next(windows, sequence, TEXT[first : first + new]))

    decode_some()
    mx.synchronize()
    before = mx.get_active_memory()
    decode_some()
    mx.synchronize()
    assert mx.get_active_memory() - before < 10_000


def test_pages_of_exact_rows_are_given_back(plain: Decoder) -> None:
    pool = _pool(plain)
    for _ in range(3):
        sequences = [pool.sequence(100) for _ in range(4)]
        assert sorted(_span(sequence).page for sequence in sequences) == [0, 1, 2, 3]
        prefill(plain, pool, sequences[0], TEXT[:50])
        for sequence in sequences:
            sequence.release()
            sequence.release()
