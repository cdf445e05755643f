"""A draft model: what it proposes, what it reads, when it stops, and which one is refused."""

from pathlib import Path
from random import Random
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.batches import alone, ids_of, run_all
from support.conversations import count_fed
from support.counts import count
from support.drafts import KnownDrafts, draft_by_chance
from support.kinds import load_kind
from support.pools import check_pages
from support.runs import Run

from kvant import batch_generate
from kvant.cache import CacheOptions, ModelCache
from kvant.cache.pool import Pool
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.model_drafts import ModelDrafter, ModelDrafts, PooledDrafts
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import ModelError
from kvant.models import Decoder, LanguageModel
from kvant.text.tokenizer import Tokenizer

Pocket = tuple[Decoder, Tokenizer]
PROMPT = [(7 * i) % 1000 + 20 for i in range(40)]
ONE_AND_MANY = pytest.mark.parametrize("sequences", [1, 3])


def _pool(model: LanguageModel, sequences: int, prefill_step_size: int = 512) -> Pool | ModelCache:
    """A cache of one sequence, or a pool of more."""
    if sequences == 1:
        return model.make_cache(300, kv_bits=0)
    return model.make_pool(
        1024,
        sequences=sequences,
        max_seq_len=300,
        prefill_step_size=prefill_step_size,
        options=CacheOptions(kv_bits=0),
    )


def _drafts(model: LanguageModel, pool: Pool | ModelCache) -> PooledDrafts:
    own = pool.pool if isinstance(pool, ModelCache) else pool
    return ModelDrafts(model=model, num_draft_tokens=7).for_pool(own)


def _proposed(drafters: list[ModelDrafter], counts: list[int]) -> list[list[int]]:
    """What they propose, once all have read their texts."""
    while (found := drafters[0].drafts.propose(drafters, counts)) is None:
        pass
    return found


def _greedy(model: LanguageModel, text: list[int], count: int) -> list[int]:
    """The continuation of a text, without a cache."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(mx.argmax(model(mx.array([text + found]))[0, -1]).item()))  # type: ignore[arg-type]
    return found


@ONE_AND_MANY
def test_each_sequence_is_continued_greedily(pocket: Pocket, sequences: int) -> None:
    """After tokens that it drafted and others, as many as it is asked for, beside others of any length."""
    model, rng = pocket[0], Random(1)
    drafts = _drafts(model, _pool(model, sequences))
    texts = [[rng.randrange(20, 900) for _ in range(length)] for length in (150, 3, 40)[:sequences]]
    drafters = [drafts.for_answer(b"", 300) for _ in texts]
    for drafter, text in zip(drafters, texts, strict=True):
        drafter.extend(text)
    if not drafts.pool.single:
        assert drafts.pool.num_free == drafts.pool.num_pages  # nothing before a draft is asked for
    for _ in range(count(4, 60)):
        some = rng.sample(range(sequences), rng.randint(1, sequences))
        counts = [rng.choice((1, 3, 5)) for _ in some]
        for n, wanted, draft in zip(
            some, counts, _proposed([drafters[n] for n in some], counts), strict=True
        ):
            assert draft == _greedy(model, texts[n], wanted)
            new = [*draft[: rng.randint(0, wanted)], rng.randrange(20, 900)]
            drafters[n].extend(new)
            texts[n] += new
    drafters.pop(0).release()
    again = drafts.for_answer(b"", 300)
    again.extend(texts[0][:200])
    assert again.opened()
    assert again.sequence.length >= 128  # what another one has read is not read again
    for drafter in (*drafters, again):
        drafter.release()
    assert not drafts.drafters
    if not drafts.pool.single:
        check_pages(drafts.pool, [])


def test_it_feeds_only_what_it_has_not_seen(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fed = pocket[0], count_fed(monkeypatch)
    drafter = _drafts(model, _pool(model, 1)).for_answer(b"", 64)
    drafter.extend(PROMPT)
    assert not fed
    [first] = _proposed([drafter], [4])
    assert fed == [39, 1, 1, 1, 1]
    for new, expected in (([*first, 50], [2, 1]), ([60], [1, 1]), ([61, 62, 63], [3, 1])):
        fed.clear()
        drafter.extend(new)
        _proposed([drafter], [2])
        assert fed == expected


@pytest.mark.parametrize("unknown", [1280, 2**31, -1])
def test_no_id_that_the_model_does_not_have(
    pocket: Pocket, monkeypatch: pytest.MonkeyPatch, unknown: int
) -> None:
    """A draft ends before it: a draft model's vocabulary may be padded further."""
    draft_by_chance(monkeypatch, 2)
    model = pocket[0]
    plain = alone(model, Request(PROMPT, 20))
    text = [*PROMPT, *(unknown if number % 3 == 2 else token for number, token in enumerate(plain))]
    run = Run(
        model,
        PROMPT,
        model.make_cache(64, kv_bits=0),
        max_tokens=20,
        drafts=KnownDrafts(text=text, mistakes=0),
    )
    assert [token for token, _ in run] == plain
    assert run.drafts is not None
    assert run.drafts.drafted == run.drafts.accepted > 3


