"""Drafts of a model's own head: what it computes, and that texts are those without it."""

import shutil
import threading
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from support.bridged import write_mlx_lm, write_words
from support.counts import at_widths
from support.drafts import draft_by_chance
from support.head_oracle import HeadOracle
from support.heads import KINDS, NAMES, read_head, write_head

import kvant
from kvant import stream_generate
from kvant.cache import CacheOptions
from kvant.cache.disk import DiskCache
from kvant.engine.head_drafts import HeadDrafts
from kvant.engine.load import find_model
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError, SnapshotError
from kvant.models.mtp import HeadedModel
from kvant.plan import plan, read_folder, split_pairs
from kvant.sample_utils import make_sampler

IDS = [(7 + 31 * i) % 61 + 2 for i in range(12)]
TEXT = "Once upon a time there was a fox named Pip who lived in the field. One day Pip went out."
TOLERANCE = 1e-4  # of the largest logit; weights are in float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_what_is_published(kind: str, tmp_path: Path) -> None:
    """Its logits behind a prompt that was fed in parts, and behind a token that it drafted."""
    folder = write_head(kind, tmp_path / kind, tokenizer=True)
    model = cast(Any, kvant.load(folder, mtp=True)[0])
    tensors, config = read_head(folder)
    _, layer, beside, parts = NAMES[kind]
    text = "model.language_model." if kind.startswith("qwen3_5") else "model."
    oracle = HeadOracle(
        {name: np.array(array, np.float64) for name, array in tensors.items()},
        config,
        layer=layer,
        beside=beside,
        parts=cast(Any, parts),
        ends=(f"{text}embed_tokens.weight", "lm_head.weight"),
        hidden_first=parts[0] == "input_proj",
        passes_normalized=parts[0] != "eh_proj",
    )
    cache = model.make_cache(64, kv_bits=0)
    hidden = []
    for first, last in ((0, 7), (7, 11)):
        hidden.append(model._outputs(mx.array([IDS[first:last]]), cache.batch))
        mx.eval(hidden[-1])
        cache.commit()
    states = np.array(mx.concatenate(hidden, axis=1)[0], np.float64)  # behind the first 11 tokens
    before = np.concatenate([np.zeros_like(states[:1]), states])
    ids = IDS
    given = model.hidden_before_of(cache.batch)
    for _ in range(2):
        expected, outputs = oracle(ids, before)
        fed = mx.array([ids[11:]])
        cache.batch.begin(fed)
        logits, output = model.guess(fed, given, cache.batch)
        found = np.array(logits[0], np.float64)
        cache.batch.end_step()
        assert np.abs(found - expected[-1]).max() < TOLERANCE * np.abs(expected[-1]).max()
        ids = [*ids, int(found.argmax())]
        before = np.concatenate([before, outputs[-1:]])
        given = mx.concatenate([given, output[:, None]], axis=1)
    drafted = model.draft([IDS[11]], 2, cache.batch)
    assert drafted.tolist() == [ids[12:]]
    assert cache.offset == 11
    assert isinstance(model, HeadedModel)


