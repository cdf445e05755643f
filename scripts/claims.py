"""Claims of the docs, each measured by one function: its ways take turns, and medians are printed as a table.

Run: python scripts/claims.py CLAIM [rounds]

    cache       a key/value cache changes nothing but the time
    unfused     the unfused path's attention over a quantized cache, against MLX's in float32 and mlx-lm's
    bias_split  what the bias split costs in one layer's attention of a decode step
    append      a decode step's time and memory do not depend on how much is reserved
    experts     a step and a prefill through experts: native, bridged, and mlx-lm
    command     the whole command from start to exit: kvant generate and mlx_lm.generate. Run it where torch
                is not installed: transformers imports it if it can, and mlx_lm.generate is then slower than
                its users see it
    ranks       one process against two ranks of this machine, which share its cores: what ranks cost, and no
    gain

Rounds go through the ways forwards and backwards in turn; the first is not counted. A ratio is the median
over rounds of a time divided by the first way's of the same round, with its range.
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from kvant.bridge.rope import rotate_by_matrices
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.load import POCKET, find_model
from kvant.engine.request import Request
from kvant.machine import environment
from kvant.models import load_decoder
from kvant.operators import paged_attention, pmx
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.paged_attention import attend_rows
from kvant.operators.paged_rows import PagedRows
from kvant.operators.quantization import quantized_dtype
from kvant.operators.rotary import Rotary
from kvant.operators.stored_tokens import stored_tokens
from kvant.tools.bench.shapes import Shape, write_random
from kvant.tools.statistics import in_turns

# ---- the frame: turns, ratios, tables --------------------------------------------------------------------------------


def timed(compute: Callable[[], Any]) -> Callable[[], float]:
    """A function that returns the milliseconds that computing takes."""

    def run() -> float:
        started = time.perf_counter()
        mx.eval(compute())
        return (time.perf_counter() - started) * 1e3

    return run


def ratio(times: Iterable[float], others: Iterable[float]) -> str:
    """The median and the range of the ratios of each round."""
    ratios = [own / other for own, other in zip(times, others, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def compared(found: Mapping[str, Sequence[float]]) -> list[str]:
    """A cell a way: the median of its milliseconds, and the ratio to the first way's."""
    first, *others = found.values()
    return [f"{median(first):.2f}", *(f"{median(times):.2f}, {ratio(times, first)}" for times in others)]


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def heading(*cells: object) -> None:
    """Print the machine, and the head of a Markdown table."""
    here = environment()
    versions = ", ".join(f"{name} {number}" for name, number in here.versions.items())
    print(f"{time.strftime('%Y-%m-%d')}, {here.device}, {here.cores} cores, BLAS {here.blas}, {versions}\n")
    row(*cells)
    row(*["---"] * len(cells))


# ---- why a cache ---------------------------------------------------------------------------------------------------

Rows = tuple[mx.array, mx.array, mx.array]  # query (1, S, H, D), key and value (1, S, K, D)


def _random_rows(tokens: int) -> Rows:
    keys = mx.random.split(mx.random.key(1), 3)
    query, key, value = (
        mx.random.normal((1, tokens, n, 64), key=k) for n, k in zip((4, 2, 2), keys, strict=True)
    )
    return query, key, value


