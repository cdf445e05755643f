"""What rank 0 tells of its steps is enough to repeat them: the same logits, from another rank's cache and
pool.

The other rank is a second model in this process, with all layers. Parts of a model are tested by themselves.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from support.drafts import KnownDrafts, draft_by_chance
from support.interruption import Interruption
from support.pools import tiny_model
from support.runs import Run

from kvant import embed
from kvant.cache import CacheOptions, ModelCache
from kvant.engine.request import Request
from kvant.engine.sampler import Sampler
from kvant.engine.scheduler import Scheduler
from kvant.errors import ContextError, RanksError, SnapshotError
from kvant.models import Decoder
from kvant.ranks.follow import Follower
from kvant.ranks.group import Ranks
from kvant.ranks.lead import Lead
from kvant.sample_utils import make_sampler

WINDOWS: dict[str, tuple[int | None, ...]] = {"all": (None, None), "mixed": (None, 40, 200)}
TEXT = [(5 * i * i + 11 * i + 97) % 290 for i in range(700)]


class Recorded:
    """A decoder that keeps the logits of its steps."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.logits: list[mx.array] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        return self._kept(found) if name in ("next_logits", "every_logits", "every_hidden_state") else found

    def __call__(self, inputs: mx.array, cache: ModelCache) -> mx.array:
        return self._kept(self._model.__call__)(inputs, cache=cache)

    def _kept(self, step: Callable[..., mx.array]) -> Callable[..., mx.array]:
        @wraps(step)
        def kept(*given: Any, **named: Any) -> mx.array:
            self.logits.append(step(*given, **named))
            return self.logits[-1]

        return kept


class Loopback:
    """The other rank, in place of a guard: it does what it is told at once."""

    rank, size = 0, 2

    def __init__(self, model: Decoder) -> None:
        self.part = Recorded(model)
        self.follower = Follower(self.part)  # type: ignore[arg-type]
        self.messages: list[Mapping[str, Any]] = []
        self._reply: Any = None

    def tell(self, message: Mapping[str, Any]) -> None:
        self.messages.append(message)
        self._reply = self.follower.obey(message)

    def gather(self, value: Any) -> list[Any]:
        return [value, self._reply]


@pytest.fixture(params=WINDOWS)
def led(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Lead, Loopback]:
    model = tiny_model(tmp_path, WINDOWS[request.param], hidden_size=128)
    model.divided = True  # as of a rank's part
    other = Loopback(model)
    return Lead(Recorded(model), Ranks(mx.distributed.init()), other), other  # type: ignore[arg-type]


def check(given: list[mx.array], other: Loopback) -> None:
    """The other rank computed the same, bitwise."""
    for own, theirs in zip(given, other.part.logits, strict=True):
        assert mx.array_equal(own, theirs)
    given.clear()
    other.part.logits.clear()


