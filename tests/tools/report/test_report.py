"""What `kvant report` measures, against NumPy in float64, mlx-lm's own model, and caches that are secretly
broken.
"""

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from rich.console import Console
from support.checkpoints import reference_logits
from support.pools import with_layers

from kvant.cache import ModelCache, QuantizedKVCache
from kvant.errors import KvantError
from kvant.models import Decoder, load_decoder
from kvant.tools.report.divergence import Figures, Tally, divergence, log_probabilities
from kvant.tools.report.formats import REFERENCE, CacheFormat
from kvant.tools.report.measure import Report, figures_json, measure
from kvant.tools.report.output import plot, tables
from kvant.tools.report.runs import CacheReader, SideBySide, compare, read_legs
from kvant.tools.report.texts import Text

Pocket = tuple[Decoder, Any]
Change = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
Array = np.ndarray[Any, np.dtype[np.float64]]
FORMAT = CacheFormat(8, 32)


def _log_softmax(logits: Any) -> Array:
    rows = np.array(logits, dtype=np.float64)
    rows = rows - rows.max(axis=-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))


def _kld(expected: Array, given: Array) -> Array:
    """By the definition; what is not expected counts nothing."""
    with np.errstate(invalid="ignore"):
        terms = np.exp(expected) * (expected - given)
    return np.where(np.exp(expected) > 0, terms, 0.0).sum(axis=-1)


def _figures(
    model: Decoder, ids: Sequence[int], formats: Sequence[CacheFormat], *before: Sequence[int], **options: Any
) -> list[Figures]:
    """Of the last of some texts, given one after the other to the same caches."""
    readers = [CacheReader(model, each.make_cache(model, len(ids))) for each in formats]
    for number, text in enumerate((*before, ids)):
        tallies = [Tally() for _ in readers]
        for reader in readers:
            reader.begin(number)
        compare(readers, text, tallies, **options)
    return [tally.figures() for tally in tallies]


class TestDivergence:
    """Against NumPy in float64."""

    @pytest.mark.parametrize(
        ("shape", "noise", "tolerance"),
        [
            *(((9, 700), noise, 2e-3) for noise in (3e-4, 1e-2, 1.0, 10.0)),
            ((4, 50_000), 4e-5, 0.05),  # 1e-9 nats, where float32's sums of probabilities are off by 1e-7
        ],
    )
    def test_it_is_the_definition(self, shape: tuple[int, int], noise: float, tolerance: float) -> None:
        random = np.random.default_rng(0)
        expected = random.standard_normal(shape).astype(np.float32)
        given = (expected + np.float32(noise) * random.standard_normal(shape)).astype(np.float32)
        kld = np.array(divergence(*(log_probabilities(mx.array(x)) for x in (expected, given))))
        right = _kld(_log_softmax(expected), _log_softmax(given))
        assert (right < 2e-9).all() or noise != 4e-5
        np.testing.assert_allclose(kld, right, rtol=tolerance)

    def test_impossible_tokens(self) -> None:
        rows = mx.random.normal((3, 40), key=mx.random.key(0))
        rows[:, 5] = -math.inf
        same = log_probabilities(rows)
        assert divergence(same, same).tolist() == [0.0] * 3
        all_four, three = (log_probabilities(mx.array([[0.0, 0.0, 0.0, last]])) for last in (0.0, -math.inf))
        assert divergence(all_four, three).item() == math.inf
        assert divergence(three, all_four).item() == pytest.approx(math.log(4 / 3), rel=1e-5)

    def test_figures(self) -> None:
        random = np.random.default_rng(2)
        expected, given = (random.standard_normal((2, 150, 60)) * 2).astype(np.float32)
        following = random.integers(0, 60, 150).tolist()
        tally = Tally()
        for part in (slice(0, 70), slice(70, 150)):
            rows = [log_probabilities(mx.array(x[part])) for x in (expected, given)]
            tally.add(*rows, following[part])
        figures = tally.figures()
        klds = _kld(_log_softmax(expected), _log_softmax(given))
        losses = -_log_softmax(given)[np.arange(150), following]
        assert (figures.positions, figures.non_finite) == (150, 0)
        assert figures.mean_kld_nats == pytest.approx(klds.mean(), rel=1e-5)
        assert figures.median_kld_nats == pytest.approx(np.median(klds), rel=1e-5)
        assert figures.p99_kld_nats == pytest.approx(np.percentile(klds, 99), rel=1e-5)
        assert figures.p999_kld_nats == pytest.approx(np.percentile(klds, 99.9), rel=1e-5)
        assert figures.perplexity == pytest.approx(np.exp(losses.mean()), rel=1e-5)
        assert figures.top1 == (expected.argmax(-1) == given.argmax(-1)).mean()

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_not_finite_is_counted_and_never_skipped(self, value: float) -> None:
        rows = mx.random.normal((200, 30), key=mx.random.key(0))
        broken = mx.array(rows)
        broken[7, 3] = value
        tally = Tally()
        tally.add(log_probabilities(rows), log_probabilities(broken), [0] * 200)
        figures = tally.figures()
        assert (figures.positions, figures.non_finite) == (200, 1)
        assert (figures.mean_kld_nats, figures.perplexity) == (math.inf, math.inf)
        assert figures.p99_kld_nats == 0.0  # one of 200
        assert figures.top1 == 199 / 200
        for _ in range(3):
            tally.add(log_probabilities(rows[:1]), log_probabilities(broken[7:8]), [0])
        assert tally.figures().p99_kld_nats == math.inf


