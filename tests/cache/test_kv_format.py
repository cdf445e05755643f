"""The file of a tuned format: written, read, refused where it is wrong, and of formats of before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvant.cache.identity import Identity
from kvant.cache.kv_format import KVFormat, LayerChoice
from kvant.cache.layer_format import LayerFormat, describe_formats, difference
from kvant.cache.options import CacheOptions
from kvant.cache.pool import pool_bytes, single_sizes
from kvant.errors import ArgumentError, SnapshotError

PLAIN = LayerChoice(4, 32)
WHOLE = LayerChoice(8, 16, True, ((0.5, -2.25), (1.0, 3.0)), ((0, -3), (2, 1)))
APART = LayerChoice(8, 32, value_bits=4)
TUNED = KVFormat("a" * 64, (PLAIN, WHOLE, APART), {"mean_kld_nats": 0.004})


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    TUNED.write(tmp_path / "tuned.json")
    found = KVFormat.of(tmp_path / "tuned.json")
    assert (found, found.figures, found.path) == (TUNED, TUNED.figures, str(tmp_path / "tuned.json"))
    assert KVFormat.of(json.loads(json.dumps(TUNED.as_json()))) == TUNED
    # as files of before
    assert [own.get("value_bits") for own in TUNED.as_json()["layers"]] == [None, None, 4]
    (tmp_path / "folder").mkdir()
    with pytest.raises(SnapshotError, match="cannot be written"):
        TUNED.write(tmp_path / "folder")


WRONG: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda raw: raw.update(format="other"), "not a format of a cache"),
    (lambda raw: raw.update(version=1), "version 1; this kvant reads version 2"),
    (lambda raw: raw.update(version=3), "version 3"),
    (lambda raw: raw.update(more=1), "other parts"),
    (lambda raw: raw.update(model=3), "other parts"),
    (lambda raw: raw.update(layers=[]), "not a list of formats"),
    (lambda raw: raw["layers"][0].pop("center"), "a layer has other parts"),
    (lambda raw: raw["layers"][0].update(kv_bits=5), "5 bits in groups of 32"),
    (lambda raw: raw["layers"][0].update(kv_group_size=0), "4 bits in groups of 0"),
    (lambda raw: raw["layers"][0].update(value_bits=5), "5 bits in groups of 32"),
    (lambda raw: raw["layers"][0].update(value_bits=True), "True bits in groups of 32"),
    (lambda raw: raw["layers"][0].update(value_bits=0), "4 bits of keys and 0 of values"),
    (lambda raw: raw["layers"][1].update(kv_bits=0, value_bits=8), "0 bits of keys and 8 of values"),
    (lambda raw: raw["layers"][1].update(rotates=1), "rotates is 1"),
    (lambda raw: raw["layers"][1].update(center=[[1.0], [1.0, 2.0]]), "rows of different lengths"),
    (lambda raw: raw["layers"][1].update(center=[[1.0, float("nan")]] * 2), "out of range"),
    (lambda raw: raw["layers"][1].update(center=[[]]), "not a list of rows"),
    (lambda raw: raw["layers"][1].update(balance=[[0.5, 1]] * 2), "out of range"),
    (lambda raw: raw["layers"][1].update(balance=[[99, 1]] * 2), "out of range"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    raw = json.loads(json.dumps(TUNED.as_json()))
    change(raw)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ArgumentError, match=said) as caught:
        KVFormat.of(path)
    assert str(path) in str(caught.value)
    for text, reason in (("{", "not JSON"), ('{"a": 1, "a": 2}', "there twice"), ("[" * 99999, "not JSON")):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=reason):
            KVFormat.of(path)


def test_whose_it_is() -> None:
    TUNED.check(Identity("a" * 64, "b" * 64), 3)
    for identity, layers, said in (
        ("c", 3, "another model"),
        (None, 3, "another model"),
        ("a", 2, "with 3 layers"),
    ):
        with pytest.raises(ArgumentError, match=said):
            TUNED.check(identity and Identity(identity * 64, ""), layers)
    with pytest.raises(ArgumentError, match="center of 2 kv heads of 2; expected 64"):
        WHOLE.transform(range(2), 64)


def test_a_name_tells_fronts_apart() -> None:
    others = [
        PLAIN, WHOLE, LayerChoice(8, 16, True), LayerChoice(8, 16, False, WHOLE.center),
        LayerChoice(8, 16, False, WHOLE.center, WHOLE.balance), LayerChoice(8, 16, False, WHOLE.center[::-1]),
    ]  # fmt: skip
    assert len({own.name for own in others}) == len(others)
    assert PLAIN.name == ""
    assert LayerChoice(4, 8, True, WHOLE.center, WHOLE.balance).name == WHOLE.name
    assert WHOLE.transform(range(1, 2), 2).balance.tolist() == [[[4.0, 2.0]]]  # type: ignore[union-attr]


def test_bytes_are_known_before() -> None:
    for choice in (PLAIN, LayerChoice(4, 2, True), LayerChoice(4, 2, False, WHOLE.center), WHOLE):
        sizes = {"window": None, "max_seq_len": 9, "transform_name": f"norms+{choice.name}"}
        own = LayerFormat.of_rows(2, 2, 2, 8, 2, "F32", **sizes)
        plain = LayerFormat.of_rows(2, 2, 2, 8, 2, "F32", window=None, max_seq_len=9)
        arrays = choice.transform(range(2), 2).arrays
        more = pool_bytes([own], **single_sizes(9)) - pool_bytes([plain], **single_sizes(9))
        assert more == sum(array.nbytes for array in arrays)


def test_what_are_no_options_is_refused(pocket: tuple[Any, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"kv_format is 'tuned.json'; .*from_keywords"):
        CacheOptions(kv_format="tuned.json")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="bias_split is None"):
        CacheOptions(bias_split=None)  # type: ignore[arg-type]
    for given in (None, {"kv_bits": 4}):
        with pytest.raises(TypeError, match=f"options is a {type(given).__name__}; expected"):
            pocket[0].make_pool(256, sequences=2, options=given)
        with pytest.raises(TypeError, match="options is a"):
            pocket[0].reserve_cache(256, given)


def test_formats_of_before_have_no_front() -> None:
    own = LayerFormat.of_rows(2, 64, 64, 4, 32, "F32", window=None, max_seq_len=9)
    assert "front" not in own.as_json()  # nor do those of now that have none: what was written is read

    def read(given: LayerFormat, **changes: Any) -> LayerFormat:
        return LayerFormat.from_json(json.loads(json.dumps(given.as_json())) | changes)

    assert read(own) == own
    tuned = LayerFormat.of_rows(
        2, 64, 64, 8, 32, "F32", window=None, max_seq_len=9, transform_name="rotate:12"
    )
    assert read(tuned) == tuned
    with pytest.raises(ValueError, match="front is 3"):
        read(tuned, front=3)
    assert (
        describe_formats([own, tuned])
        == "4 and 8 bits in groups of 32, scales fitted, keys rotated in 1 of 2 layers"
    )
    floats = LayerFormat.of_rows(2, 64, 64, 0, 32, "F16", window=None, max_seq_len=9)
    assert describe_formats([floats]) == "float16"
    assert describe_formats([floats, own]) == "4 bits in groups of 32 and float16, scales fitted"
    assert describe_formats([]) == ""


def test_values_have_bits_of_their_own() -> None:
    """Side by side with keys; where both have the same, apart and in files as before; where there are
    none, no bits.
    """

    def made(keys: int, values: int, *widths: int) -> LayerFormat:
        own = LayerFormat.of_rows(2, *widths, keys, 32, "F32", window=None, max_seq_len=9, value_bits=values)
        assert LayerFormat.from_json(json.loads(json.dumps(own.as_json()))) == own
        return own

    shapes = {
        (8, 4, 64, 64): ("U8", (1, 2, 9, 64 + 32), 4),
        (4, 8, 64, 64): ("U8", (1, 2, 9, 32 + 64), 4),
        (4, 8, 96, 64): ("U8", (1, 2, 9, 48 + 64), 5),
        (8, 8, 64, 64): ("I8", (2, 2, 9, 64), 2),
        (8, 4, 64, 0): ("I8", (1, 2, 9, 64), 2),
    }
    for kind, (dtype, shape, scales) in shapes.items():
        arrays = made(*kind).arrays(9)
        assert arrays == {"cache": (dtype, shape), "scale": ("F16", (*shape[:3], scales))}
    before = LayerFormat.of_rows(2, 64, 64, 8, 32, "F32", window=None, max_seq_len=9)
    assert made(8, 8, 64, 64) == before
    assert "value_bits" not in before.as_json()
    apart = made(8, 4, 64, 64)
    assert difference(apart, before, 9, 9) == "value_bits is 4; expected 8"
    said = "8-bit keys and 4-bit values in groups of 32, scales fitted"
    assert describe_formats([apart]) == said
    four = LayerFormat.of_rows(2, 64, 64, 4, 32, "F32", window=None, max_seq_len=9)
    assert describe_formats([before, apart, four]) == f"4 and 8 bits, {said}"
    for raw, wrong in (
        ({"value_bits": 0}, "8 bits of keys and 0 of values"),
        ({"quant_bit": 0}, "0 bits of keys and"),
    ):
        with pytest.raises(ValueError, match=wrong):
            LayerFormat.from_json(json.loads(json.dumps(apart.as_json() | raw)))


def test_options() -> None:
    made = CacheOptions.from_keywords(kv_format=TUNED)
    assert (made.kv_bits, made.kv_group_size) == (4, 16)
    assert CacheOptions.from_json(json.loads(json.dumps(made.as_json()))) == made
    assert made.at(8) == CacheOptions(8)
    assert CacheOptions.from_keywords(kv_bits=None, kv_group_size=16) == CacheOptions(8, 16)
    assert CacheOptions.from_keywords(kv_format=KVFormat("", (LayerChoice(0, 8), PLAIN))).kv_bits == 4
    assert CacheOptions.from_keywords(kv_format=KVFormat("", (LayerChoice(0, 8), APART))).kv_bits == 4
    with pytest.raises(ValueError, match="0 bits of keys and 4 of values"):
        LayerChoice(0, 32, value_bits=4)
    with pytest.raises(ArgumentError, match="kv_group_size is 8; it goes by the kv_format"):
        CacheOptions.from_keywords(kv_group_size=8, kv_format=TUNED)
    plain = CacheOptions.from_keywords(kv_bits=4, kv_format="pmx")
    assert CacheOptions.from_json(plain.as_json()) == plain != CacheOptions(4)
    assert [own.layer(0).rotates for own in (plain, CacheOptions(4), CacheOptions(8))] == [False, True, True]
    assert not CacheOptions.from_keywords(kv_format="pmx").layer(0).rotates
    with pytest.raises(ArgumentError, match="kv_format is pmx, which quantizes"):
        CacheOptions.from_keywords(kv_bits=0, kv_format="pmx")
    assert [CacheOptions(bits).any_tail for bits in (0, 4, 8)] == [False, True, False]
    assert [CacheOptions(bits, tail=True).any_tail for bits in (4, 8)] == [True, True]
    assert not plain.any_tail
    for wrong in ({"kv_tail": 128}, {"kv_tail": True, "kv_bits": 0}):
        with pytest.raises(ArgumentError, match="kv_tail is"):
            CacheOptions.from_keywords(**wrong)
