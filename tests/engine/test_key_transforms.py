"""Every part of a front with everything else. Without quantization nothing changes but rounding."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.bridged import KINDS, LONG, WITH_STATE, bridged
from support.checkpoints import CONFIGS, check_three_ways, reference_logits, write_reference
from support.key_transforms import drawn_format
from support.numbers import relative_error
from support.pools import TEXT, next_logits, prefill, tiny_model

from kvant import load_prompt_cache, make_prompt_cache, stream_generate
from kvant.cache import CacheOptions, ModelCache
from kvant.cache.kv_format import KVFormat, LayerChoice
from kvant.cache.layer_format import describe_formats
from kvant.cache.pool import pool_bytes, single_sizes
from kvant.errors import ArgumentError, SnapshotError
from kvant.models import Decoder, LanguageModel, load_decoder
from kvant.models.caches import count_formats
from kvant.operators.stored_tokens import float_tokens

Pocket = tuple[Decoder, Any]
NEAR = 1e-5  # of the largest logit


@pytest.mark.parametrize("name", CONFIGS)
def test_an_architecture_is_mlx_lms(tmp_path: Path, name: str) -> None:
    folder, reference = write_reference(tmp_path, CONFIGS[name])
    model, ids = load_decoder(folder), TEXT[:40]
    expected = reference_logits(reference, ids)
    check_three_ways(model, expected, ids, kv_format=drawn_format(model))
    cache = model.make_cache(40, kv_format=drawn_format(model))
    assert relative_error(model(mx.array([ids]), cache=cache)[0], model(mx.array([ids]))[0]) < NEAR


def test_ragged_sequences_windows_and_the_bias_split(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, (None, 40))
    tuned = drawn_format(model, rotates=False, paired=True)
    pool = model.make_pool(2048, sequences=3, options=CacheOptions.from_keywords(kv_format=tuned))
    assert pool.nbytes == sum(layer.nbytes for layer in pool.layers)
    for length in (3, 127, 256):
        given = prefill(model, pool, pool.sequence(300), TEXT[:length])
        assert relative_error(given, next_logits(model, TEXT[:length])) < NEAR
    with pytest.raises(ValueError, match="cannot be rotated"):
        model.make_cache(9, kv_format=drawn_format(model))
    assert model.make_cache(9, kv_format=drawn_format(model), bias_split=False)


@pytest.mark.parametrize("name", KINDS)
def test_a_bridged_model(name: str) -> None:
    """A cache alone in uneven steps, and a batch of a pool where there are any."""
    model = bridged(name)
    tuned = drawn_format(model, centers=not model.has_sinks)
    if model.has_sinks:
        with pytest.raises(ArgumentError, match="learned sinks"):
            _wrong(model, kv_format=drawn_format(model))

    def logits(**options: Any) -> mx.array:
        cache, ids = model.make_cache(64, kv_bits=0, **options), LONG[:50]
        bounds = [0, 30, 31, 32, 47, 50]
        steps = [model(mx.array([ids[a:b]]), cache=cache)[0] for a, b in pairwise(bounds)]
        return mx.concatenate(steps)

    assert relative_error(logits(kv_format=tuned), logits()) < NEAR
    if name in (*WITH_STATE, "llama4", "deepseek_v32"):
        return

    def of_a_pool(**options: Any) -> mx.array:
        pool = model.make_pool(768, sequences=2, options=CacheOptions.from_keywords(kv_bits=0, **options))
        sequences = [pool.sequence(64) for _ in range(2)]
        for number, sequence in enumerate(sequences):
            model(mx.array([LONG[number : number + 20 + 7 * number]]), cache=pool.batch([sequence]))
        return model(mx.array([[5], [9]]), cache=pool.batch(sequences))[:, 0]

    assert relative_error(of_a_pool(kv_format=tuned), of_a_pool()) < NEAR


def test_four_bits_are_stored_rotated(pocket: Pocket, tmp_path: Path) -> None:
    """By the Hadamard matrix, values too: the first layer's are the same in every cache. And a file of plain
    ones is read.
    """
    model, _ = pocket
    tokens, split = mx.array([TEXT[:200]]), {"bias_split": False}

    def stored_rows(**options: Any) -> tuple[Sequence[mx.array], Any]:
        cache = model.make_cache(300, **options, **split)
        model(tokens, cache=cache)
        stored = [array[..., :200, :] for array in cache.pool.layers[0].arrays]
        return float_tokens(stored, quant_bit=options["kv_bits"], dtype=mx.float32)[0], cache

    (exact, _), (default, cache), (plain, of_pmx) = (
        stored_rows(kv_bits=0),
        stored_rows(kv_bits=4),
        stored_rows(kv_bits=4, kv_format="pmx"),
    )
    step = mx.array([[1.0, 1.0], [1.0, -1.0]])
    matrix = mx.ones((1, 1))
    while len(matrix) < 64:
        matrix = mx.kron(matrix, step)
    for side in (0, 1):
        assert relative_error(default[side], exact[side] @ matrix / 8) < 0.15
        assert relative_error(plain[side], exact[side]) < 0.15
    assert "keys and values rotated" in describe_formats(cache.pool.formats)
    of_pmx.save(tmp_path / "plain")
    with pytest.raises(SnapshotError, match=r"written with kv_format pmx"):
        model.make_cache(300, kv_bits=4, **split).load(tmp_path / "plain")
    read = load_prompt_cache(tmp_path / "plain")
    assert mx.array_equal(model(mx.array([[7, 9]]), cache=read), model(mx.array([[7, 9]]), cache=of_pmx))
    assert "keys rotated" not in describe_formats(read.cache.pool.formats)


def test_a_file_whose_values_are_not_rotated_is_read(pocket: Pocket, tmp_path: Path) -> None:
    """Earlier versions rotated keys alone."""
    model, _ = pocket
    earlier = model.reserve_cache(300, CacheOptions(4, rotates_values=False))
    model(mx.array([TEXT[:200]]), cache=earlier)
    assert "keys rotated" in describe_formats(earlier.formats)
    earlier.save(tmp_path / "earlier")
    with pytest.raises(SnapshotError, match=r"another kv_format, or by an older kvant"):
        model.make_cache(300, kv_bits=4).load(tmp_path / "earlier")
    read = load_prompt_cache(tmp_path / "earlier")
    assert mx.array_equal(model(mx.array([[7, 9]]), cache=read), model(mx.array([[7, 9]]), cache=earlier))
    assert read.cache.formats == earlier.formats


def test_layers_that_cannot_be_rotated_stay_as_they_were(tmp_path: Path) -> None:
    """With biases of rotary pairs split off; and latents that are keys and values at once."""
    model = tiny_model(tmp_path, (None, 40))
    options: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 16}
    assert _changes(model.make_cache(9, **options)) == {"rotate-values"}
    assert _changes(model.make_cache(9, **options, bias_split=False)) == {"rotate+rotate-values"}
    changes = {name: _changes(bridged(name).make_cache(9, **options)) for name in KINDS}
    assert changes.pop("deepseek_v32") == {""}
    assert all("rotate+rotate-values" in own for own in changes.values())


def _changes(cache: ModelCache) -> set[str]:
    """Return the parts of the key transforms of a cache's layers."""
    return {own.transform_name.partition(":")[0] for own in cache.formats}