class TestTeacherForcing:
    def test_the_reference_is_mlx_lms_model(
        self, pocket: Pocket, pocket_mlx_lm: nn.Module, heldout_ids: list[int]
    ) -> None:
        """Perplexity, and the KLD of an 8-bit cache that is fed token by token, both from mlx-lm's logits."""
        model, _ = pocket
        ids = heldout_ids[:96]
        reference, given = _figures(model, ids, (REFERENCE, FORMAT))
        right = _log_softmax(reference_logits(pocket_mlx_lm, ids))
        loss = -right[np.arange(95), ids[1:]].mean()
        assert reference.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        cache = model.make_cache(96, kv_bits=8, kv_group_size=32)
        steps = [_log_softmax(model(mx.array([[token]]), cache=cache)[0]) for token in ids[:-1]]
        klds = _kld(right[:-1], np.concatenate(steps))
        assert given.mean_kld_nats == pytest.approx(klds.mean(), rel=0.03)
        assert given.p99_kld_nats == pytest.approx(np.percentile(klds, 99), rel=0.03)
        assert given.mean_kld_nats > 1e-7
        assert reference.mean_kld_nats == 0

    @pytest.mark.parametrize(
        "cache_format", [CacheFormat(8, 32), CacheFormat(4, 64), CacheFormat(4, 32, bias_split=False)]
    )
    def test_chunks_are_token_by_token(
        self, pocket: Pocket, heldout_ids: list[int], cache_format: CacheFormat
    ) -> None:
        """The same predictions, but for quantized values that rounding tips over."""
        whole, *others = [
            _figures(pocket[0], heldout_ids[:64], (REFERENCE, cache_format), step_size=step_size)[1]
            for step_size in (512, 40, 1)
        ]
        for other in others:
            assert other.mean_kld_nats == pytest.approx(whole.mean_kld_nats, rel=0.1)
            assert other.perplexity == pytest.approx(whole.perplexity, rel=1e-3)

    def test_pieces_do_not_see_each_other(self, pocket: Pocket, heldout_ids: list[int]) -> None:
        ids, formats = heldout_ids[:40], (REFERENCE, FORMAT)
        assert _figures(pocket[0], ids, formats, heldout_ids[40:60]) == _figures(pocket[0], ids, formats)

    def test_a_reference_that_is_not_finite(
        self, make_checkpoint: Callable[..., tuple[Path, nn.Module]]
    ) -> None:
        folder, _ = make_checkpoint()
        path = folder / "model.safetensors"
        weights = {name: mx.array(x) for name, x in mx.load(str(path)).items()}
        weights["model.norm.weight"][3] = math.nan
        mx.save_safetensors(str(path), weights)
        with pytest.raises(KvantError, match="not finite"):
            _figures(load_decoder(folder), [1, 2, 3], (REFERENCE, FORMAT))


class Broken(CacheFormat):
    """A format whose cache does something to what it is given, in some layers."""

    def __init__(self, change: Change, layers: tuple[int, ...], bits: int = 8) -> None:
        super().__init__(bits, 32)
        vars(self).update(change=change, layers=layers)

    def make_cache(self, model: Decoder, max_seq_len: int) -> ModelCache:
        def broken(number: int, layer: Any) -> None:
            if number in self.layers:
                layer.multi_head_cache_attention = (
                    lambda query, key, value, *others, attend=layer.multi_head_cache_attention: attend(
                        query, *self.change(key, value), *others
                    )
                )

        return with_layers(super().make_cache(model, max_seq_len), broken)


