"""Sequences of a pool that share pages: prefixes, forks, and what happens to a shared page that is
written.
"""

import hashlib
from array import array
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from support.pools import TEXT, check_pages, close, decode, next_logits, prefill

from kvant.cache import CacheOptions
from kvant.cache.checkpoints import Checkpoint
from kvant.cache.pages import Pages
from kvant.cache.pool import Pool
from kvant.cache.prefix import PrefixIndex, as_text, digests, extended, root
from kvant.errors import ContextError
from kvant.models import Decoder


def _pool(model: Decoder, tokens: int = 4096, **options: Any) -> Pool:
    sizes = {"sequences": 8, "prefill_step_size": 128, "options": CacheOptions(kv_bits=0)}
    return model.make_pool(tokens, **sizes | options)


def test_a_shared_prefix_is_there_at_once_and_no_byte_is_copied(windows: Decoder) -> None:
    pool = _pool(windows)
    first = pool.sequence(700)
    prefill(windows, pool, first, TEXT[:600])
    first.share_prefix()
    mx.reset_peak_memory()
    second = pool.sequence(700, TEXT[:513])
    assert mx.get_peak_memory() == 0, "nothing was allocated since"
    assert (second.length, second.ids) == (512, TEXT[:512])
    assert close(prefill(windows, pool, second, TEXT[512:600]), next_logits(windows, TEXT[:600]))
    for sequence in (first, second):
        sequence.release()
    assert pool.num_free == pool.num_pages
    assert pool.sequence(600, TEXT[:512]).length == 0, (
        "the windows' pages at 384 tokens were given back long ago"
    )


def test_what_is_not_the_same_text_of_the_same_owner_is_not_shared(plain: Decoder) -> None:
    pool = _pool(plain, 8192)
    own = pool.sequence(600, salt=b"a")
    prefill(plain, pool, own, TEXT[:300])
    own.share_prefix(upto=255)
    assert pool.sequence(700, TEXT[:700], salt=b"a").length == 128
    own.share_prefix()
    assert pool.sequence(700, TEXT[:700], salt=b"a").length == 256
    assert pool.sequence(700, TEXT[:256], salt=b"a").length == 128, "a token is to be fed"
    assert pool.sequence(700, TEXT[:700], salt=b"b").length == 0
    assert pool.sequence(700, TEXT[:700]).length == 0
    other = [*TEXT[:100], 1 + TEXT[100], *TEXT[101:600]]
    assert pool.sequence(600, other, salt=b"a").length == 0, (
        "its second page has the same tokens behind another first"
    )
    assert pool.sequence(700, [*TEXT[:200], 1, *TEXT[201:700]], salt=b"a").length == 128


def test_no_salt_is_another_salts_first_page() -> None:
    """Else whoever knows the salt and the tokens would read its second page as their own first."""
    (page,) = digests(TEXT[:128], b"a")
    forged = hashlib.blake2b(b"a", digest_size=32).digest(), root(b"a")
    assert all(root(known + array("q", TEXT[:128]).tobytes()) != page for known in forged)


def test_the_rows_of_a_page_that_begins_alike_are_copied(plain: Decoder) -> None:
    pool = _pool(plain)
    first = pool.sequence(400, salt=b"a")
    prefill(plain, pool, first, TEXT[:300])
    first.share_prefix(last_page=True)

    def held(ids: list[int], **options: Any) -> int:
        sequence = pool.sequence(400, ids, **{"salt": b"a", "whole_pages": False, **options})
        sequence.release()
        return sequence.length

    assert held(TEXT[:400], whole_pages=True) == 256
    assert held(TEXT[:400], salt=b"b") == 0
    assert held(TEXT[:300]) == 299, "a token is to be fed"
    assert held([*TEXT[:270], 1 + TEXT[270], 5]) == 256, "14 tokens are fed as fast"
    elsewhere = pool.sequence(400, [*TEXT[:200], 1 + TEXT[200], *TEXT[201:300]], salt=b"a", whole_pages=False)
    assert elsewhere.length == 200, "in the middle of a whole page"
    second = pool.sequence(400, TEXT[:380], salt=b"a", whole_pages=False)
    assert second.ids == TEXT[:300]
    # The owner goes on in a page of its own, the readers in their copies.
    assert close(decode(plain, pool, [first], [5]), next_logits(plain, [*TEXT[:300], 5]))
    assert close(prefill(plain, pool, second, TEXT[300:380]), next_logits(plain, TEXT[:380]))
    assert close(prefill(plain, pool, elsewhere, [7, 8]), next_logits(plain, [*TEXT[:200], 7, 8]))
    assert held([*TEXT[:300], 9]) == 300
    check_pages(pool, [first, elsewhere, second])


def test_pages_that_only_the_index_holds_make_room_the_least_recently_used_first(plain: Decoder) -> None:
    pool = _pool(plain, 1024)  # 8 pages
    texts = [[i, *TEXT[:400]] for i in range(2)]
    for text in texts:
        sequence = pool.sequence(400)
        prefill(plain, pool, sequence, text[:384])
        sequence.share_prefix()
        sequence.release()
    assert pool.num_free == 8
    assert pool.fits(1024)
    used = pool.sequence(300, texts[0][:257])  # the first two pages of the first text are used now
    assert used.length == 256
    used.release()
    large = pool.sequence(4 * 128)  # two are free; the others are promised, and nothing goes yet
    assert (pool.num_free, len(pool.groups[0].prefix.pages)) == (4, 6)
    again = pool.sequence(385, [*texts[1][:384], 0])
    assert again.length == 384
    again.release()
    prefill(plain, pool, large, TEXT[:256])
    assert len(pool.groups[0].prefix.pages) == 6
    pool.sequence(300, texts[0][:257]).release()  # as it was used last before
    prefill(plain, pool, large, TEXT[256:512])  # the last page of both texts goes
    assert (pool.num_free, len(pool.groups[0].prefix.pages)) == (4, 4)
    check = pool.sequence(300, texts[0][:300])
    assert check.length == 256
    decode(plain, pool, [check], [9])  # for its third page the second text's second one goes
    for sequence in (large, check):
        sequence.release()
    assert pool.sequence(401, texts[1]).length == 128


