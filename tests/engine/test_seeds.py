"""Draws go by seed and position alone, and sampling starts no compiler and imports no other engine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant import generate, stream_generate
from kvant.engine.draw import draw_keys, splitmix64
from kvant.engine.run import Run
from kvant.engine.sampling import SamplingOptions, make_logits_processors, make_sampler
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
QUESTION = "Tell me a story about a fox named Pip."


def _tokens(pocket: Pocket, seed: int | None, count: int = 30, **settings: Any) -> list[int]:
    """What a seed draws, without an end."""
    model, _ = pocket
    prompt = list(range(20, 60))
    cache = model.make_cache(128, kv_bits=8)
    run = Run(model, prompt, cache, max_tokens=count, sampler=make_sampler(2.0, seed=seed), **settings)
    return [token for token, _ in run]


def test_splitmix64_by_its_published_sequence() -> None:
    """Seed 1234567, as Rosetta Code lists it for the reference implementation."""
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64((1234567 + i * gamma) % 2**64) for i in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_without_a_seed_every_run_takes_its_own(pocket: Pocket) -> None:
    model, tokenizer = pocket
    sampler = make_sampler(2.0)
    texts = {generate(model, tokenizer, QUESTION, max_tokens=20, sampler=sampler) for _ in range(3)}
    assert len(texts) == 3


def test_keys_of_all_seeds_and_positions_differ() -> None:
    keys = set()
    seeds = [*range(20), 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A]
    for seed in seeds:
        sampler = make_sampler(1.0, seed=seed)
        for position in range(500):
            key = draw_keys([sampler], [position])
            assert key is not None
            assert key.dtype == mx.random.key(0).dtype
            keys.add(tuple(key[0].tolist()))  # type: ignore[arg-type]
    assert len(keys) == len(seeds) * 500


def test_a_seed_is_the_whole_state(pocket: Pocket) -> None:
    state = mx.random.state[0].tolist()  # type: ignore[index]
    first = _tokens(pocket, 5)
    assert mx.random.state[0].tolist() == state  # type: ignore[index]
    mx.random.seed(77)
    assert _tokens(pocket, 5) == first
    assert _tokens(pocket, 6) != first
    assert len(set(first)) > 10
    assert _tokens(pocket, None) != _tokens(pocket, None)
    bias = make_logits_processors({0: -1.0})
    assert _tokens(pocket, 5, logits_processors=bias) == _tokens(pocket, 5, logits_processors=bias)


def test_building_options_leaves_mlxs_random_state() -> None:
    mx.random.seed(3)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)
    SamplingOptions(temp=1.0, seed=9).build(300)
    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_the_same_text_twice_and_through_a_chain_of_filters(pocket: Pocket) -> None:
    model, tokenizer = pocket

    def text() -> str:
        sampler = make_sampler(1.4, 0.99, 0.001, top_k=200, xtc_probability=0.3, seed=1)
        return generate(model, tokenizer, QUESTION, max_tokens=40, sampler=sampler)

    assert text() == text()


def test_runs_that_take_turns_draw_what_each_draws_alone(pocket: Pocket) -> None:
    model, tokenizer = pocket

    def run(seed: int) -> Iterator[Any]:
        return stream_generate(model, tokenizer, QUESTION, max_tokens=25, sampler=make_sampler(1.5, seed=seed))

    alone = [[response.token for response in run(seed)] for seed in (1, 2)]
    together: list[list[int]] = [[], []]
    runs = [run(1), run(2)]
    for _ in range(25):
        for tokens, responses in zip(together, runs, strict=True):
            tokens += [response.token for response in [next(responses, None)] if response is not None]
            mx.random.uniform()  # somebody else's numbers
    assert together == alone
    assert alone[0] != alone[1]


def test_a_run_that_goes_on_draws_as_one_that_was_not_cut(pocket: Pocket) -> None:
    """The position counts what the cache holds, not this run's tokens."""
    model, tokenizer = pocket
    settings = {"sampler": make_sampler(1.5, seed=4), "logits_processors": make_logits_processors({0: -1e9, 2: -1e9})}
    whole = [r.token for r in stream_generate(model, tokenizer, QUESTION, max_tokens=20, **settings)]
    cache = model.make_cache(100)
    parts: list[int] = []
    for prompt in (QUESTION, None):
        fed = [parts[-1]] if prompt is None else prompt
        run = stream_generate(model, tokenizer, fed, max_tokens=10, prompt_cache=cache, **settings)
        parts += [response.token for response in run]
        cache.trim(1)  # the last token is fed again
    assert parts == whole


RECORDER = '#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> "$TMPDIR/compiled"\n'


def test_sampling_starts_no_compiler(tmp_path: Path) -> None:
    """With no program on PATH at all, and with a compiler that notes its use."""
    texts = []
    for name in ("none", "noting"):
        folder, temporary = tmp_path / name, tmp_path / f"{name}.tmp"
        folder.mkdir()
        temporary.mkdir()
        if name == "noting":
            for compiler in ("g++", "c++", "clang++"):
                (folder / compiler).write_text(RECORDER)
                (folder / compiler).chmod(0o755)
        path = str(folder) if name == "none" else f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
        flags = ["--temp", "0.8", "--top-p", "0.9", "--min-p", "0.01", "--top-k", "50", "--xtc-probability", "0.2"]
        done = subprocess.run(
            [sys.executable, "-m", "kvant", "generate", QUESTION, *flags, "--seed", "1", "-q", "-m", "20"],
            env=os.environ | {"PATH": path, "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "cut at --max-tokens 20\n")
        assert [path.name for path in temporary.rglob("*") if path.is_file()] == []
        texts.append(done.stdout)
    assert texts[0] == texts[1] != ""


def test_sampling_imports_neither_mlx_lm_nor_transformers() -> None:
    code = """
import sys
import kvant
import mlx.core as mx
from kvant.engine.row_sampling import Row, sample_rows
from kvant.engine.sampling import SamplingOptions
for temp in (0.0, 1.0):
    options = SamplingOptions(temp=temp, seed=3 if temp else None, presence_penalty=1.0, logit_bias={1: 2.0})
    sampler, processors = options.build(9)
    token, _ = sample_rows(mx.zeros((1, 9)), [Row(sampler, processors, 1, [3])])
    mx.eval(token)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"mlx_lm", "transformers", "tokenizers"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