def _every(size: int, place: int, period: int) -> mx.array:
    """Which of so many tokens, (T, 1), are at this place of a period."""
    return (mx.arange(size) % period == place)[:, None]


CHANGES: dict[str, Change] = {
    "a scale": lambda key, value: (1.1 * key, 1.1 * value),
    "tokens": lambda key, value: (key * ~_every(key.shape[2], 5, 16), value * ~_every(key.shape[2], 5, 16)),
    "heads": lambda key, value: (key[:, ::-1], value[:, ::-1]),
    "no number": lambda key, value: (key, mx.where(_every(key.shape[2], 50, 64), math.nan, value)),
}


class TestBrokenFormats:
    """Caches that are secretly broken show in the figures, and in the layer where they are broken."""

    @pytest.mark.parametrize(
        ("what", "layers"), [("a scale", (0, 1, 2, 3)), ("tokens", (1,)), ("heads", (2,))]
    )
    def test_it_shows(
        self, pocket: Pocket, heldout_ids: list[int], what: str, layers: tuple[int, ...]
    ) -> None:
        text = Text("a text", (tuple(heldout_ids[:128]),), 0)
        report = measure("pocket", pocket[0], text, [FORMAT, Broken(CHANGES[what], layers)])
        healthy, found = report.results
        assert found.prefill.mean_kld_nats > 20 * healthy.prefill.mean_kld_nats
        assert found.prefill.p99_kld_nats > 10 * healthy.prefill.p99_kld_nats
        assert found.bytes_per_token == healthy.bytes_per_token
        for number, (good, bad) in enumerate(zip(healthy.layer_errors, found.layer_errors, strict=True)):
            if number in layers:
                assert bad > 8 * good
            else:  # given its own inputs a layer is not blamed for what is before it
                assert bad == good

    def test_values_that_are_not_finite(self, pocket: Pocket, heldout_ids: list[int], tmp_path: Path) -> None:
        poisoned = Broken(CHANGES["no number"], (3,), bits=0)
        report = measure("pocket", pocket[0], Text("a text", (tuple(heldout_ids[:128]),), 0), [poisoned])
        (found,) = report.results
        assert found.prefill.non_finite > 0
        assert found.prefill.mean_kld_nats == math.inf
        assert found.layer_errors[3] == math.inf
        (record,) = figures_json(report)["formats"]
        prefill = record["prefill"]
        assert (prefill["mean_kld_nats"], prefill["non_finite"]) == (None, found.prefill.non_finite)
        assert record["layer_attention_errors"] == [*found.layer_errors[:3], None]
        console = Console(file=io.StringIO(), width=80)
        console.print(*tables(report))
        shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
        assert (
            f"{poisoned.label}: {found.prefill.non_finite} of 95 predictions are not finite (prefill)"
            in shown
        )
        with pytest.raises(KvantError, match="nothing to draw"):
            plot(report, tmp_path / "a.svg")
        assert list(tmp_path.iterdir()) == []


def test_a_layers_error_is_that_of_its_attention() -> None:
    """Two caches given one layer's tokens by hand, their outputs compared in NumPy."""
    keys = mx.random.split(mx.random.key(5), 3)
    query = mx.random.normal((1, 4, 30, 64), key=keys[0])
    key, value = (mx.random.normal((1, 2, 30, 64), key=k) for k in keys[1:])
    both = SideBySide(QuantizedKVCache(30, 2, 64, kv_bits=0, dtype=mx.float32), [QuantizedKVCache(30, 2, 64)])
    for part in (slice(0, 20), slice(20, 30)):
        both.multi_head_cache_attention(query[:, :, part], key[:, :, part], value[:, :, part])
    exact, given = (
        np.array(
            QuantizedKVCache(30, 2, 64, kv_bits=bits, dtype=mx.float32).multi_head_cache_attention(
                query, key, value
            ),
            np.float64,
        )
        for bits in (0, 8)
    )
    assert both.squares[0] == pytest.approx((exact**2).sum(), rel=1e-5)
    assert both.squares[1] == pytest.approx(((given - exact) ** 2).sum(), rel=1e-3)


