"""The operators' test vectors: they are the oracle's, kvant passes them, and an implementation with a
mistake fails.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import operator_vectors
import pytest
from support import numpy_operators as own
from support import oracle
from support.oracle import Array, Sequences
from support.pmx_cases import CACHE

from kvant.operators.pmx import vectors
from kvant.operators.pmx.vectors import find_faults, kvant_operators, main, read_vectors

FOLDER = Path(vectors.__file__).parent
TESTS = Path(__file__).parents[1]
VECTORS = read_vectors()
NUMPY = "support.numpy_operators:numpy_operators"
STORE, TOKEN, ATTEND = oracle.store, oracle.token, oracle.attend


def test_the_files_are_what_the_script_writes() -> None:
    made = operator_vectors.make_files()
    assert sum(map(len, made.values())) <= 2_000_000
    for name, data in made.items():
        assert (FOLDER / name).read_bytes() == data, f"{name}: run scripts/operator_vectors.py"


def test_kvant_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == f"{len(VECTORS)} of {len(VECTORS)} cases passed\n"


def test_numpy_passes_without_mlx() -> None:
    """As a file, and where importing MLX fails."""
    path = str(FOLDER / "vectors.py")
    without = "import runpy, sys; sys.modules['mlx'] = sys.modules['kvant'] = None"
    command = [
        sys.executable,
        "-c",
        f"{without}; runpy.run_path({path!r}, run_name='__main__')",
        "--check",
        NUMPY,
    ]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.stdout == f"{len(VECTORS)} of {len(VECTORS)} cases passed\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def away_from_zero(x: Array) -> Array:
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def power_of_two_slopes(num_heads: int) -> list[float]:
    return [2.0 ** (-8 * n / num_heads) for n in range(1, num_heads + 1)]


def causal_one_late(query: Array, key: Array, value: Array, *, attn_mask: Array | None, **how: Any) -> Array:
    """Query i sees token j if j <= start_pos + i + 1."""
    (S, H), T = query.shape[1:3], key.shape[1]
    if how["is_causal"] and not how["is_alibi"] and S > 1:
        hidden = np.where(np.arange(T) > np.arange(T - S, T)[:, None] + 1, -np.inf, 0.0)
        attn_mask = np.stack([hidden + oracle.added_mask(attn_mask, 0, h, T) for h in range(H)])
        how["is_causal"] = False
    return ATTEND(query, key, value, attn_mask=attn_mask, **how)


def causal_from_the_first_token(query: Array, key: Array, value: Array, **how: Any) -> Array:
    """The causal mask is aligned at the top left: query i sees token j if j <= i."""
    S, T = query.shape[1], key.shape[1]
    if how["is_causal"] and S > 1 and how["attn_mask"] is None:
        how["attn_mask"] = np.arange(T) <= np.arange(S)[:, None]
    return ATTEND(query, key, value, **how)


def interleaved_heads(query: Array, key: Array, value: Array, **how: Any) -> Array:
    """Query head h reads kv head h % K."""
    ratio = query.shape[2] // key.shape[2]
    return ATTEND(query, *(np.tile(x, (1, 1, ratio, 1)) for x in (key, value)), **how)


def unscaled(query: Array, key: Array, value: Array, **how: Any) -> Array:
    return ATTEND(query, key, value, scale=1.0, **how)


def one_row_late(key: Array, value: Array, sequences: Sequences, *rest: Any) -> Any:
    late = [earlier + 1 for earlier in sequences.earlier]
    return STORE(key, value, sequences._replace(earlier=late), *rest)


def rewritten_past(key: Array, value: Array, sequences: Sequences, cache: Array, *rest: Any) -> Any:
    """The right tokens, but what is not theirs becomes zeros."""
    cache, scale = STORE(key, value, sequences, cache, *rest)
    return np.where(np.isnan(cache), np.zeros((), cache.dtype), cache), scale


def swapped_kinds(x: Array, kind: int, *rest: Any) -> Array:
    return TOKEN(x, 1 - kind, *rest)


def other_layout(x: Array, kind: int, b: int, t: int, sequences: Sequences, spec: oracle.Spec) -> Array:
    """The memory of another layout: tokens before heads, or heads before tokens."""
    if sequences.rows is None:
        B, L, _, S, K, last = np.array(x.shape)[[[0, 1, 2, 3, 4, 5], [1, 0, 2, 4, 3, 5]][spec.cache_layout]]
        shape = ((L, B, 2, K, S, last), (B, L, 2, S, K, last))[spec.cache_layout]
        return TOKEN(
            x.reshape(shape), kind, b, t, sequences, spec._replace(cache_layout=1 - spec.cache_layout)
        )
    order = ((0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (1, 2, 3, 0))  # (MaxT, L, 2, K) to the layout's axes
    sizes = [x.shape[list(order[spec.cache_layout]).index(axis)] for axis in range(4)]
    T, L, _, K = sizes
    other = (spec.cache_layout + 1) % 4
    shapes = ((T, L, 2, K), (L, T, 2, K), (L, 2, T, K), (L, 2, K, T))
    return TOKEN(x.reshape(*shapes[other], -1), kind, b, t, sequences, spec._replace(cache_layout=other))


def first_page_only(cachestarts: Array, tokens: list[int], attributes: dict[str, Any]) -> list[list[int]]:
    firsts = cachestarts.reshape(len(tokens), -1)[:, 0].tolist()
    return [[first + t for t in range(count)] for first, count in zip(firsts, tokens, strict=True)]


def high_nibble_first(quantized: Array) -> Array:
    nibbles = quantized.astype(np.int8).view(np.uint8) & 0x0F
    return nibbles[..., 1::2] | (nibbles[..., 0::2] << 4)


# A mistake: of what, its name, what takes its place, and the cases of which some must fail.
MISTAKES: dict[str, tuple[Any, str, Any, str]] = {
    "half away from zero": (np, "rint", away_from_zero, "cache*bit"),
    "no least scale": (oracle, "MIN_SCALE", 6e-8, "cache*bit"),
    "mask ignored": (oracle, "added_mask", lambda *_: 0.0, "mask"),
    "slopes of powers of two": (oracle, "alibi_slopes", power_of_two_slopes, "alibi"),
    "causal one late": (oracle, "attend", causal_one_late, "causal"),
    "causal from the first token": (oracle, "attend", causal_from_the_first_token, "causal"),
    "one row late": (oracle, "store", one_row_late, "static-cache"),
    "past rewritten": (oracle, "store", rewritten_past, "cache-*0bit"),
    "values before keys": (oracle, "token", swapped_kinds, "static-cache"),
    "another static layout": (oracle, "token", other_layout, "static-cache"),
    "another dynamic layout": (oracle, "token", other_layout, "dynamic-cache"),
    "heads interleaved": (oracle, "attend", interleaved_heads, "static-attention"),
    "scores not scaled": (oracle, "attend", unscaled, "static-attention"),
    "heads tiled": (own, "repeated", lambda x, count: np.tile(x, (1, count, 1)), "cache"),
    "page table ignored": (own, "rows_of", first_page_only, "dynamic-cache-*paged"),
    "high nibble first": (oracle, "pack_nibbles", high_nibble_first, "cache-*4bit"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what it computes, not by an exception alone, and the command names the cases."""
    owner, name, wrong, only = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    assert main(["--check", NUMPY, "--only", only]) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    names = {vector.name for vector in VECTORS}
    assert all(line.partition(": ")[0] in names for line in lines)
    assert any(" wrong, first at (" in line for line in lines)
    passed, _, total = summary.split()[:3]
    assert int(passed) + len(lines) == int(total)


