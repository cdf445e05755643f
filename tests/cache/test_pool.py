"""The pool: sequences in it against mlx-lm, PMX's operator and each alone; what it refuses."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.numbers import peak_bytes
from support.pools import TEXT, close, decode, next_logits, prefill, tiny_model

from kvant.cache import CacheOptions
from kvant.cache.pool import pool_bytes
from kvant.errors import ContextError
from kvant.models import Decoder
from kvant.models.caches import count_formats, longest_sequence
from kvant.operators import cpu_decode, cpu_paged_attention, paged_attention, stored_tokens
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.cpu_paged_attention import LONG_TOKENS
from kvant.operators.paged_rows import PagedRows
from kvant.operators.pmx.dynamic_batching import multi_head_cache_attention
from kvant.operators.quantization import quantize
from kvant.operators.rotary import Rotary
from kvant.sizes import format_bytes

Pocket = tuple[Decoder, Any]
on_a_cpu = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="the same bits are of a CPU only")


@pytest.mark.parametrize("bits", [8, 0])
def test_a_step_changes_a_pool_in_place_whatever_its_size(pocket: Pocket, bits: int) -> None:
    model, _ = pocket
    peaks = []
    for tokens in (1024, 102400):
        pool = model.make_pool(tokens, sequences=8, max_seq_len=512, options=CacheOptions(kv_bits=bits))
        sequences = [pool.sequence(256) for _ in range(3)]
        for ids in (range(100), range(40)):
            for sequence in sequences:
                prefill(model, pool, sequence, list(ids))
        work: list[Callable[[], object]] = [
            lambda pool=pool, own=sequences: decode(model, pool, own, [5, 6, 7]),
            lambda pool=pool, own=sequences: prefill(model, pool, own[0], list(range(60))),
            lambda own=sequences: own[0].fork(220).release(),
        ]
        peaks.append([peak_bytes(step) for step in work])
    smallest = min(array.nbytes for layer in pool.layers for array in layer.arrays)
    assert max(abs(a - b) for a, b in zip(*peaks, strict=True)) < 1_000_000 < smallest / 1.5


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_its_arrays_are_those_of_pmxs_paged_operator(
    pocket: Pocket, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cache_mode 1, cache_layout 3: the operator writes the same bytes and attends to the same tokens.

    The pool's scales are fitted at 4 bits, which PMX's are not; not here.
    """
    monkeypatch.setattr(stored_tokens, "FITTED_BITS", 0)
    model, _ = pocket
    H, K, D = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    pool = model.make_pool(
        2048, sequences=3, options=CacheOptions(kv_bits=bits, bias_split=False, tail=False)
    )
    sequences = [pool.sequence(400) for _ in range(3)]
    for sequence, length in zip(sequences, (130, 5, 256), strict=True):
        prefill(model, pool, sequence, list(range(length)))
    starts = [sequence.length for sequence in sequences]
    copies = [mx.array(np.array(array))[None] for array in pool.layers[1].arrays]
    heads = [mx.random.normal((3, heads, 1, D)) for heads in (H, K, K)]
    batch = pool.batch(sequences)
    batch.begin(mx.array([[1]] * 3))
    given = batch[1].multi_head_cache_attention(*heads)
    pages = [[page * pool.page_size for page in sequence.tables[0].pages] for sequence in sequences]
    layout = {"kvstarts": [0, 131, 137, 394], "cachestarts": pages, "cache_mode": 1, "cache_layout": 3}
    sizes = {"num_heads": H, "head_dim": D, "num_kv_heads": K, "max_seqlen": 1, "max_kvlen": 257}
    expected = multi_head_cache_attention(
        *(x.squeeze(2) for x in heads), seqstarts=[0, 1, 2, 3], start_pos=starts, decoding_batches=3,
        cache=copies[0], scale=copies[1] if bits else None, quant_bit=bits, quant_group=32, **layout, **sizes,
    )  # fmt: skip
    assert all(
        mx.array_equal(array, copy[0]) for array, copy in zip(pool.layers[1].arrays, copies, strict=True)
    )
    # The operator rounds a product to its scale's dtype, float16; a pool does not.
    assert close(given.squeeze(2), expected, 1e-3 if bits else 1e-5)