def test_embeddings(led: tuple[Lead, Loopback]) -> None:
    """Texts that are fed together, in chunks and with padding."""
    lead, other = led
    texts = [TEXT[:90], TEXT[5:20], TEXT[7:9]]
    tokenizer: Any = SimpleNamespace(folder=None)
    part: Any = lead.local
    vectors = embed(lead, tokenizer, texts, pooling="mean", prefill_step_size=32)
    assert len(part.logits) > 3
    check(part.logits, other)
    assert mx.array_equal(vectors, embed(part, tokenizer, texts, pooling="mean", prefill_step_size=32))


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_a_cache_that_grows_and_goes_back(led: tuple[Lead, Loopback], bits: int) -> None:
    lead, other = led
    draw = random.Random(bits)
    cache = lead.make_cache(600, kv_bits=bits, kv_group_size=32)
    most = 0
    for step in range(40):
        new = draw.choice([1, 1, 1, 3, 30])
        if cache.offset + new > 600 or draw.random() < 0.05:
            cache.reset()
        start = cache.offset
        check([lead.next_logits(mx.array([TEXT[start : start + new]]), cache.batch)], other)
        match draw.randrange(5):
            case 0:  # given up
                cache.batch.end_step()
            case 1:  # some of it
                cache.commit(draw.randrange(new + 1))
            case _:
                cache.commit()
        if cache.offset and draw.random() < 0.2 and cache.can_trim_to(cache.offset - 1):
            cache.trim(1)
        most = max(most, cache.offset)
        if step % 10 == 9:
            lead.feed(mx.array([TEXT[:2]]), cache.batch)
            cache.commit()
    assert most > 60  # past the narrow window
    start = cache.offset
    check([lead(mx.array([TEXT[:2]]), cache=cache)], other)
    assert cache.offset == start + 2
    check([lead.next_logits(mx.array([TEXT[:1]]), cache.batch)], other)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_drafts_and_their_interruption(
    led: tuple[Lead, Loopback], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is accepted is committed everywhere, also where a run is left, or broken off in the middle of a
    step.
    """
    lead, other = led
    draft_by_chance(monkeypatch, bits)
    draw = random.Random(bits)
    sampler: Sampler = make_sampler(temp=0.8, seed=3)
    cache = lead.make_cache(600, kv_bits=bits, kv_group_size=32)
    own = lead.local
    assert isinstance(own, Recorded)
    alone = own.make_cache(600, kv_bits=bits, kv_group_size=32)
    left = 0

    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return logits

    for turn in range(6):
        prompt = TEXT[7 * turn : 7 * turn + draw.choice([1, 3, 60])]
        plain = [token for token, _ in Run(own, prompt, alone, max_tokens=20, sampler=sampler)]
        own.logits.clear()
        given = cache.ids
        drafts = KnownDrafts(text=[*prompt, *plain], mistakes=0.1, seed=turn)
        processors = [fail] if turn % 3 == 2 else []
        options = {"sampler": sampler, "drafts": drafts, "logits_processors": processors}
        run = Run(lead, prompt, cache, max_tokens=20, **options)
        left = draw.randrange(2, 19)
        if processors:
            with pytest.raises(KeyboardInterrupt):
                list(run)
        else:
            for _ in range(left if turn % 3 else 20):
                next(run)
            run.scheduler.close()
        assert run.generated == plain[: len(run.generated)]
        assert cache.ids == [*given, *prompt, *run.generated[:-1]]
        check(own.logits, other)
        alone.sequence.go_back(cache.offset)
        if alone.ids != cache.ids:  # a window cannot go back so far
            list(Run(own, cache.ids, alone, max_tokens=1))
            own.logits.clear()
    assert "every_logits" in [message.get("call") for message in other.messages]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_pool_of_requests_that_share_and_fork(
    led: tuple[Lead, Loopback], monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    lead, other = led
    pool = lead.make_pool(
        4 * 640, sequences=4, prefill_step_size=128, options=CacheOptions(kv_bits=bits, kv_group_size=32)
    )
    scheduler = Scheduler(lead, pool, max_batch=4)
    requests = [
        Request(TEXT[:300], max_tokens=30, answers=2, sampler=make_sampler(temp=0.9, seed=1)),
        Request(TEXT[:140] + TEXT[7:60], max_tokens=20),
        Request(TEXT[:300], max_tokens=9),
    ]
    for request in requests:
        scheduler.submit(request)
    answers: dict[Request, list[int]] = {request: [*request.prompt] for request in requests}
    ended = 0
    while not scheduler.idle:
        for token in scheduler.step():
            ended += token.finish_reason is not None
            answers[token.request] += [token.token or 0] if not token.answer else []
    assert ended == 4
    assert any(copies for message in other.messages if "copies" in message for copies in message["copies"])
    follower_pools = other.follower._pools.values()
    assert not any(group.take_copies() for each in follower_pools for group in each.groups)  # none pile up
    own = lead.local
    assert isinstance(own, Recorded)
    assert len(own.logits) > 30
    check(own.logits, other)
    draft_by_chance(monkeypatch, 1)  # what was written is drafted, for two of the three
    for number, (request, text) in enumerate(answers.items()):
        scheduler.submit(replace(request, drafts=KnownDrafts(text=text, mistakes=0.1) if number else None))
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.drafts.accepted > 0
    check(own.logits, other)


def test_exact_rows_of_a_pool(led: tuple[Lead, Loopback]) -> None:
    """Steps of few and of many tokens, committed in part, abandoned and interrupted, of forks and others."""
    lead, other = led
    pool = lead.make_pool(
        4 * 640, sequences=4, prefill_step_size=200, options=CacheOptions(kv_bits=4, kv_group_size=32)
    )
    own = lead.local
    assert isinstance(own, Recorded)
    draw = random.Random(1)
    sequences = [pool.sequence(600) for _ in range(2)]
    interrupted = 0
    for _ in range(60):
        some = draw.sample(sequences, draw.randint(1, len(sequences)))
        new = draw.choice([1, 4, 17, 18, 40, 150])
        for sequence in some:
            if sequence.room < new:
                back = draw.choice([3, 200])
                sequence.trim_to(back if sequence.can_trim_to(back) else 0)
        batch = pool.batch(some)
        ids = mx.array([TEXT[sequence.length :][:new] for sequence in some])
        for _ in range(draw.choice([1, 1, 2])):  # a step that is begun again was abandoned
            lead.every_logits(ids, batch)
            check(own.logits, other)
        match draw.randrange(4):
            case 0:
                batch.commit([draw.randrange(new + 1) for _ in some])
            case 1:
                interrupted += Interruption(draw.randrange(10, 120)).of(batch.commit)
            case _:
                batch.commit()
        if len(sequences) > 3:
            sequences.pop().release()
        elif draw.random() < 0.3:
            sequences.append(some[0].fork())
    assert interrupted > 3


def test_what_is_refused(led: tuple[Lead, Loopback], tmp_path: Path) -> None:
    lead, other = led
    cache = lead.make_cache(40)
    told = len(other.messages)
    with pytest.raises(ContextError):
        lead.next_logits(mx.array([TEXT[:41]]), cache)
    foreign = lead.local.make_cache(40)
    with pytest.raises(RanksError, match="not of this model"):
        lead.next_logits(mx.array([TEXT[:4]]), foreign)
    assert len(other.messages) == told  # nobody waits for a step that does not come
    for refused in (cache.fork, lambda: cache.save(tmp_path / "file"), lambda: cache.load(tmp_path / "file")):
        with pytest.raises(SnapshotError, match="divided over several ranks"):
            refused()
    pool = lead.make_pool(256, sequences=1)
    sequence = pool.sequence(100)
    for refused in (lambda: foreign.sequence.load(sequence), lambda: sequence.load(foreign.sequence)):
        with pytest.raises(SnapshotError, match="divided over several ranks"):
            refused()


def test_memory_is_given_back_everywhere(led: tuple[Lead, Loopback]) -> None:
    lead, other = led
    first = lead.make_cache(40)
    lead.next_logits(mx.array([TEXT[:4]]), first)
    del first
    lead.make_cache(40, kv_bits=4, kv_format="pmx", kv_group_size=16, bias_split=False)
    assert list(other.follower._caches) == [1]
    assert {own.transform_name for own in other.follower._caches[1].formats} == {""}


def test_a_call_on_sequences_of_a_pool(led: tuple[Lead, Loopback]) -> None:
    """It commits on every rank; the other one keeps no sequences and had nothing to drop."""
    lead, other = led
    pool = lead.make_pool(2048, sequences=2, max_seq_len=600, options=CacheOptions(kv_bits=8))
    batch = pool.batch([pool.sequence(600), pool.sequence(600)])
    for start in (0, 60):
        given = lead(mx.array([TEXT[start : start + 60], TEXT[100 + start : 160 + start]]), cache=batch)
        check([given], other)
    assert batch.lengths == (120, 120)