def test_the_smallest_text_there_can_be(make_checkpoint: Callable[..., tuple[Path, nn.Module]]) -> None:
    model = load_decoder(make_checkpoint()[0])
    progress: list[tuple[int, int]] = []
    report: Report = measure(
        "random",
        model,
        Text("eight tokens", (tuple(range(2, 10)), (3,)), 0),
        [REFERENCE, FORMAT],
        progress=lambda *of: progress.append(of),
    )
    assert [r.format for r in report.results] == [REFERENCE, FORMAT]
    assert report.results[0] is report.reference
    assert (report.results[1].prefill.positions, report.results[1].decode.positions) == (5, 2)
    assert (report.prompt, report.reserved) == (5, 8)
    assert progress == sorted(progress)
    assert (progress[0][0], progress[-1][0]) == (0, progress[-1][1])


class TestLegs:
    """Tokens read in chunks, and tokens read one by one behind them."""

    def test_they_are_numpys(self, pocket: Pocket, heldout_ids: list[int]) -> None:
        """Both legs from logits of runs that are made here, compared in float64."""
        model, _ = pocket
        first, second, coarse = heldout_ids[:120], heldout_ids[120:160], CacheFormat(4, 32)
        text = Text("a text", (tuple(first), tuple(second)), 0)
        (found,) = measure("pocket", model, text, [coarse], decoded=24).results
        rows: dict[str, list[tuple[Array, Array, int]]] = {"prefill": [], "decode": []}
        for ids, prompt in ((first, 95), (second, 39)):
            caches = [REFERENCE.make_cache(model, 120), coarse.make_cache(model, 120)]
            chunks = [_log_softmax(model(mx.array([ids[:prompt]]), cache=cache)[0]) for cache in caches]
            rows["prefill"] += zip(*chunks, ids[1 : prompt + 1], strict=True)
            for place in range(prompt, len(ids) - 1):
                steps = [_log_softmax(model(mx.array([[ids[place]]]), cache=cache)[0]) for cache in caches]
                rows["decode"] += zip(*steps, ids[place + 1 : place + 2], strict=True)
        assert (len(rows["prefill"]), len(rows["decode"])) == (95 + 39, 24)
        for leg, given in found.legs.items():
            expected, got, following = (np.array(column) for column in zip(*rows[leg], strict=True))
            klds = _kld(expected, got)
            assert given.positions == len(klds)
            assert given.mean_kld_nats == pytest.approx(klds.mean(), rel=0.02)
            assert given.median_kld_nats == pytest.approx(np.median(klds), rel=0.05)
            assert given.p99_kld_nats == pytest.approx(np.percentile(klds, 99), rel=0.05)
            assert given.p999_kld_nats == pytest.approx(np.percentile(klds, 99.9), rel=0.05)
            assert given.top1 == (expected.argmax(-1) == got.argmax(-1)).mean()
            loss = -got[np.arange(len(got)), following].mean()
            assert given.perplexity == pytest.approx(math.exp(loss), rel=1e-3)

    def test_a_full_cache_leaves_nothing_in_both(self, pocket: Pocket, heldout_ids: list[int]) -> None:
        model = pocket[0]
        readers = [CacheReader(model, REFERENCE.make_cache(model, 64)) for _ in range(2)]
        text = Text("a text", (tuple(heldout_ids[:64]),), 0)
        for tallies in read_legs(readers, text, 16):
            assert {*tallies[1].klds} == {0.0}
            assert tallies[1].figures().top1 == 1

    @pytest.mark.parametrize("at_once", [True, False])
    def test_what_is_broken_in_one_shows_there(
        self, pocket: Pocket, heldout_ids: list[int], at_once: bool
    ) -> None:
        """Keys that are scaled where several tokens are read at once, or where one is."""

        def change(key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
            return (1.0 if (key.shape[2] > 1) != at_once else 3.0) * key, value

        text = Text("a text", (tuple(heldout_ids[:128]),), 0)
        broken = Broken(change, (0, 1, 2, 3))
        healthy, found = measure("pocket", pocket[0], text, [FORMAT, broken], decoded=16).results
        ratios = {leg: found.legs[leg].mean_kld_nats / own.mean_kld_nats for leg, own in healthy.legs.items()}
        assert ratios["decode"] > 100  # it reads the prompt's keys, too
        assert (ratios["prefill"] > 100) == at_once

    def test_bytes_are_the_caches(self, pocket: Pocket, heldout_ids: list[int]) -> None:
        """Of the reservation asked for, which may be more than the text has."""
        text = Text("a text", (tuple(heldout_ids[:16]),), 0)
        report = measure("pocket", pocket[0], text, [FORMAT], reserved=1024)
        assert report.reserved == 1024
        nbytes = pocket[0].make_cache(1024, kv_bits=8, kv_group_size=32).nbytes
        assert report.results[0].bytes_per_token == round(nbytes / 1024)
