"""A draft model beside many sequences: the tokens of no drafts, its pool whole in the end, and what fails."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.batches import alone, ids_of, run_all, scheduler_of
from support.counts import count
from support.draft_models import save_draft_model
from support.drafts import draft_by_chance
from support.pools import check_pages, tiny_model

from kvant import batch_generate
from kvant.cache.pool_batch import PoolBatch
from kvant.cache.pool_sequence import PoolSequence
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.pooled_drafts import PooledDrafts
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError
from kvant.models import Decoder, LanguageModel
from kvant.sample_utils import make_logits_processors, make_sampler
from kvant.text.tokenizer import Tokenizer

Pocket = tuple[Decoder, Tokenizer]


@pytest.fixture(scope="module")
def small(pocket: Pocket, pocket_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A random model with pocket's tokenizer, a padded vocabulary and a shorter context."""
    sizes = {"vocab_size": pocket[0].config.vocab_size + 64, "max_position_embeddings": 146}
    return kvant.load(save_draft_model(tmp_path_factory.mktemp("small") / "model", pocket_folder, **sizes))[0]


def _beside(pool: Any, model: LanguageModel, draft_model: LanguageModel, most: int = 7) -> PooledDrafts:
    made = ModelDrafts(model=draft_model, vocab_size=model.config.vocab_size, num_draft_tokens=most)
    return made.beside_pool(pool)


