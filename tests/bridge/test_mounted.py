"""kvant's caches in mlx-lm's own batches, its server's store of prompts and its files."""

import copy
import io
import weakref
from functools import partial
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.models.cache import make_prompt_cache as mlx_lms_cache
from support.bridged import KINDS, LONG, bridged, layers_of
from support.counts import at_widths
from support.tiny_models import build

from kvant.bridge.prompt_cache import BatchLayer
from kvant.cache import ModelCache
from kvant.errors import ContextError

MERGED = [name for name in KINDS if name != "llama4"]
TOKENS = 5  # of an answer
FIRST = [LONG[start : start + size] for start, size in enumerate((5, 3, 30, 1, 17))]
SECOND = [LONG[start : start + size] for start, size in enumerate((2, 7, 4, 6, 21), 100)]


def _answers(model: Any, prompts: list[list[int]], caches: Any = None) -> tuple[list[list[int]], list[Any]]:
    """Tokens of mlx-lm's batches, of up to 3 answers, with prompts read 8 tokens at a time; and their
    caches.
    """
    sizes = {"prefill_batch_size": 2, "prefill_step_size": 8, "completion_batch_size": 3}
    batches = BatchGenerator(model, stop_tokens=[], max_tokens=TOKENS, **sizes)
    tokens: dict[int, list[int]] = {uid: [] for uid in batches.insert(prompts, caches=caches)}
    ended: dict[int, Any] = {}
    while responses := batches.next_generated():
        for each in responses:
            tokens[each.uid].append(each.token)
            if each.finish_reason:
                ended[each.uid] = each.prompt_cache
    return [*tokens.values()], [ended[uid] for uid in tokens]


def _alone(model: Any, prompt: list[int], cache: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prompt_cache=cache, prefill_step_size=8)
    return [token for token, _ in steps]


@pytest.mark.parametrize(("name", "bits"), at_widths(MERGED))
def test_batches_give_each_sequence_what_it_gets_alone(name: str, bits: int) -> None:
    """Sequences of different lengths join and leave, go on from what they had, and no cache that was given
    changes.
    """
    model, _ = build(name)
    made = partial(kvant.make_prompt_cache, model, 90, kv_bits=bits, kv_group_size=16)
    expected, theirs = _answers(model, FIRST) if not bits else ([], None)
    model.make_cache = made
    caches = [made() for _ in FIRST]
    tokens, ended = _answers(model, FIRST, caches)
    again, _ = _answers(model, SECOND, ended)
    assert all(layer.size() == 0 for cache in caches for layer in layers_of(cache))
    for n, (first, second) in enumerate(zip(FIRST, SECOND, strict=True)):
        assert tokens[n] == _alone(model, first, caches[n])
        cache = ended[n]
        assert {layer.size() for layer in layers_of(cache)} == {len(first) + TOKENS}
        assert again[n] == _alone(model, second, cache)
    if not bits:
        del model.make_cache
        assert tokens == expected
        assert again == _answers(model, SECOND, theirs)[0]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "falcon_h1"])