def _attend(rows: Sequence[mx.array], start: int, cache: mx.array) -> mx.array:
    """The PMX operator without quantization, causal; layout 1: (L, B, 2, K, MaxS, D)."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    return pmx.multi_head_cache_attention(*rows, start, cache, is_causal=True, cache_layout=1, **heads)  # type: ignore[misc]


def last_row_difference(tokens: int = 48) -> float:
    """The largest difference of the newest query's output through the cache from the full computation's
    last row.
    """
    rows, cache = _random_rows(tokens), mx.zeros((1, 1, 2, 2, tokens, 64))
    full = _attend(rows, 0, mx.zeros_like(cache))
    _attend([x[:, :-1] for x in rows], 0, cache)
    return mx.abs(full[:, -1:] - _attend([x[:, -1:] for x in rows], tokens - 1, cache)).max().item()  # type: ignore[return-value]


def earlier_rows_differences(tokens: int = 48) -> tuple[float, float]:
    """The largest changes that one more token makes: in the earlier outputs, and in the earlier keys and
    values.
    """
    rows = _random_rows(tokens)
    shorter, longer = (mx.zeros((1, 1, 2, 2, tokens, 64)) for _ in range(2))
    before, after = _attend([x[:, :-1] for x in rows], 0, shorter), _attend(rows, 0, longer)
    outputs = mx.abs(after[:, :-1] - before).max().item()
    return outputs, mx.abs(longer[..., : tokens - 1, :] - shorter[..., : tokens - 1, :]).max().item()  # type: ignore[return-value]


def greedy_tokens(model: Any, prompt: list[int], count: int, *, cached: bool) -> list[int]:
    """Greedy tokens: one token a step through a cache, or everything computed again at every step."""
    ids, cache = list(prompt), model.make_cache(len(prompt) + count, kv_bits=0) if cached else None
    for step in range(count):
        logits = model(mx.array([ids[-1:] if cached and step else ids]), cache=cache)[0, -1]
        ids.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
    return ids[len(prompt) :]


def cache(rounds: int = 1) -> None:
    """64 tokens of the embedded model; on one layer what is cached is what would be computed again."""
    model, tokenizer = kvant.load(POCKET)
    question = [{"role": "user", "content": "Tell me a story about a fox named Pip."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    ways = {
        way: lambda way=way: greedy_tokens(model, prompt, 64, cached=way == "a cache")
        for way in ("a cache", "none")
    }  # type: ignore[misc]
    heading(
        "with a cache, ms",
        "without",
        "the same tokens",
        "last row differs by",
        "earlier outputs, keys and values by",
    )
    found = in_turns({way: timed(run) for way, run in ways.items()}, rounds)
    same = ways["a cache"]() == ways["none"]()
    changes = " and ".join(f"{change:.1e}" for change in earlier_rows_differences())
    row(*compared(found), same, f"{last_row_difference():.1e}", changes)


# ---- attention -------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, THETA = 14, 2, 64, 1e6  # Qwen2.5-0.5B
CONTEXTS = (128, 1024, 4096, 16384)


def unfused(rounds: int = 25) -> None:
    """One new token, a layer, without the append; mlx-lm's cache has the same bits in groups of 32."""
    heading("context", "bits", "group", "kvant, ms", "mlx-lm quantized", "float32")
    for context in CONTEXTS:
        for bits, group in ((8, 8), (8, 32), (8, 64), (4, 8), (4, 32), (4, 64)):
            row(context, bits, group, *compared(in_turns(_unfused_ways(context, bits, group), rounds)))


def _unfused_ways(context: int, bits: int, group: int) -> dict[str, Callable[[], float]]:
    arrays, rows, key, value = _filled(context, bits, group)
    query, scale = mx.random.normal((1, HEADS, 1, HEAD_DIM), key=mx.random.key(2)), HEAD_DIM**-0.5
    theirs = [mx.quantize(x, 32, bits) for x in (key, value)]
    mx.eval(query, theirs)

    return {
        "kvant": timed(lambda: attend_rows(query, arrays, rows, quant_bit=bits)),
        "mlx-lm": timed(
            lambda: quantized_scaled_dot_product_attention(query, *theirs, scale, None, 32, bits)
        ),
        "float32": timed(lambda: mx.fast.scaled_dot_product_attention(query, key, value, scale=scale)),
    }


def _filled(tokens: int, bits: int, group: int) -> tuple[list[mx.array], PagedRows, mx.array, mx.array]:
    """A layer's arrays full of tokens, the rows of a step that writes the last one, and their keys and
    values.
    """
    key, value = (mx.random.normal((1, KV_HEADS, tokens, HEAD_DIM), key=mx.random.key(i)) for i in (0, 1))
    like = [mx.zeros(0, quantized_dtype(bits)), mx.zeros(0, mx.float16)]
    arrays = stored_tokens(key, value, like, quant_bit=bits, quant_group=group, alone=True)
    mx.eval(key, value, arrays)
    return arrays, PagedRows([(tokens - 1, tokens)], [[(0, tokens)]], [0], None), key, value


