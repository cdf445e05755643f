"""Snapshots and forks of the caches of mlx-lm's models, and of a decoder with windows.

At random: caches that live through windows, forks, saves and loads give what one gives that is left alone.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.bridged import KINDS, PROMPT, bridged
from support.counts import count
from support.numbers import relative_error
from support.runs import Run

from kvant.cache import Identity, ModelCache
from kvant.errors import SnapshotError
from kvant.models import load_decoder

VOCABULARY, RESERVED = 90, 420


class _Life:
    """A cache that is left alone, and others that ought to be as it is."""

    def __init__(self, model: Any, rng: random.Random, folder: Path) -> None:
        self.model, self.rng, self.folder = model, rng, folder
        self.options = {"kv_bits": rng.choice([8, 4, 0]), "kv_group_size": 16}
        self.alone: ModelCache = model.make_cache(RESERVED, **self.options)
        self.others: list[ModelCache] = [model.make_cache(RESERVED, **self.options)]
        self.model_has_states = bool(getattr(self.alone.pool, "states", ()))
        self.resized: set[int] = set()  # ids of those whose rows may lie in another order

    def feed(self) -> None:
        new = self.rng.choice([1, 1, 2, 5, 20, 40, 150])
        if self.alone.offset + new > RESERVED:
            self.reset()
            return
        step = mx.array([[self.rng.randrange(3, VOCABULARY) for _ in range(new)]])
        expected = self.model(step, cache=self.alone)
        for cache in self.others:
            given = self.model(step, cache=cache)
            same = mx.array_equal(given, expected).item()
            assert same or (id(cache) in self.resized and relative_error(given, expected) < 1e-4)

    def trim(self) -> None:
        """As far back as all can go, or not at all: 17 tokens, and farther where one has the pages of them.

        The one that is left alone has the most.
        """
        back = self.rng.choice([1, 3, 12, 17, 18, 60])
        kept = max(0, self.alone.offset - back)
        caches = (self.alone, *self.others)
        can = [cache.can_trim_to(kept) for cache in caches]
        assert can[0] >= max(can)
        if all(can):
            for cache in caches:
                cache.trim_to(kept)
            return
        assert back > 17 or self.model_has_states
        for cache in [cache for cache, able in zip(caches, can, strict=True) if not able]:
            with pytest.raises(ValueError, match="go back no further"):
                cache.trim(back)

    def reset(self) -> None:
        for cache in (self.alone, *self.others):
            cache.reset()

    def fork(self) -> None:
        """Of any of them, and sometimes in place of the one it came from, which is then given other
        tokens.
        """
        number = self.rng.randrange(len(self.others))
        made = self.others[number].fork()
        if id(self.others[number]) in self.resized:
            self.resized.add(id(made))
        if self.rng.random() < 0.5 or len(self.others) > 3:
            dropped, self.others[number] = self.others[number], made
            if dropped.offset + 5 <= RESERVED:
                self.model(mx.array([[4] * 5]), cache=dropped)
        else:
            self.others.append(made)

    def save_and_load(self) -> None:
        """Into a cache that holds something, one with other room, or one that is made of the file."""
        number, path = self.rng.randrange(len(self.others)), self.folder / "saved.safetensors"
        cache = self.others[number]
        way = self.rng.choice(["into itself", "into another", "resized", "of the file"])
        cache.save(path)
        if way in ("into itself", "into another", "resized"):
            if way != "into itself":
                cache = self.model.make_cache(RESERVED + (77 if way == "resized" else 0), **self.options)
                self.model(mx.array([[9] * 30]), cache=cache)
            cache.load(path)
        else:
            cache = self.model.check_cache(kvant.load_prompt_cache(path))
        if way == "resized" or id(self.others[number]) in self.resized:
            self.resized.add(id(cache))
        self.others[number] = cache

    def check(self) -> None:
        for cache in self.others:
            assert (cache.batch.lengths, cache.ids) == (self.alone.batch.lengths, self.alone.ids)


@pytest.mark.parametrize("name", ["windowed", *KINDS])
def test_a_random_life(name: str, make_checkpoint: Callable[..., tuple[Path, Any]], tmp_path: Path) -> None:
    if name == "windowed":  # a decoder of kvant's with a ring and a bias split
        model: Any = load_decoder(
            make_checkpoint(use_sliding_window=True, sliding_window=24, max_window_layers=1)[0]
        )
    else:
        model = bridged(name)
    for seed in range(count(2, 60)):
        rng = random.Random(seed)
        life = _Life(model, rng, tmp_path)
        doings = [
            life.feed,
            life.feed,
            life.feed,
            life.trim,
            life.fork,
            life.save_and_load,
            life.save_and_load,
        ]
        for _ in range(count(20, 60)):
            rng.choice([*doings, life.reset] if rng.random() < 0.2 else doings)()
            life.check()


@pytest.mark.parametrize("name", ["pocket", "qwen3_next", "gemma3_text"])
def test_while_a_run_is_suspended(name: str, pocket: Any, tmp_path: Path) -> None:
    """The step that it has queued is not in the copy, and the run goes on."""
    model: Any = pocket[0] if name == "pocket" else bridged(name)
    tokens = [token for token, _ in Run(model, PROMPT, model.make_cache(64), max_tokens=12)]
    cache = model.make_cache(64)
    run = Run(model, PROMPT, cache, max_tokens=12)
    given = [next(run)[0] for _ in range(5)]
    cache.save(tmp_path / "saved")
    others = [cache.fork(), model.make_cache(64)]
    others[1].load(tmp_path / "saved")
    assert given + [token for token, _ in run] == tokens
    for other in others:
        assert other.ids == PROMPT + tokens[:4]  # all that was handed out but the last
        assert [token for token, _ in Run(model, tokens[4:5], other, max_tokens=7)] == tokens[5:]


def test_other_models_are_refused(tmp_path: Path) -> None:
    """By their layers, and windows of as many layers. tests/cache/test_snapshot_refused.py has digests."""
    model, other, wide = (
        bridged("gemma3_text"),
        bridged("qwen3_next"),
        bridged("gemma3_text", sliding_window=9),
    )
    model.identity = other.identity = wide.identity = Identity("a" * 64, "b" * 64)
    cache = model.make_cache(64)
    mx.eval(model(mx.array([PROMPT]), cache=cache))
    cache.save(tmp_path / "saved")
    with pytest.raises(SnapshotError, match="of another model: its layout has"):
        other.make_cache(64).load(tmp_path / "saved")
    with pytest.raises(SnapshotError, match=r'its layout has .*"window": 8.*; expected .*"window": 9'):
        wide.make_cache(64).load(tmp_path / "saved")