def test_a_shared_page_that_is_written_is_copied(plain: Decoder) -> None:
    """Where there is no page for the copy, the step is refused before anything is written."""
    pool = _pool(plain, 640)  # 5 pages
    parent = pool.sequence(384)
    prefill(plain, pool, parent, TEXT[:256])
    child, third = parent.fork(384), pool.sequence(128)
    child.trim_to(100)
    with pytest.raises(ContextError, match="1 shared pages need a copy to be written; 0 of 5 pages are free"):
        decode(plain, pool, [child], [9])
    assert child.length == 100
    third.release()
    assert close(decode(plain, pool, [child], [9]), next_logits(plain, [*TEXT[:100], 9]))
    assert close(decode(plain, pool, [parent], [9]), next_logits(plain, [*TEXT[:256], 9]))
    check_pages(pool, [parent, child])


def test_a_page_that_only_the_index_shares_is_written_without_a_copy_where_there_is_no_room(
    plain: Decoder,
) -> None:
    pool = _pool(plain, 256)  # 2 pages
    sequence = pool.sequence(256)
    prefill(plain, pool, sequence, TEXT[:256])
    sequence.share_prefix()
    sequence.trim_to(100)
    assert close(decode(plain, pool, [sequence], [9]), next_logits(plain, [*TEXT[:100], 9]))
    sequence.release()
    assert pool.sequence(256, TEXT[:256]).length == 0


def test_room_is_said_with_its_numbers(plain: Decoder) -> None:
    pool = _pool(plain, 1024)
    sequence = pool.sequence(300)
    assert (pool.num_pages, pool.num_free, pool.page_size) == (8, 5, 128)
    assert [(pool.pages_needed(n), pool.fits(n)) for n in (640, 641)] == [(5, True), (6, False)]
    small, full = _pool(plain, 8 * 128), _pool(plain, 1024, sequences=1)
    one, other = small.sequence(1), full.sequence(1)
    prefill(plain, small, one, TEXT[:1])
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: pool.sequence(700), ContextError, "700 tokens need 6 more pages of 128; 5 of 8 are free"),
        (
            lambda: pool.sequence(1025),
            ContextError,
            "1025 tokens is asked for; this pool allows at most 1024",
        ),
        (
            lambda: pool.sequence(100, TEXT[:700]),
            ContextError,
            "700 tokens; max_tokens of its sequence is 100",
        ),
        (lambda: pool.sequence(0), ValueError, "max_tokens is 0; expected a positive int"),
        (lambda: sequence.fork(700), ContextError, "700 tokens need 6 more pages"),
        (other.fork, ContextError, "the pool is for 1 sequences; all of them are in use"),
        (lambda: decode(plain, small, [one], [5]), ContextError, "1 of the 1 reserved tokens are used"),
        (
            lambda: prefill(plain, pool, sequence, TEXT, 129),
            ValueError,
            "129 new tokens in one step; .* takes 128",
        ),
    ]
    for use, kind, message in refused:
        with pytest.raises(kind, match=message):
            use()
    check_pages(pool, [sequence])


def test_release(plain: Decoder) -> None:
    pool = _pool(plain, 1024)
    sequence, other = pool.sequence(300), pool.sequence(300)
    batch = pool.batch([sequence, other])
    mx.eval(plain.next_logits(mx.array([[1], [2]]), batch))
    sequence.release()
    sequence.release()
    assert pool.num_free == 5
    batch.commit()
    assert (sequence.length, other.length) == (0, 1), "a sequence released during a step counts nothing"
    for use in (
        lambda: pool.batch([sequence]).begin(mx.array([[1]])),
        lambda: sequence.trim(0),
        sequence.fork,
        sequence.share_prefix,
        lambda: other.load(sequence),
        lambda: sequence.load(other),
    ):
        with pytest.raises(RuntimeError, match="the sequence was released"):
            use()


def test_states_go_with_their_page_and_text() -> None:
    """Of two texts that go on behind the same one; a page that is given up takes its states along."""
    pages = Pages(4)
    index, before = PrefixIndex(pages, checkpoints=1), root(b"")
    for number, ids in enumerate(([1, 2], [3])):
        digest = extended(before, ids)
        (page,) = pages.allocate(1)
        index.put(digest, page, before, ids)
        pages.release([page])
        index.keep(digest, Checkpoint(text := as_text(ids, b""), len(text), states=number))
        assert index.checkpoints.states(digest) == number
        assert [index.state_lengths(before, [first, 2, 5]) for first in (1, 3)] == ([[2], []], [[], [1]])[
            number
        ]
    assert len(index.pages) == 1  # nobody goes on in a part of a page without states
    index.give_up(1)
    assert index.checkpoints.states(extended(before, [3])) is None
    assert pages.num_free == 4