@pytest.mark.parametrize(("kind", "bits"), at_widths(KINDS))
def test_texts_are_those_without_drafts(
    kind: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one answer, at every draft length, and of the next prompt on the same cache."""
    draft_by_chance(monkeypatch, bits)
    folder = write_head(kind, tmp_path / kind, tokenizer=True)
    told, drafted = [], 0
    for draft in ("none", "mtp"):
        model, tokenizer = kvant.load(folder, mtp=draft == "mtp")
        cache = model.make_cache(128, kv_bits=bits)
        texts = []
        for seed in range(2):
            options: dict[str, Any] = {"draft": draft, "max_tokens": 30, "prompt_cache": cache}
            answer = [
                *stream_generate(model, tokenizer, IDS, sampler=make_sampler(0.7, seed=seed), **options)
            ]
            drafted += 0 if answer[-1].drafts is None else answer[-1].drafts.drafted
            texts.append([each.token for each in answer])
        told.append((texts, cache.ids))
    assert told[0] == told[1]
    assert drafted > 40


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_the_heads_rows_follow_the_cache(headed: tuple[Any, Any], bits: int, tmp_path: Path) -> None:
    """They are quantized, forked, saved and loaded with the others; a file without them is refused."""
    model, tokenizer = headed
    cache = model.make_cache(300, kv_bits=bits)
    kvant.generate(model, tokenizer, TEXT, prompt_cache=cache, draft="mtp", max_tokens=140)
    assert len(cache.formats) == 5
    assert {own.kv_bits for own in cache.formats} == {bits}
    expected = [row.tolist() for row in cache.sequence.copied_rows(cache.pool.layers[-1], 0)]
    assert np.abs(expected[0]).sum(axis=-1).all()  # every token has a row
    cache.save(tmp_path / "cache")
    loaded = model.make_cache(300, kv_bits=bits)
    loaded.load(tmp_path / "cache")
    for other in (loaded, cache.fork()):
        assert [row.tolist() for row in other.sequence.copied_rows(other.pool.layers[-1], 0)] == expected
    plain, _ = kvant.load("pocket")
    headless = plain.make_cache(300, kv_bits=bits)
    kvant.generate(plain, tokenizer, TEXT, prompt_cache=headless, max_tokens=2)
    headless.save(tmp_path / "headless")
    with pytest.raises(SnapshotError):
        model.make_cache(300, kv_bits=bits).load(tmp_path / "headless")
    with pytest.raises(ValueError, match="4 layers; expected 5"):
        kvant.generate(model, tokenizer, TEXT, prompt_cache=headless)


def test_a_prompt_that_is_shared_or_read_from_disk_drafts_as_well(
    headed: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's rows are in the pages that answers share: no prompt is read again for its sake."""
    draft_by_chance(monkeypatch, 1, (3,))
    model, tokenizer = headed
    ids = tokenizer.encode(TEXT) * 10
    accepted = []
    for folder in (tmp_path, tmp_path):
        pool = model.make_pool(2048, sequences=2, max_seq_len=512, options=CacheOptions(8))
        pool.use_disk(DiskCache(folder))
        scheduler = Scheduler(model, pool, max_batch=2)
        for _ in range(2):
            request = Request(ids, 60, drafts=HeadDrafts.of(model).for_pool(pool))
            *_, last = scheduler.answer([request])
            accepted.append((last.cached_tokens >= 128, scheduler.drafts.accepted))
        assert pool.disk is not None
        pool.disk.disk.close()
    assert [shared for shared, _ in accepted] == [False, True, True, True]
    first, second = accepted[0][1], accepted[2][1]
    assert min(first, accepted[1][1] - first, second, accepted[3][1] - second) > 15


def test_what_a_checkpoint_lacks_is_named(pocket_folder: Path, tmp_path: Path) -> None:
    """And what does not go together with a head."""
    for kind, name in (("glm4_moe", "model.layers.3.eh_proj"), ("mimo", "model.mtp_layers.0.input_proj")):
        folder = write_mlx_lm(tmp_path / kind, kind)
        write_words(folder, 64)
        with pytest.raises(ArgumentError, match=f"draft is 'mtp'; .* {name}.weight is missing"):
            kvant.load(folder, mtp=True)
    folder = write_mlx_lm(tmp_path / "gemma3_text", "gemma3_text")
    write_words(folder, 64)
    with pytest.raises(ArgumentError, match=r"heads of deepseek_v3, glm4_moe, .*, and none of gemma3_text"):
        kvant.load(folder, mtp=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copyfile(pocket_folder / name, tmp_path / name)
    with pytest.raises(ArgumentError, match=r"tensor model\.mtp_layers\.0\.input_proj\.weight is missing"):
        kvant.load(tmp_path, mtp=True)
    model, _ = kvant.load(write_head("mimo", tmp_path / "head", tokenizer=True), mtp=True)
    pool = model.make_pool(256, sequences=2, options=CacheOptions(kv_bits=0))
    drafts = HeadDrafts.of(model).for_pool(pool)
    with pytest.raises(ArgumentError, match="draft is 'mtp'; drafts for several sequences"):
        Scheduler(model, pool, max_batch=2).submit(Request([5], drafts=drafts))


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_its_memory_is_planned(kind: str | None, tmp_path: Path) -> None:
    """The head's weights, and its layer of the cache to the byte."""
    folder = find_model("pocket") if kind is None else write_head(kind, tmp_path / kind, tokenizer=True)
    model, _ = kvant.load(folder, mtp=True)
    checkpoint = read_folder(folder, head=True)
    made = plan(checkpoint, max_kv_size=256, split_pairs=split_pairs(model), device="cpu")
    cache = model.make_cache(256)
    assert made.cache == cache.nbytes
    weights = made.weights if kind else plan(checkpoint.unpack(), max_kv_size=256, device="cpu").weights
    assert model.nbytes <= weights < 1.02 * model.nbytes


def test_a_head_that_fails_ends_drafts_and_nothing_else(
    headed: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_by_chance(monkeypatch, 2)
    model, tokenizer = headed
    plain = kvant.generate(model, tokenizer, TEXT, max_tokens=20)
    monkeypatch.setattr(type(model), "guess", lambda *_: 1 / 0)
    answer = [*stream_generate(model, tokenizer, TEXT, max_tokens=20, draft="mtp")]
    assert "".join(each.text for each in answer) == plain
    assert answer[-1].drafts is not None
    assert answer[-1].drafts.off == "the head failed: division by zero"


@pytest.mark.parametrize("kind", [None, "mimo", "qwen3_next"])
def test_a_cache_goes_from_thread_to_thread(kind: str | None, tmp_path: Path) -> None:
    """What the head's next row needs was computed with the last step."""
    folder = find_model("pocket") if kind is None else write_head(kind, tmp_path / kind, tokenizer=True)
    model, tokenizer = kvant.load(folder, mtp=True)
    told = []
    for is_alone in (True, False):
        cache = model.make_cache(64, kv_bits=0)
        for first in range(3):

            def answer(ids: list[int], cache: Any = cache) -> None:
                options: dict[str, Any] = {"prompt_cache": cache, "max_tokens": 6, "draft": "mtp"}
                told.extend(each.token for each in stream_generate(model, tokenizer, ids, **options))

            if is_alone:
                answer(IDS[first:])
                continue
            thread = threading.Thread(target=answer, args=(IDS[first:],))
            thread.start()
            thread.join()
    assert told[: len(told) // 2] == told[len(told) // 2 :]
    assert len(told) > 20