def _greedy(model: LanguageModel, text: list[int], count: int) -> list[int]:
    """The continuation of a text, without a cache."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(mx.argmax(model(mx.array([text + found]))[0, -1]).item()))  # type: ignore[arg-type]
    return found


def test_each_sequence_is_continued_greedily(pocket: Pocket) -> None:
    """After tokens that it drafted and others, as many as it is asked for, beside others of any length."""
    model, rng = pocket[0], Random(1)
    pool = model.make_pool(1024, sequences=3, kv_bits=0, max_seq_len=300)
    drafts = _beside(pool, model, model)
    texts = [[rng.randrange(20, 900) for _ in range(length)] for length in (3, 150, 40)]
    drafters = [drafts.for_answer(b"", 300) for _ in texts]
    for drafter, text in zip(drafters, texts, strict=True):
        drafter.extend(text)
    assert drafts.pool.num_free == drafts.pool.num_pages  # nothing before a draft is asked for
    for _ in range(count(4, 60)):
        some = rng.sample(range(3), rng.randint(1, 3))
        for n in some:
            while drafters[n].is_behind:
                drafts.feed(drafters[n])
        counts = [rng.choice((1, 3, 5)) for _ in some]
        for n, wanted, draft in zip(some, counts, drafts.propose([drafters[n] for n in some], counts), strict=True):
            assert draft == _greedy(model, texts[n], wanted)
            new = [*draft[: rng.randint(0, wanted)], rng.randrange(20, 900)]
            drafters[n].extend(new)
            texts[n] += new
    drafters.pop().release()
    again = drafts.for_answer(b"", 300)
    again.extend(texts[1][:200])
    assert again.opened()
    assert again.sequence.length >= 128  # what another one has read is not read again
    for drafter in (*drafters, again):
        drafter.release()
    assert not drafts.drafters
    check_pages(drafts.pool, [])


@pytest.mark.parametrize("own", [True, False])
def test_every_answer_as_alone(
    pocket: Pocket, small: LanguageModel, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, *, own: bool
) -> None:
    """They come, go and are cancelled; some share a prompt, some are past the draft model's context."""
    draft_by_chance(monkeypatch, own)
    model, random = pocket[0], Random(own)
    scheduler, pool = scheduler_of(model, max_batch=4, pool={"max_seq_len": 256})
    drafts = _beside(pool, model, model if own else small)
    shared = heldout_ids[:140]
    options: list[dict[str, Any]] = [
        {"prompt": shared, "answers": 3, "sampler": make_sampler(1.0, seed=3)},
        {"prompt": heldout_ids[200:205]},
        {"prompt": shared[:130], "logits_processors": make_logits_processors({5: -9.0}, 1.3)},
        {"prompt": heldout_ids[300:340], "sampler": make_sampler(0.7, 0.9, top_k=40, seed=4), "max_tokens": 20},
        {"prompt": heldout_ids[9:12], "sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
        {"prompt": heldout_ids[400:409], "drafts": None},
    ] * count(1, 10)
    made = [Request(**({"max_tokens": 12, "drafts": drafts} | each)) for each in options]
    gone = Request(heldout_ids[500:540], 100, drafts=drafts)
    waiting, told = [*made[:2], gone, *made[2:]], {}
    reasons = set[str]()
    while waiting or not scheduler.idle:
        for _ in range(min(random.randrange(3), len(waiting))):
            scheduler.submit(waiting.pop(0))
        for token in scheduler.step():
            told.setdefault(token.request, []).append(token)
        reasons.add(str(scheduler.drafts.off))
        if len(told.get(gone, ())) > 8:
            scheduler.cancel(gone)
        assert len(drafts.drafters) <= 4
    for request in made:
        assert ids_of(told[request]) == alone(model, replace(request, answers=1, drafts=None))
    together = ids_of(told[made[0]], 2)
    assert together == alone(model, replace(made[0], answers=1, drafts=None, sampler=make_sampler(1.0, seed=5)))
    assert ids_of(told[gone]) == alone(model, gone)[: len(ids_of(told[gone]))]
    assert len(ids_of(told[gone])) < 30
    counts = scheduler.drafts
    assert counts.accepted == sum(token.from_draft for tokens in told.values() for token in tokens)
    assert counts.drafted > 20
    assert counts.accepted >= (0.5 * counts.drafted if own else 0)
    if not own:
        assert "the draft model's context, 146 tokens, is full" in reasons
    check_pages(pool, [])
    check_pages(drafts.pool, [])
    assert not drafts.drafters
    assert not drafts.pool.num_sequences


def test_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the draft model's layers: what left a window is read again where a draft is taken back behind it."""
    model = tiny_model(tmp_path, (None, 40), hidden_size=64)
    draft_by_chance(monkeypatch, 2)
    scheduler, pool = scheduler_of(model, max_batch=3, pool={"max_seq_len": 512, "prefill_step_size": 64})
    drafts = _beside(pool, model, model)
    sampler, back = make_sampler(6.0, seed=3), []  # most drafts are wrong
    can_trim_to = PoolSequence.can_trim_to

    def told_whether(self: PoolSequence, num_tokens: int) -> bool:
        back.append(can_trim_to(self, num_tokens))
        return back[-1]

    monkeypatch.setattr(PoolSequence, "can_trim_to", told_whether)
    ids = [(7 + 31 * i) % 290 for i in range(150)]
    requests = [Request(ids[:n], 24, sampler, drafts=drafts) for n in (150, 20, 100)]
    told = run_all(scheduler, requests)
    for request in requests:
        assert ids_of(told[request]) == alone(model, replace(request, drafts=None))
    assert scheduler.drafts.drafted > 50
    assert not all(back)
    check_pages(drafts.pool, [])


def test_an_error_of_the_draft_model(pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers under way go on without drafts; later ones draft again."""
    draft_by_chance(monkeypatch, 3)
    model = pocket[0]
    scheduler, pool = scheduler_of(model, max_batch=3)
    drafts = _beside(pool, model, model)
    append, calls = PooledDrafts._append, []

    def fails(self: PooledDrafts, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no room on the device")
        append(self, *arguments)

    monkeypatch.setattr(PooledDrafts, "_append", fails)
    requests = [Request(heldout_ids[s : s + 60], 20, drafts=drafts) for s in (0, 70)]
    told = run_all(scheduler, requests)
    for request in requests:
        assert ids_of(told[request]) == alone(model, replace(request, drafts=None))
    assert scheduler.drafts.off == "the draft model failed: no room on the device"
    before = scheduler.drafts.accepted
    later = Request(heldout_ids[:60], 20, drafts=drafts)
    assert ids_of(run_all(scheduler, [later])[later]) == ids_of(told[requests[0]])
    assert scheduler.drafts.accepted > before
    assert not drafts.drafters
    check_pages(drafts.pool, [])


@pytest.mark.parametrize("at", count([7], [*range(1, 40)]))
def test_an_interruption(pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """In the middle of a draft: all answers end, and the draft model's pool serves the next ones."""
    draft_by_chance(monkeypatch, 4)
    model = pocket[0]
    scheduler, pool = scheduler_of(model, max_batch=3)
    drafts = _beside(pool, model, model)
    commit, calls = PoolBatch.commit, []

    def interrupted(self: PoolBatch, *arguments: Any, **options: Any) -> None:
        if self.pool is drafts.pool:
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt
        commit(self, *arguments, **options)

    monkeypatch.setattr(PoolBatch, "commit", interrupted)
    requests = [Request(heldout_ids[s : s + 30], 40, drafts=drafts) for s in (0, 70)]
    with pytest.raises(KeyboardInterrupt):
        run_all(scheduler, requests)
    assert not drafts.drafters
    check_pages(drafts.pool, [])
    request = replace(requests[0], max_tokens=20)
    assert ids_of(run_all(scheduler, [request])[request]) == alone(model, replace(request, drafts=None))


def test_batch_generate(pocket: Pocket, small: LanguageModel) -> None:
    """By what pays on this machine: the same tokens, and the bytes of both pools."""
    prompts = ["Once upon a time", "1 2 3 1 2 3", "The dog"]
    options: dict[str, Any] = {"max_tokens": [12, 6, 20], "return_token_ids": True, "kv_bits": 0}
    plain = batch_generate(*pocket, prompts, **options)
    for draft_model in count([small], [small, pocket[0]]):
        drafted = batch_generate(*pocket, prompts, draft_model=draft_model, num_draft_tokens=2, **options)
        assert drafted.token_ids == plain.token_ids
        assert drafted.texts == plain.texts
        assert drafted.stats.drafts is not None
        row = 4 * sum(2 * layer.format.num_kv_heads * layer.format.head_dim for layer in _layers(draft_model))
        more = drafted.stats.reserved_bytes - plain.stats.reserved_bytes
        assert 3 * 128 * row <= more < 1.01 * 3 * 128 * row  # and tables of biases
    for wrong, said in (
        ({"draft_model": pocket[0], "draft": "prompt"}, "draft is 'prompt'; expected 'none' beside a"),
        ({"draft_model": pocket[0], "deterministic": True}, "draft_model is given; .* refused with"),
        ({"num_draft_tokens": 3}, "num_draft_tokens is 3, which has no effect without"),
        ({"draft_model": "small"}, "draft_model is a str; expected a model of kvant.load"),
    ):
        with pytest.raises(ArgumentError, match=said):
            batch_generate(*pocket, ["a"], **wrong)
    pool = pocket[0].make_pool(256, sequences=1)
    drafts = ModelDrafts(model=pocket[0], vocab_size=pocket[0].config.vocab_size)
    with pytest.raises(ArgumentError, match="draft_model is given for a single sequence"):
        Scheduler(pocket[0], pool, max_batch=1).submit(Request([5], drafts=drafts))


def _layers(model: LanguageModel) -> Any:
    return model.make_pool(128, sequences=1, kv_bits=0).layers
