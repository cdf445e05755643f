"""Windows, forks, saves and loads together, at random: caches that live through them give what an untouched one gives.

Every cache that is alive is given the same tokens. One of them is never saved, loaded or forked.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.counts import count
from support.numbers import relative_error
from support.tiny_models import build

from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.cache import ModelCache
from kvant.models import load_decoder

VOCABULARY, RESERVED = 90, 160


@pytest.fixture(scope="module", autouse=True)
def _without_compilation() -> Iterator[None]:
    """It would call a C++ compiler, the first time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


class _Life:
    """A cache that is left alone, and others that ought to be as it is."""

    def __init__(self, model: Any, rng: random.Random, folder: Path) -> None:
        self.model, self.rng, self.folder = model, rng, folder
        self.options = {"kv_bits": rng.choice([8, 4, 0]), "kv_group_size": 16}
        self.alone: ModelCache = model.make_cache(RESERVED, **self.options)
        self.others: list[ModelCache] = [model.make_cache(RESERVED, **self.options)]
        self.resized: set[int] = set()  # ids of those whose rows may lie in another order

    def feed(self) -> None:
        """The same step to all."""
        new = self.rng.choice([1, 1, 2, 5, 20, 40])
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
        """As far back as the one that is left alone can go, or not at all: the others can as far, and no farther."""
        back = self.rng.choice([1, 3, 12, 17, 18, 60])
        kept = max(0, self.alone.offset - back)
        if not self.alone.can_trim_to(kept):
            for cache in self.others:
                assert not cache.can_trim_to(kept)
                with pytest.raises(ValueError, match="go back no further"):
                    cache.trim(back)
            return
        for cache in (self.alone, *self.others):
            cache.trim_to(kept)

    def reset(self) -> None:
        for cache in (self.alone, *self.others):
            cache.reset()

    def fork(self) -> None:
        """Of any of them, and sometimes in place of the one it came from, which is then given other tokens."""
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
            assert (cache.lengths, cache.ids) == (self.alone.lengths, self.alone.ids)


@pytest.fixture
def windowed(make_checkpoint: Callable[..., tuple[Path, Any]]) -> Any:
    """A decoder of kvant's with a ring and a bias split."""
    folder, _ = make_checkpoint(use_sliding_window=True, sliding_window=24, max_window_layers=1)
    return load_decoder(folder)


@pytest.mark.parametrize("name", ["windowed", "gemma3_text", "qwen3_next", "llama4"])
def test_a_random_life(name: str, windowed: Any, tmp_path: Path) -> None:
    model = windowed
    if name != "windowed":
        model = BridgedModel(build(name)[0], BridgedConfig(name, 97, None), mx.float32)
    for seed in range(count(4, 60)):
        rng = random.Random(seed)
        life = _Life(model, rng, tmp_path)
        doings = [life.feed, life.feed, life.feed, life.trim, life.fork, life.save_and_load, life.save_and_load]
        for _ in range(count(20, 60)):
            rng.choice([*doings, life.reset] if rng.random() < 0.2 else doings)()
            life.check()