def test_what_a_fault_says() -> None:
    vector = next(x for x in VECTORS if x.operator == CACHE and x.attributes["quant_bit"] == 8)

    def faults(change: Callable[[dict[str, Any]], Any]) -> str:
        def changed(*call: Any) -> Any:
            results = kvant_operators(*call)
            return change(results) or results

        return "; ".join(find_faults(vector, changed))

    def poke(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda results: results[name].__setitem__((0,) * results[name].ndim, value)

    assert faults(lambda results: None) == ""
    assert faults(lambda results: {"key": results["key"]}) == "value: missing; cache: missing; scale: missing"
    assert faults(lambda results: [1]) == "TypeError: a list was returned; expected a dict"
    assert "largest error inf at (0, 0, 0, 0)" in faults(poke("key", np.nan))
    assert "1 of" in faults(poke("cache", 99))
    assert "float64 (" in faults(lambda results: results | {"key": results["key"].astype(np.float64)})
    place = tuple(map(int, np.argwhere(vector.expected["cache"] == -128)[0]))  # poison
    spoilt = faults(lambda results: results["cache"].__setitem__(place, 7))
    assert f"first at {place}: 7, expected -128, which must stay" in spoilt

    def raising(*_: Any) -> Any:
        raise KeyError("two\nlines")

    assert find_faults(vector, raising) == [r"KeyError: 'two\nlines'"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "json"], "expected module:function"),
        (["--check", ":loads"], "expected module:function"),
        (["--check", "no_such_module:run"], "No module named 'no_such_module'"),
        (["--check", "json:nothing"], "json has no function nothing"),
        (["--check", "json:__doc__"], "json has no function __doc__"),
        (["--only", "no such case"], "no case has such a name"),
        (["--nothing"], "unrecognized arguments: --nothing"),
        (["--check"], "expected one argument"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_list_prints_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "static-*alibi"]) == 0
    names = capsys.readouterr().out.split()
    assert names == [x.name for x in VECTORS if x.name.startswith("static-") and "alibi" in x.name]
