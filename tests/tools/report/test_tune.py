"""Tuning finds what was planted, in a model that is the same without quantization, and the command that
does it.
"""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from key_transforms import channels, everywhere, planted
from support.bridged import LONG, bridged
from support.checkpoints import mistral_config, write_reference
from support.command import call, refusal

from kvant.cache.kv_format import KVFormat
from kvant.cache.pool_batch import PoolLayerView
from kvant.models import Decoder, load_decoder
from kvant.operators.key_transform import rotated
from kvant.tools.report.formats import CacheFormat
from kvant.tools.report.measure import measure
from kvant.tools.report.texts import Text, built_in_text, halves
from kvant.tools.report.tune import measured, statistics, tune

Pocket = tuple[Decoder, Any]


@pytest.fixture
def text(pocket: Pocket) -> Text:
    return built_in_text(pocket[1], 256, 512)


@pytest.mark.parametrize(
    ("factor", "constant", "part"),
    [
        ({}, {30: 100.0, 62: 100.0}, "center"),
        ({20: 18.0, 52: 18.0, 27: 18.0, 59: 18.0}, {}, "balance"),
        ({3: 18.0, 17: 18.0, 44: 18.0}, {}, "balance"),
        ({3: 18.0, 17: 18.0}, {30: 100.0}, "center+balance"),
    ],
    ids=["a constant", "pairs", "single channels", "both"],
)
def test_plants_are_found(pocket: Pocket, text: Text, factor: Any, constant: Any, part: str) -> None:
    with planted(channels(factor), channels(constant, 0.0), everywhere):
        chosen, tried = tune(pocket[0], text, kv_bits=4, kv_group_size=32, max_kld=1.0, kv_tail=False)
    found = {row.name: row.figures.mean_kld_nats for row in tried}
    assert found["plain"] > 0.3
    assert min(found.values()) < 1e-2
    layer = chosen.layers[0]
    assert all(bool(getattr(layer, name)) for name in part.split("+"))
    assert {own.kv_bits for own in chosen.layers} == {4}


@pytest.mark.parametrize(("most", "is_apart", "more"), [(0.001, True, 1), (0.0003, False, 6)])
def test_layers_get_more_bits_until_it_is_enough(
    pocket: Pocket, text: Text, most: float, is_apart: bool, more: int
) -> None:
    """At first the values of a layer are enough; then it takes three layers."""
    seen: list[tuple[int, int]] = []
    chosen, tried = tune(
        pocket[0],
        text,
        kv_bits=4,
        kv_group_size=32,
        max_kld=most,
        kv_tail=False,
        progress=lambda *done: seen.append(done),
    )
    bits = [bits for own in chosen.layers for bits in (own.kv_bits, own.value_bits)]
    assert bits.count(8) == more
    # bytes a token at 4 bits, with the key transform's share
    (least,) = {row.bytes_per_token - 128 for row in tried if row.name.startswith("layer ")}
    assert 576 < least <= 576 + 16
    found = {row.figures.mean_kld_nats: row.bytes_per_token for row in tried}
    assert found[chosen.figures["mean_kld_nats"]] == least + 64 * bits.count(8)
    assert chosen.figures["mean_kld_nats"] <= most
    assert sum(row.name.startswith("layer ") for row in tried) == 4
    assert [row.bytes_per_token for row in tried if " of layer " in row.name] == [least + 64] * 8
    enough = {row.bytes_per_token for row in tried if row.figures.mean_kld_nats <= most}
    assert found[chosen.figures["mean_kld_nats"]] == min(enough)
    assert any(own.kv_bits != own.value_bits for own in chosen.layers) == is_apart
    assert seen == sorted(seen)
    assert seen[-1][0] <= seen[-1][1]