def test_a_batch_copies_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that mlx-lm makes itself go from prompt to answer and out of the batch; copies are for what
    is shared.
    """
    copies: list[ModelCache] = []
    fork = ModelCache.fork
    monkeypatch.setattr(ModelCache, "fork", lambda own: copies.append(own) or fork(own))
    model, _ = build(name)
    model.make_cache = partial(kvant.make_prompt_cache, model, 90, kv_bits=8, kv_group_size=16)
    _, ended = _answers(model, FIRST)
    assert not copies
    _answers(model, SECOND[:1], ended[:1])
    assert len(copies) == len(layers_of(ended[0]))  # somebody holds the first one's still


def test_copies_share_memory_until_one_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build("gemma3_text")
    cache = kvant.make_prompt_cache(model, 90, kv_bits=0)
    text = _alone(model, FIRST[2], cache)
    copies = [copy.deepcopy(cache) for _ in range(3)]
    assert all(
        layer.layer.arrays[0] is other.layer.arrays[0]
        for each in copies
        for layer, other in zip(cache, each, strict=True)
    )
    assert [kvant.trim_prompt_cache(each, n) for n, each in enumerate(copies, 1)] == [1, 2, 3]
    assert {layer.offset for layer in cache} == {30 + TOKENS}
    assert not any(a.layer.arrays[0] is b.layer.arrays[0] for a, b in zip(cache, copies[0], strict=True))
    answers = [_alone(model, text[-n:], each) for n, each in enumerate(copies, 1)]
    assert answers[0] == answers[1] == answers[2]
    copies.clear()
    monkeypatch.setattr(ModelCache, "fork", None)  # nobody else has it now
    assert {layer.offset for layer in cache} == {30 + TOKENS}
    _alone(model, [5], cache)


def test_a_batch_trims_and_takes_masks_of_the_models_own() -> None:
    model, _ = build("qwen3")
    caches = [kvant.make_prompt_cache(model, 90, kv_bits=0) for _ in range(2)]
    for cache, prompt in zip(caches, (FIRST[2], FIRST[4]), strict=True):
        model(mx.array([prompt]), cache=cache)
    batch = [BatchLayer.merge(layers) for layers in zip(*caches, strict=True)]
    assert batch[0].is_trimmable()
    assert [layer.trim(4) for layer in batch] == [4, 4]
    assert batch[0].offset.tolist() == [26, 13]
    assert batch[0].nbytes == 2 * caches[0][0].nbytes
    inputs = mx.array([LONG[26:29], LONG[17:20]])
    query, keys = mx.random.normal((2, 4, 3, 32)), mx.random.normal((2, 2, 3, 32))
    mask = batch[0].make_mask(3)
    key, value = batch[0].update_and_fetch(keys, keys + 1)
    options: dict[str, Any] = {"scale": 0.2, "sinks": None}
    known = batch[0].attend_fetched(query, key, value, mask=mask, **options)
    own = batch[0].attend_fetched(query, key, value, mask=mx.where(mask, 0.0, -mx.inf), **options)
    plain = mx.fast.scaled_dot_product_attention(query, key, value, scale=0.2, mask=mask)
    assert mx.allclose(known, plain, atol=1e-5)
    assert mx.allclose(own, plain, atol=1e-5)
    assert batch[0].attend_fetched(query, key, value, mask=None, **options) is None  # mlx-lm computes it
    with pytest.raises(ValueError, match="left_padding is given; expected right_padding"):
        batch[0].prepare(lengths=[1, 2], left_padding=[1, 0])
    with pytest.raises(ValueError, match="keys of 1 sequences; the batch has 2"):
        batch[0].update_and_fetch(keys[:1], keys[:1])
    assert inputs.shape == (2, 3)


def test_a_batch_computes_every_row_s_appends() -> None:
    """DeepSeek V3.2's indexer is not read in a short text: its appends were left over, step after step,
    but row 0's.
    """
    model, _ = build("deepseek_v32")
    caches = [kvant.make_prompt_cache(model, 90, kv_bits=0) for _ in range(2)]
    batch = [layers[0].merge(layers) for layers in zip(*caches, strict=True)]
    rows = [row for entry in batch for part in entry.caches for row in part.rows]
    left = []
    for token in range(4):
        mx.eval(model(mx.array([[token], [token]]), cache=batch))
        graph = io.StringIO()
        mx.export_to_dot(graph, *(array for row in rows for array in row.layer.arrays))
        left.append(graph.getvalue().count("label"))
    assert left[2:] == left[1:-1]


def test_a_copy_without_memory_stays_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build("qwen3")
    cache = kvant.make_prompt_cache(model, 90, kv_bits=0)
    _alone(model, FIRST[2], cache)
    other = copy.deepcopy(cache)
    with monkeypatch.context() as patched:
        patched.setattr(ModelCache, "fork", lambda own: (_ for _ in ()).throw(ContextError("no memory")))
        with pytest.raises(ContextError, match="no memory"):
            other[0].trim(1)
    kvant.trim_prompt_cache(cache, 3)
    assert not any(a.layer.arrays[0] is b.layer.arrays[0] for a, b in zip(cache, other, strict=True))
    assert [{layer.size() for layer in each} for each in (cache, other)] == [{27 + TOKENS}, {30 + TOKENS}]


def test_what_a_copy_reserves_goes_with_it() -> None:
    model, _ = build("qwen3")
    cache = kvant.make_prompt_cache(model, 90)
    batch = [BatchLayer.merge([layer]) for layer in cache]
    model(mx.array([FIRST[2]]), cache=batch)
    reserved = [weakref.ref(row._cache) for layer in batch for row in layer.rows]
    assert not any(each() is layer._cache for each, layer in zip(reserved, cache, strict=True))
    del batch
    assert [each() for each in reserved] == [None] * len(cache)
    assert {layer.size() for layer in cache} == {0}


def test_chunks_have_no_batch() -> None:
    """As mlx-lm's own: its server then answers one after the other."""
    model, _ = build("llama4")
    caches = [kvant.make_prompt_cache(model, 90) for _ in FIRST]
    assert not all(hasattr(layer, "merge") for layer in caches[0])
    with pytest.raises(ValueError, match="does not yet support batching"):
        _answers(model, FIRST, caches)