def bias_split(rounds: int = 30) -> None:
    """An 8-bit cache, the append included, with the slowest pairs split off."""
    pairs = {"off, ms": None, "0 pairs": 0, "1 pair": 1, "4 pairs": 4, "all pairs": HEAD_DIM // 2}
    query, new = (
        mx.random.normal((1, heads, 1, HEAD_DIM), key=mx.random.key(1)) for heads in (HEADS, KV_HEADS)
    )
    heading("tokens", *pairs)
    for tokens in CONTEXTS:
        ways = {name: _appended(query, new, tokens, count) for name, count in pairs.items()}
        row(tokens, *compared(in_turns(ways, rounds)))


def _appended(query: mx.array, new: mx.array, tokens: int, pairs: int | None) -> Callable[[], float]:
    split = None
    if pairs is not None:
        chosen = tuple(range(HEAD_DIM // 2 - pairs, HEAD_DIM // 2))
        rotation = rotation_table(Rotary.plain(HEAD_DIM, THETA), chosen, tokens)
        key_bias, value_bias = mx.full((KV_HEADS, 2, pairs), 30.0), mx.ones((KV_HEADS, HEAD_DIM))
        split = BiasSplit(key_bias=key_bias, pairs=chosen, rotation=rotation, value_bias=value_bias)
    arrays, rows, *_ = _filled(tokens, 8, 32)

    def step() -> list[mx.array]:
        output, _ = paged_attention.multi_head_cache_attention(
            query, new, new, arrays, rows, quant_bit=8, quant_group=32, bias_split=split
        )
        return [output, *arrays]

    return timed(step)


# ---- the decode step -------------------------------------------------------------------------------------------------


def _latencies(steps: Iterable[Any]) -> list[float]:
    """Milliseconds of each step."""
    times, before = [], time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        times.append((now - before) * 1e3)
        before = now
    return times


def append(rounds: int = 5, tokens: int = 100) -> None:
    """A short context that stays the same; the reservation grows. The memory is that above the resting
    state.
    """
    model, _ = kvant.load(POCKET)

    def run(reserved: int) -> tuple[float, int]:
        scheduler = CacheScheduler(model, model.make_cache(reserved))
        steps = scheduler.answer([Request(range(3, 35), tokens + 8, keep_logprobs=True)])
        for _ in range(8):
            next(steps)
        mx.synchronize()
        resting = mx.get_active_memory()
        mx.reset_peak_memory()
        return median(_latencies(steps)), mx.get_peak_memory() - resting

    sizes = {str(size): size for size in (256, 4096, 32768, 131072)}
    found = in_turns({name: lambda size=size: run(size) for name, size in sizes.items()}, rounds)  # type: ignore[misc]
    times = {name: [each for each, _ in rows] for name, rows in found.items()}
    heading("reserved", "a step, ms", "peak above rest, kB")
    for (name, rows), cell in zip(found.items(), compared(times), strict=True):
        row(name, cell, f"{max(peak for _, peak in rows) / 1e3:.0f}")


# ---- experts ---------------------------------------------------------------------------------------------------------

PROMPT, STEPS = 256, 16  # tokens
Step = Callable[[mx.array], mx.array]  # (1, S) token ids -> logits (1, S, vocab), appended to a cache
TINY = Shape(
    "tiny, 8 experts", "qwen3_moe", 64, 2, 4, 2, 32, 128, 1000, True,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
)  # fmt: skip
LARGE = replace(
    TINY, name="64 experts", hidden_size=512, num_hidden_layers=4, num_attention_heads=8, head_dim=64,
    intermediate_size=512, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=256,
)  # fmt: skip


def expert_engines(folder: Path) -> dict[str, Callable[[], Step]]:
    """Each engine as a function that makes a fresh cache: full precision, float32, the same BLAS."""
    theirs: list[Any] = [load_model(folder)[0] for _ in range(2)]
    for model in theirs:
        model.set_dtype(mx.float32)  # on a CPU its products of experts know no other
        mx.eval(model.parameters())
    own, bridged = load_decoder(folder), theirs[1]
    rotate_by_matrices(bridged)  # as kvant bridges a folder on a CPU

    def start(model: Any, make_cache: Callable[[], Any]) -> Step:
        cache = make_cache()
        return lambda ids: model(ids, cache=cache)

    return {
        "mlx-lm": lambda: start(theirs[0], lambda: make_prompt_cache(theirs[0])),
        "bridged": lambda: start(
            bridged, lambda: kvant.make_prompt_cache(bridged, PROMPT + STEPS, kv_bits=0)
        ),
        "kvant": lambda: start(own, lambda: own.make_cache(PROMPT + STEPS, kv_bits=0)),
    }


def expert_round(start: Callable[[], Step]) -> tuple[float, float]:
    """Milliseconds of the prefill, and the median of a step's."""
    step, times = start(), []
    token = mx.array([[7 * i % 1000 for i in range(PROMPT)]])
    for _ in range(1 + STEPS):
        started = time.perf_counter()
        token = step(token)[:, -1:].argmax(axis=-1)
        mx.eval(token)
        times.append((time.perf_counter() - started) * 1e3)
    return times[0], median(times[1:])


def experts(rounds: int = 5) -> None:
    """Two Qwen3-MoE shapes with random weights."""
    heading("shape, weights", "prefill of", "mlx-lm, ms", "bridged", "kvant")
    for shape in (TINY, LARGE):
        for bits in (0, 4):
            with tempfile.TemporaryDirectory() as name:
                write_random(shape, Path(name), bits=bits)
                engines = expert_engines(Path(name))
            ways = {engine: lambda start=start: expert_round(start) for engine, start in engines.items()}  # type: ignore[misc]
            found = in_turns(ways, rounds)
            for place, what in enumerate((f"{PROMPT} tokens", "a step")):
                times = {engine: [each[place] for each in rows] for engine, rows in found.items()}
                row(f"{shape.name}, {f'{bits} bits' if bits else 'float32'}", what, *compared(times))


# ---- processes -------------------------------------------------------------------------------------------------------


def command(rounds: int = 7) -> None:
    """20 tokens of the embedded model, on one folder."""
    prompt, folder = "Tell me a story about a fox named Pip.", str(find_model(POCKET))
    scripts = Path(sysconfig.get_path("scripts"))
    commands: dict[str, list[str | Path]] = {
        "mlx_lm": [scripts / "mlx_lm.generate", "--model", folder, "--prompt", prompt, "--max-tokens", "20"],
        "kvant": [
            scripts / "kvant",
            "generate",
            prompt,
            "--model",
            folder,
            "--max-tokens",
            "20",
            "--temp",
            "0",
        ],
    }

    def run(words: list[str | Path]) -> float:
        started = time.perf_counter()
        subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        return (time.perf_counter() - started) * 1e3

    heading("mlx_lm.generate, ms", "kvant generate")
    row(
        *compared(
            in_turns({name: lambda words=words: run(words) for name, words in commands.items()}, rounds)
        )
    )  # type: ignore[misc]


def ranks(rounds: int = 3) -> None:
    """A token of the embedded model after 128 tokens, as `kvant generate` says it; two ranks share this
    machine.
    """
    asked = ["generate", "word " * 127, "--raw", "--max-tokens", "33", "--ignore-eos", "--temp", "0"]

    def run(*words: str) -> float:
        program = [Path(sysconfig.get_path("scripts")) / "kvant", *words]
        done = subprocess.run(program, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        said = re.search(r"latency: median ([0-9.]+) ms", done.stderr)
        assert said is not None, done.stderr
        return float(said[1])

    launch = ["launch", "-n", "2", "--", *asked, "--parallel"]
    heading("one process, ms", "pipeline", "tensor")
    ways = {
        "one process": lambda: run(*asked),
        "pipeline": lambda: run(*launch, "pipeline"),
        "tensor": lambda: run(*launch, "tensor"),
    }
    row(*compared(in_turns(ways, rounds)))


CLAIMS = {each.__name__: each for each in (cache, unfused, bias_split, append, experts, command, ranks)}


def main() -> None:
    """Measure the claim that is named."""
    name, *rounds = sys.argv[1:] or [""]
    if name not in CLAIMS:
        sys.exit(__doc__)
    CLAIMS[name](*map(int, rounds))


if __name__ == "__main__":
    main()