def test_keys_alone_get_more_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of random tokens are large, which no part of a front mends; of values a group has one number that
    is not 0.

    4 bits hold that as well as 8. So the keys of some layers alone leave as little as these layers do.
    """
    model = load_decoder(write_reference(tmp_path, mistral_config(num_hidden_layers=3))[0])
    few = mx.array([float(n % 16 == 5) for n in range(64)])
    attend = PoolLayerView.multi_head_cache_attention

    def attend_sparse(
        self: PoolLayerView, query: mx.array, key: mx.array, value: mx.array, *rest: Any
    ) -> mx.array:
        """The values are sparse after the rotation that 4 bits have."""
        is_rotated = self.layer.transform.rotates_values
        sparse = 8 * few * (value if is_rotated else rotated(value))
        return attend(self, query, key, sparse if is_rotated else rotated(sparse), *rest)

    monkeypatch.setattr(PoolLayerView, "multi_head_cache_attention", attend_sparse)
    places = mx.random.bernoulli(1 / 8, (400,), key=mx.random.key(1))
    ids = [(7 * i * i + 31 * i) % 300 for i in range(800)]
    text = Text("random", (tuple(ids[:400]), tuple(ids[400:])), 0)
    with planted(channels({}), channels({}, 0.0), lambda at: mx.where(places[at][:, None], 4.0, 1.0)):
        chosen, tried = tune(model, text, kv_bits=4, kv_group_size=16, max_kld=0.02, kv_tail=False)
    enough = {row.name: row.bytes_per_token for row in tried if row.figures.mean_kld_nats <= 0.02}
    least = 480 + 4  # bytes a token at 4 bits: 480 for each more, and a share of the key transform
    assert enough == {
        "keys of 3, values of 3 layers at 8 bits": least + 3 * 128,
        "keys of 3, values of 0 layers at 8 bits": least + 3 * 64,
    }
    assert [(own.kv_bits, own.value_bits) for own in chosen.layers] == [(8, 4)] * 3
    chosen.write(tmp_path / "tuned.json")
    assert KVFormat.of(tmp_path / "tuned.json") == chosen
    formats = model.make_cache(9, kv_format=tmp_path / "tuned.json").formats
    assert [own.bits for own in formats] == [(own.kv_bits, own.value_bits) for own in chosen.layers]


@pytest.mark.parametrize("length", [100, 256])
def test_bytes_a_token_are_the_reports(pocket: Pocket, length: int) -> None:
    """Bytes that do not grow with the tokens, those of a key transform, are divided too."""
    model, tokenizer = pocket
    text = built_in_text(tokenizer, length, 2 * length)
    four = CacheFormat(4, 32)
    (row,) = measured(model, text, {"4 bits": four})
    (result,) = measure("pocket", model, text, [four]).results
    assert row.bytes_per_token == result.bytes_per_token
    assert row.bytes_per_token == round(model.reserve_cache(length, four).nbytes / length)
    assert row.bytes_per_token > four.marginal_bytes(model)


def test_statistics_are_numpys(pocket: Pocket, text: Text) -> None:
    """Of a channel with a large constant, whose spread float32 would lose in a sum of squares."""
    constant = channels({5: 3000.0}, 0.0)
    with planted(channels({}), constant, everywhere):
        (first, *_) = statistics(pocket[0], text)
    (plain, *_) = statistics(pocket[0], text)
    assert mx.allclose(first.spread, plain.spread, rtol=1e-2).item()
    assert mx.allclose(first.mean - plain.mean, constant[:, 0], atol=1e-2).item()
    assert mx.array_equal(first.queries, plain.queries)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    done = call("report", "--tune", str(file), "--tokens", "400", "--json", "-q")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [row["name"] for row in said["tried"]][:2] == ["plain", "center"]
    assert [own["format"] for own in said["formats"]] == ["tuned.json", "4g32", "8g32"]
    assert said["text"]["tokens"] == KVFormat.of(file).figures["tokens"] == 200
    used = call("generate", "--kv-format", str(file), "-p", "Hello", "-m", "3")
    assert used.returncode == 0, used.stderr
    (line,) = re.findall("^cache: .*$", used.stderr, re.M)
    assert "scales fitted" in line
    flags = (["--kv-bits", "4"], ["--kv-format", str(file)], ["--kv-bits", "8"])
    four, tuned, eight = (json.loads(call("plan", *given, "--json").stdout) for given in flags)
    assert tuned["kv_format"] == str(file)
    assert four["bytes"]["cache"] <= tuned["bytes"]["cache"] < eight["bytes"]["cache"]
    for arguments, code, reason in (
        (
            ["generate", "--kv-format", str(file), "--kv-bits", "8"],
            2,
            "--kv-bits is 8; it goes by the --kv-format",
        ),
        (["generate", "--kv-format", str(tmp_path)], 2, "not a regular file"),
        (["report", "--kv-bits", "4"], 2, "--kv-bits is 4; it needs --tune"),
        (["report", "--tune", str(tmp_path / "no" / "x")], 2, "does not exist"),
        (["report", "--tune", str(file), "--formats", "8g32"], 2, "leave one out"),
        (["report", "--tune", str(file), "--max-kld", "0"], 2, "--max-kld is 0.0"),
    ):
        assert reason in refusal(code, *arguments)


def test_halves(pocket: Pocket) -> None:
    text = built_in_text(pocket[1], 100, 500)
    first, second = halves(text)
    assert first.pieces + second.pieces == text.pieces[::2] + text.pieces[1::2]
    with pytest.raises(ValueError, match="expected more, for two halves"):
        halves(built_in_text(pocket[1], 500, 500))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "qwen3_next"])
def test_a_bridged_model(name: str) -> None:
    """With learned sinks nothing is centered; of a model that attends in its own way no queries are seen."""
    model = bridged(name)
    text = Text("random", (tuple(LONG[:100]), tuple(LONG[100:200])), 0)
    chosen, tried = tune(model, text, kv_bits=4, kv_group_size=16, max_kld=1e-4, kv_tail=False)
    names = [row.name for row in tried]
    assert ("center" in names) == (name != "gpt_oss")
    plain = tried[0].figures.mean_kld_nats
    assert 0 < chosen.figures["mean_kld_nats"] < plain
    cache = model.make_cache(60, kv_format=chosen)
    assert model(mx.array([LONG[:50]]), cache=cache).shape[1] == 50