@pytest.mark.parametrize("bits", [0, 84, 48])
def test_drafts_prefixes_and_snapshots(pocket: Pocket, tmp_path: Path, bits: int) -> None:
    """The same tokens with drafts; from a file; and no file of another front."""
    model, tokenizer = pocket
    tuned = drawn_format(model, bits, 32)
    prompt = "Tom had a red ball. Sam had a blue ball. " * 4

    def tokens(**options: Any) -> tuple[list[int], Any]:
        cache = model.make_cache(300, kv_format=tuned)
        given = stream_generate(model, tokenizer, prompt, max_tokens=30, prompt_cache=cache, **options)
        return [response.token for response in given], cache

    plain, cache = tokens()
    assert tokens(draft="prompt")[0] == plain
    cache.save(tmp_path / "cache")
    loaded = model.make_cache(300, kv_format=tuned)
    loaded.load(tmp_path / "cache")
    assert mx.array_equal(model(mx.array([[7, 9]]), cache=loaded), model(mx.array([[7, 9]]), cache=cache))
    for other in (drawn_format(model, bits, 32, seed=1), drawn_format(model, bits, 32, rotates=False)):
        with pytest.raises(SnapshotError, match="transform_name is"):
            model.make_cache(300, kv_format=other).load(tmp_path / "cache")


def test_files_of_other_value_bits(pocket: Pocket, tmp_path: Path) -> None:
    """They are named, also where nobody said a format."""
    model, _ = pocket
    apart, alike = (
        KVFormat(model.identity.model, (LayerChoice(8, 32, value_bits=values),) * 4)  # type: ignore[union-attr]
        for values in (4, 8)
    )
    cache = model.make_cache(300, kv_format=apart)
    stored = CacheOptions.from_keywords(kv_format=apart)
    formats = count_formats(model.config, stored, dtype=mx.float32, max_seq_len=300, split_pairs=[0] * 4)
    assert cache.nbytes == pool_bytes(formats, **single_sizes(300))
    model(mx.array([TEXT[:40]]), cache=cache)
    cache.save(tmp_path / "cache")
    with pytest.raises(SnapshotError, match="value_bits is 4; expected 8"):
        model.make_cache(300, kv_format=alike).load(tmp_path / "cache")
    with pytest.raises(SnapshotError, match="value_bits is 4; expected 8"):
        model(mx.array([[5]]), cache=load_prompt_cache(tmp_path / "cache"))
    with pytest.raises(ArgumentError, match="kv_bits is 8; 4 is that of the prompt_cache"):
        next(stream_generate(model, pocket[1], "Tom", prompt_cache=cache, kv_bits=8))


def _wrong(model: LanguageModel, **options: Any) -> None:
    model.make_cache(9, **options)


def test_a_format_of_another_model_or_with_bits_beside_it(pocket: Pocket, tmp_path: Path) -> None:
    model, _ = pocket
    tuned = drawn_format(model, 8, 32)
    tuned.write(tmp_path / "tuned.json")
    assert model.make_cache(9, kv_format=tmp_path / "tuned.json", kv_bits=8).nbytes
    cases: Sequence[tuple[dict[str, Any], str]] = [
        ({"kv_format": tuned, "kv_bits": 4}, "kv_bits is 4; it goes by the kv_format"),
        ({"kv_format": 3}, "kv_format is a int; expected a file"),
        ({"kv_format": tmp_path / "none"}, "cannot be read"),
    ]
    for options, said in cases:
        with pytest.raises(ArgumentError, match=said):
            _wrong(model, **options)
    for other in (tiny_model(tmp_path / "tiny"), bridged("qwen3")):
        with pytest.raises(ArgumentError, match="another model"):
            _wrong(other, kv_format=tuned)
    assert (
        make_prompt_cache(model, 9, kv_format=tmp_path / "tuned.json").formats[0].transform_name
        == tuned.layers[0].name
    )
    with pytest.raises(ArgumentError, match="with 4 layers; expected 2"):  # nobody knows its digest
        make_prompt_cache(bridged("qwen3").module, 9, kv_format=tuned)