@on_a_cpu
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("options", ["bias split", "sinks"])
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("long", [LONG_TOKENS, 1, 20])
def test_a_few_tokens_of_each_are_as_each_alone(
    monkeypatch: pytest.MonkeyPatch, long: int, bits: int, options: str, window: int | None
) -> None:
    """In the same bits: steps that verify drafts give the numbers of plain ones. Read at once, and 32 at a
    time.
    """
    lengths = (40, 9, 61)
    monkeypatch.setattr(cpu_paged_attention, "LONG_TOKENS", long)
    monkeypatch.setattr(cpu_decode, "BLOCK_TOKENS", 32)
    H, K, D, S = 4, 2, 64, 5
    split = BiasSplit(
        mx.random.normal((K, 2, 3)), (1, 7, 20), rotation_table(Rotary.plain(D, 1e4), (1, 7, 20), 80),
        mx.random.normal((K, D)),
    )  # fmt: skip
    extra: dict[str, Any] = (
        {"bias_split": split} if options == "bias split" else {"sinks": mx.random.normal((H,))}
    )
    values = mx.random.normal((2, K, 300, D))
    arrays = list(quantize(values, quant_bit=bits, quant_group=32)) if bits else [values]
    query = mx.random.normal((3, H, S, D))

    def attend(query: mx.array, ends: list[int], new_tokens: int) -> mx.array:
        starts = [0 if window is None else max(0, end - new_tokens + 1 - window) for end in ends]
        runs = [
            [(100 * b + start, 100 * b + end)]
            for b, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        rows = PagedRows([], runs, starts, window)
        return paged_attention.attend_rows(query, arrays, rows, quant_bit=bits, **extra)

    output = attend(query, [length + S for length in lengths], S)
    for i in range(S):
        alone = attend(query[:, :, i : i + 1], [length + i + 1 for length in lengths], 1)
        assert mx.array_equal(output[:, :, i : i + 1], alone)
    ends = [64, 66, 22]  # some of their queries see a part less than the others, or too few tokens for parts
    output = attend(query, ends, S)
    for i in range(S):
        alone = attend(query[:, :, i : i + 1], [end - S + i + 1 for end in ends], 1)
        assert mx.array_equal(output[:, :, i : i + 1], alone)
    monkeypatch.setattr(cpu_paged_attention, "LONG_TOKENS", LONG_TOKENS)
    assert close(output, attend(query, ends, S), 1e-5)


@on_a_cpu
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("new_tokens", [1, 4, 200])
def test_what_a_long_context_takes_is_bounded(new_tokens: int, bits: int) -> None:
    """As float32 the tokens would be 64 MiB."""
    K, D, T = 2, 64, 1 << 16
    values = mx.ones((2, K, T, D))
    arrays = list(quantize(values, quant_bit=bits, quant_group=32)) if bits else [values]
    query = mx.random.normal((1, 2 * K, new_tokens, D))
    mx.eval(arrays, query)
    rows = PagedRows([], [[(0, T)]], [0], None)
    assert (
        peak_bytes(lambda: mx.eval(paged_attention.attend_rows(query, arrays, rows, quant_bit=bits)))
        < 40 << 20
    )


def test_a_step_that_something_came_between_is_not_committed(pocket: Pocket) -> None:
    model, _ = pocket
    pool = model.make_pool(1024, sequences=4)
    one, other = pool.sequence(100), pool.sequence(100)
    batch = pool.batch([one, other])
    for between in (lambda: one.trim(0), lambda: prefill(model, pool, other, [5]), batch.end_step):
        lengths = (one.length, other.length)
        mx.eval(model.next_logits(mx.array([[1], [2]]), batch))
        between()
        with pytest.raises(RuntimeError, match="no step to commit"):
            batch.commit()
        assert one.length == lengths[0]
    mx.eval(model.next_logits(mx.array([[1], [2]]), batch))
    for given, message in (
        ({"num_tokens": 2}, "num_tokens is 2; expected ints up to 1"),
        ({"num_tokens": [1]}, r"num_tokens is \[1\]; expected ints up to 1, one for all or 2"),
        ({"ids": [[1], []]}, r"ids has \[1, 0\] tokens; expected \[1, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.commit(**given)
    batch.commit()
    assert (one.length, other.length) == (1, 2)


def test_what_a_batch_is_not_made_of(pocket: Pocket) -> None:
    model, _ = pocket
    pool, other = (model.make_pool(1024, sequences=4) for _ in range(2))
    sequence = pool.sequence(100)
    for given, rows, message in (
        ([], None, "a batch of 0 sequences; expected at least one, none twice"),
        ([sequence, sequence], None, "a batch of 2 sequences; expected at least one, none twice"),
        ([other.sequence(1)], None, "a sequence of another pool"),
        ([sequence], 0, "rows is 0; expected an int of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.batch(given, rows)
    batch = pool.batch([sequence], rows=3)
    with pytest.raises(ValueError, match="inputs has 1 sequences; expected 3"):
        model.next_logits(mx.array([[1]]), batch)
    with pytest.raises(RuntimeError, match="no step was begun"):
        batch[0].multi_head_cache_attention(*[mx.zeros((3, 2, 1, 64))] * 3)


def test_another_models_pool_is_refused(pocket: Pocket, tmp_path: Path) -> None:
    windows = tiny_model(tmp_path / "windows", (None, 40, None, 200))
    pool = windows.make_pool(1024, sequences=1, options=CacheOptions(kv_group_size=16))
    batch = pool.batch([pool.sequence(1)])
    for model, message in (
        (pocket[0], r"layer 0 of the pool has kv heads and a head_dim of \(2, 16\); expected \(2, 64\)"),
        (
            tiny_model(tmp_path / "plain", (None,) * 4),
            "layer 1 of the pool has a window of 40; the model's has None",
        ),
        (tiny_model(tmp_path / "small", (None,)), "the pool has 4 layers; expected 1"),
    ):
        with pytest.raises(ValueError, match=message):
            model.next_logits(mx.array([[1]]), batch)


def test_what_make_pool_refuses(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pocket
    for wrong, message in (
        ({"options": CacheOptions(kernels="fused")}, "kernels is 'fused'; MLX's default device is not a GPU"),
        *(
            ({name: 0}, f"{name} is 0")
            for name in ("tokens", "sequences", "prefill_step_size", "max_seq_len")
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.make_pool(**{"tokens": 128, "sequences": 1} | wrong)
    for wrong, message in (
        ({"kernels": "fast"}, "kernels is 'fast'; expected 'unfused' or 'fused'"),
        ({"kv_bits": 5}, "kv_bits is 5"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheOptions(**wrong)
    with monkeypatch.context() as patch:
        patch.setenv("KVANT_KERNELS", "fused")
        with pytest.raises(ValueError, match="KVANT_KERNELS is 'fused'"):
            model.make_pool(1024, sequences=1)
        assert model.make_pool(1024, sequences=1, options=CacheOptions(kernels="unfused")).num_pages == 8
    with pytest.raises(ContextError, match="this machine has"):
        model.make_pool(10**12, sequences=1, max_seq_len=1024)
    assert model.make_pool(4096, sequences=1).max_seq_len == model.config.max_position_embeddings == 2048


def test_a_window_as_wide_as_a_sequence_is_none(windows: Decoder) -> None:
    pool = windows.make_pool(1024, sequences=4, max_seq_len=200, options=CacheOptions(kv_bits=0))
    assert [part.window for part in pool.groups] == [None, 40]
    assert close(prefill(windows, pool, pool.sequence(200), TEXT[:190]), next_logits(windows, TEXT[:190]))


def test_layers_that_all_have_windows(tmp_path: Path) -> None:
    """Then a sequence's pages are those of its ring, however long it gets."""
    model = tiny_model(tmp_path, (40, 200))
    pool = model.make_pool(1024, sequences=1, prefill_step_size=128, options=CacheOptions(kv_bits=0))
    assert (pool.num_pages, pool.num_free, pool.pages_needed(1000)) == (4, 4, 4)
    sequence = pool.sequence(1000)
    assert (pool.num_free, pool.fits(1)) == (0, False)
    assert close(prefill(model, pool, sequence, TEXT[:900]), next_logits(model, TEXT[:900]))


@pytest.mark.parametrize("bits", [8, 4, 0])
def test_its_bytes_are_those_that_were_planned_and_allocated(
    pocket: Pocket, tmp_path: Path, bits: int
) -> None:
    for model in (
        pocket[0],
        tiny_model(tmp_path / "a", (None, 40, 200)),
        tiny_model(tmp_path / "b", (40, 200)),
    ):
        for split in (True, False):
            sizes, stored = (
                {"tokens": 3000, "sequences": 3, "prefill_step_size": 100},
                CacheOptions(bits, 16, split),
            )
            mx.synchronize()
            before = mx.get_active_memory()
            pool = model.make_pool(**sizes, options=stored)
            allocated = mx.get_active_memory() - before
            pairs = [len(layer.self_attn.qkv_bias.pairs) for layer in model.layers] if split else None
            most = longest_sequence(model.config, sizes["tokens"], None)
            formats = count_formats(
                model.config, stored, dtype=model.dtype, max_seq_len=most, split_pairs=pairs
            )
            planned = pool_bytes(formats, **sizes, max_seq_len=most)
            assert pool.nbytes == planned
            assert planned <= allocated <= planned + 400_000
            assert format_bytes(planned) in pool.describe()
            del pool


def test_one_thread_at_a_time(pocket: Pocket) -> None:
    model, _ = pocket
    pool = model.make_pool(1024, sequences=4)
    sequence = pool.sequence(100)
    batch, other = pool.batch([sequence]), pool.make_cache(8)
    ids = mx.array([[1]])
    mx.eval(ids)
    uses = [
        lambda: pool.sequence(1), lambda: batch.begin(ids), batch.commit, lambda: sequence.trim(0), sequence.fork,
        sequence.share_prefix, sequence.release, lambda: sequence.load(other.sequence),
        lambda: other.sequence.load(sequence),
    ]  # fmt: skip
    with pool.lock, ThreadPoolExecutor(1) as thread:
        for use in uses:
            with pytest.raises(RuntimeError, match="in use by another thread"):
                thread.submit(use).result()