def test_a_text_that_the_draft_model_does_not_know(small: LanguageModel) -> None:
    drafter = _drafts(small, _pool(small, 1)).for_answer(b"", 64)
    drafter.extend([5, small.config.vocab_size])
    assert _proposed([drafter], [3]) == [[]]
    assert drafter.ended == f"token {small.config.vocab_size} is not in the draft model's vocabulary"


@ONE_AND_MANY
def test_an_error(
    pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """The answers under way go on without drafts; later ones draft again."""
    draft_by_chance(monkeypatch, 3)
    model = pocket[0]
    pool = _pool(model, sequences, prefill_step_size=16)
    scheduler: Scheduler
    if isinstance(pool, ModelCache):
        scheduler = CacheScheduler(model, pool, prefill_step_size=16)
    else:
        scheduler = Scheduler(model, pool, max_batch=sequences)
    drafts = _drafts(model, pool)
    feed, calls = PooledDrafts._feed, []

    def fails(self: PooledDrafts, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == min(2, sequences):
            raise MemoryError("no room on the device")
        feed(self, *arguments)

    monkeypatch.setattr(PooledDrafts, "_feed", fails)
    requests = [Request(heldout_ids[s : s + 60], 20, drafts=drafts) for s in (0, 70)[:sequences]]
    told = run_all(scheduler, requests)
    for request in requests:
        assert ids_of(told[request]) == alone(model, request)
    assert scheduler.drafts.off == "the draft model failed: no room on the device"
    before = scheduler.drafts.accepted
    later = Request(heldout_ids[:60], 20, drafts=drafts)
    assert ids_of(run_all(scheduler, [later])[later]) == ids_of(told[requests[0]])
    assert scheduler.drafts.accepted > before
    assert scheduler.drafts.off is None
    assert not drafts.drafters
    if not drafts.pool.single:
        check_pages(drafts.pool, [])


def test_bytes_of_both_pools(pocket: Pocket, small: LanguageModel) -> None:
    options: dict[str, Any] = {"max_tokens": [12, 6, 20], "kv_bits": 0}
    made = [
        batch_generate(*pocket, ["Once upon a time", "1 2 3 1 2 3", "The dog"], **options, **more)
        for more in ({}, {"draft_model": small, "num_draft_tokens": 2})
    ]
    layers = small.make_pool(128, sequences=1, options=CacheOptions(kv_bits=0)).layers
    row = 4 * sum(2 * layer.format.num_kv_heads * layer.format.head_dim for layer in layers)
    more = made[1].stats.reserved_bytes - made[0].stats.reserved_bytes
    assert 3 * 128 * row <= more < 1.01 * 3 * 128 * row  # and tables of biases


def test_another_tokenizer_is_refused(pocket: Pocket, tmp_path: Path) -> None:
    model, tokenizer = pocket
    other, _ = load_kind("qwen2", tmp_path / "other")

    def ask() -> None:
        kvant.stream_generate(model, tokenizer, PROMPT, max_tokens=4, draft_model=other)

    for _ in range(2):
        with pytest.raises(ModelError, match="tokenizer differs: token 0 is '<unk>' there and"):
            ask()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="was changed after the draft model was loaded"):
        ask()
    other.identity = None
    with pytest.raises(ModelError, match=f"has 128 tokens, and the model's {model.config.vocab_size}"):
        ask()
