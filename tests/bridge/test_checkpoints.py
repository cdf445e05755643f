"""Turns of models with states and windows read only what is new, and the tokens are those of a fresh
server.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.bridged import bridged
from support.counts import at_widths, count
from support.interruption import Interruption
from support.pools import check_pages
from support.turns import SIZES, STOP, TWO, ask, changed_heads, grown, server, talks, turn

from kvant.bridge.pool import pool_needs
from kvant.cache import CacheOptions, Identity
from kvant.cache.disk import DiskCache
from kvant.cache.pages import pages_for
from kvant.cache.pool import PoolSequence
from kvant.errors import ArgumentError


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "gpt_oss", "recurrent_gemma", "llama4"])
def test_a_conversation_goes_back(name: str) -> None:
    """Another question in place of the last reads the last turn, another talk what is behind the system
    prompt.

    The answers are those of a cache that was fed from the beginning.
    """
    model, rng = bridged(name), random.Random(0)
    cache, other = (model.make_cache(700, kv_bits=8, checkpoints=places) for places in (6, 0))

    def asked(text: list[int]) -> tuple[int, list[Any]]:
        other.reset()
        read, (_, answer) = cache.keep_common(text), ask(model, cache, text)
        assert answer == ask(model, other, text)[1]
        return read, answer

    text = [*turn(rng, 50), *turn(rng, 100)]
    before, known = [], 0
    for _ in range(3):
        read, answer = asked(text)
        assert read == known
        before.append(text)
        known = len(text) + len(answer) - 1
        text = [*text, *answer, *turn(rng, 40)]
    last_turn = len(before[1]) + 8 - 1  # what was known before the last question
    assert asked(before[2])[0] in (last_turn, len(before[2]) - 1)  # a window goes back a few tokens by itself
    assert asked([*before[2][:-40], *turn(rng, 30)])[0] in (last_turn, last_turn + 1)
    assert asked([*before[2][:50], *turn(rng, 60)])[0] == 50
    assert len(cache.sequence.checkpoints.arrays) > 0
    assert cache.fork().offset == cache.offset
    cache.reset()
    assert cache.sequence.checkpoints.arrays == []


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "gpt_oss"])
@pytest.mark.parametrize("whole_pages", [False, True])
def test_the_logits_are_those_without_a_break(name: str, whole_pages: bool) -> None:
    """Bit for bit, after the same chunks."""
    model, rng = bridged(name), random.Random(1)
    pool = model.make_pool(**SIZES)
    text, place = turn(rng, 300), 128 if whole_pages else 150
    whole, behind = pool.sequence(400), ((place, place + 50), (place + 50, place + 60))

    def fed(sequence: PoolSequence, start: int, end: int) -> mx.array:
        batch = pool.batch([sequence])
        logits = model.next_logits(mx.array([text[start:end]]), batch)
        mx.eval(logits, batch.state)
        batch.commit()
        return logits

    for start, end in ((0, 64), (64, 128), *([] if whole_pages else [(128, place)])):
        fed(whole, start, end)
    whole.share_prefix(last_page=not whole_pages)
    expected = [fed(whole, *each) for each in behind]
    resumed = pool.sequence(400, text[: place + 60], whole_pages=whole_pages)
    assert resumed.length == place
    for each, logits in zip(behind, expected, strict=True):
        assert mx.array_equal(fed(resumed, *each), logits)
    whole.release()
    other = pool.sequence(400, [*text[:140], 91], whole_pages=whole_pages)  # no state was kept there
    assert other.length == (128 if whole_pages or name == "gpt_oss" else 0)


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_bytes_are_planned_and_counted(name: str) -> None:
    model = bridged(name)
    sizes = {key: value for key, value in SIZES.items() if key != "options"}
    options = CacheOptions(8, 32, checkpoints=3)
    pool = model.make_pool(**sizes, options=options)
    assert pool.nbytes == sum(pool_needs(model.entries, sizes, options))
    more = pool.nbytes - model.make_pool(**sizes, options=replace(options, checkpoints=0)).nbytes
    page = {layer: layer.nbytes // part.pages.num for part, layer in pool.places}
    seen = {part: 1 if part.window is None else pages_for(part.window) + 1 for part, _ in pool.places}
    assert more == 3 * sum(page[layer] * seen[part] for part, layer in pool.places) + 3 * sum(
        state.nbytes for state in pool.states
    )
    with pytest.raises(ArgumentError, match="checkpoints is -1"):
        model.make_cache(64, checkpoints=-1)


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "llama4"])
def test_going_back_is_interrupted(name: str) -> None:
    """Anywhere: the cache holds what it held, the place that was kept, or nothing; and what is fed then is
    right.
    """
    model, rng = bridged(name, **TWO.get(name, {})), random.Random(2)
    text, behind = turn(rng, 400), turn(rng, 40)

    def fed() -> Any:
        cache = model.make_cache(500, kv_bits=8, checkpoints=2)
        for start in range(0, 400, 50):
            mx.eval(model(mx.array([text[start : start + 50]]), cache=cache))
            if start == 50:
                cache.sequence.share_prefix(last_page=True)
        return cache

    counted, expected, lengths = Interruption(0), {}, set()
    for length in (0, 100, 400):
        cache = fed()
        assert cache.sequence.go_back(length) == length
        expected[length] = model(mx.array([behind]), cache=cache)
    cache = fed()
    counted.of(partial(cache.sequence.go_back, 120))
    for seed in range(count(12, 300)):
        cache = fed()
        Interruption(random.Random(seed).randint(1, counted.lines)).of(partial(cache.sequence.go_back, 120))
        length = cache.offset
        lengths.add(length)
        assert mx.array_equal(model(mx.array([behind]), cache=cache), expected[length])
    assert len(lengths) > 1


def test_states_that_went_while_a_sequence_was_opened() -> None:
    """Its last pages are those of the checkpoint: nothing is shared then, and it is still its client's
    own.
    """
    model, rng = bridged("qwen3_next"), random.Random(3)
    pool = model.make_pool(
        256, sequences=2, max_seq_len=384, prefill_step_size=256, options=CacheOptions(checkpoints=1)
    )
    text = turn(rng, 150)
    first = pool.sequence(150, salt=b"a")
    model.next_logits(mx.array([text]), batch := pool.batch([first]))
    batch.commit()
    first.share_prefix(100, last_page=True)  # states are those of all tokens
    (other := pool.sequence(101, [*text[:100], 1], salt=b"a")).release()
    assert other.length == 0
    first.share_prefix(last_page=True)
    first.release()
    other = pool.sequence(128)
    # the page with the states becomes its own
    again = pool.sequence(256, [*text, 1], salt=b"a", whole_pages=False)
    assert (again.length, again.salt) == (0, b"a")
    check_pages(pool, [other, again])


# of the server, for four at once
DEFAULT = {"sequences": 4, "tokens": 8192, "max_seq_len": 2048, "checkpoints": 8}
MANY = ["qwen3_next", "lfm2", "gpt_oss", "gemma3_text"]


@pytest.mark.parametrize(("name", "bits"), count(at_widths(MANY[:3]), [*product(MANY, [0, 8, 4])]))
def test_many_conversations_share_a_system_prompt(name: str, bits: int) -> None:
    """More than there are checkpoints for: the end of what all of them share goes last, found by its turn's
    end.

    Without such an end it is found where the second conversation diverges from the first.
    """
    model, rng = bridged(name, **TWO.get(name, {})), random.Random(1)
    for has_end, first in ((True, 1), (False, 2)):
        scheduler, pool = server(model, kv_bits=bits, **DEFAULT)
        system = [*turn(rng, 300)[:-1], STOP if has_end else 7]
        cached = talks(scheduler, system, rng)
        assert min(cached[first:]) >= len(system)
        check_pages(pool, [])


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_later_turns_leave_the_system_prompt(name: str, sequences: int) -> None:
    """A request, its next turn, and one that shares only the system prompt; then a few more turns of both."""
    model, rng = bridged(name, **TWO.get(name, {})), random.Random(1)
    scheduler, _ = server(model, **DEFAULT | {"sequences": sequences, "checkpoints": 2 * sequences})
    system = turn(rng, 600)
    assert min(talks(scheduler, system, rng, count=1, turns=2)[1:]) >= 600
    assert min(talks(scheduler, system, rng, count=2, turns=3)) >= 600


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_a_disk_has_the_system_prompt_too(name: str, tmp_path: Path) -> None:
    """Of a server with a single checkpoint, which is restarted."""
    model, rng = bridged(name, **TWO[name]), random.Random(1)
    model.identity = Identity("a" * 64, "b" * 64)
    system, disk = turn(rng, 256), DiskCache(tmp_path / "cache", 10**9)
    for first in (1, 0):
        scheduler, pool = server(model, disk, **DEFAULT | {"checkpoints": 1})
        assert min(talks(scheduler, system, rng, count=4, turns=2)[first:]) >= 256
        check_pages(pool, [])
        assert disk.flush(30)
    disk.close()


@pytest.mark.parametrize("name", count(["qwen3_next", "gpt_oss"], MANY))
def test_replays(name: str) -> None:
    """Ends of long answers are places to go on from, wherever they lie; behind a change of the head all is
    read.

    States are kept where a head changed once it did, and so is what a window sees with its exact tail.
    """
    model = bridged(name, **TWO.get(name, {}))
    common, cached = grown(server(model, kv_bits=4, **DEFAULT)[0], random.Random(1))
    assert cached == common == [0, 665, 1232]
    scheduler, pool = server(model, kv_bits=4, **DEFAULT)
    moves_on = bool(pool.states) or pool.has_windows
    assert changed_heads(scheduler, random.Random(1)) == [0, 0 if moves_on else 500, 500, 500]