def test_mlx_lms_servers_store_of_prompts() -> None:
    model, _ = build("qwen3")
    store = LRUPromptCache(3)
    cache = kvant.make_prompt_cache(model, 90, kv_bits=8, kv_group_size=16)
    answer = _alone(model, LONG[:20], cache)
    text = [*LONG[:20], *answer]
    store.insert_cache("model", text, cache)
    assert store.nbytes == sum(layer.nbytes for layer in cache)
    found, rest = store.fetch_nearest_cache("model", [*text[:15], 3, 4])
    assert rest == [3, 4]
    fresh = kvant.make_prompt_cache(model, 90, kv_bits=8, kv_group_size=16)
    assert _alone(model, rest, found) == _alone(model, [*text[:15], 3, 4], fresh)
    assert {layer.size() for layer in cache} == {20 + TOKENS}


def test_a_model_with_kvants_caches_is_probed_as_it_was() -> None:
    model, _ = build("gemma3_text")
    expected = [layer.format for layer in map(_format, kvant.make_prompt_cache(model, 90))]
    model.make_cache = partial(kvant.make_prompt_cache, model, 90)
    assert [layer.format for layer in map(_format, mlx_lms_cache(model))] == expected


def _format(layer: Any) -> Any:
    return layer.layer


@pytest.mark.parametrize("kind", ["native", "bridged"])
def test_embeddings_in_place_of_ids(kind: str, pocket_mlx_lm: Any, pocket: Any) -> None:
    """They are mlx-lm's answers to them, and those to the ids where they are the ids' own."""
    tokenizer = pocket[1]
    model = pocket[0] if kind == "native" else bridged("qwen3")
    theirs = pocket_mlx_lm if kind == "native" else build("qwen3")[0]
    ids = LONG[:20]
    own = theirs.model.embed_tokens(mx.array(ids)).astype(mx.float32)

    def answer(prompt: list[int], given: mx.array | None, **options: Any) -> list[int]:
        steps = kvant.stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=8,
            prefill_step_size=6,
            input_embeddings=given,
            kv_bits=0,
            **options,
        )
        return [step.token for step in steps]

    other = own[::-1]
    expected = [t for t, _ in generate_step(mx.array(ids), theirs, max_tokens=8, input_embeddings=other)]
    assert answer(ids, own) == answer(ids, None) == answer([], own)
    assert answer([7] * 20, other) == expected != answer(ids, own)


def test_embeddings_continue_a_cache(pocket: Any) -> None:
    model, tokenizer = pocket
    cache, plain = model.make_cache(80), model.make_cache(80)
    rows = model._embed_tokens.rows(mx.array(LONG[:12])).astype(mx.float32)
    for given in (rows, None, rows):
        one, other = (
            [step.token for step in kvant.stream_generate(model, tokenizer, LONG[:12], 5, **options)]
            for options in (
                {"prompt_cache": cache, "input_embeddings": given},
                {"prompt_cache": plain},
            )
        )
        assert one == other


def test_a_model_that_takes_no_embeddings(pocket: Any) -> None:
    with pytest.raises(
        ValueError, match="input_embeddings is given; expected None: this qwen3_next takes only ids"
    ):
        kvant.stream_generate(bridged("qwen3_next"), pocket[1], [5], input_embeddings=mx.zeros((1, 64)))
