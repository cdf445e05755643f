"""One layer's attention of one new token: time and achieved bytes a second against the length of the context.

Run: python scripts/bench_attention.py [--contexts 1k,4k,32k] [--output FILE.json]    (--help: more)

kvant over its own cache (0, 8 and 4 bits; the fused kernel on a GPU, unfused elsewhere, both with --paths),
MLX's attention over a cache of the activations' dtype, and mlx-lm's pair of quantized products. All variants
hold the same keys and values, are first checked against a float64 reference, and are measured in turns, in an
order that alternates.

A sample is a chain of layers. Each has its own cache, so that none is in the device's caches. The output of
one is the query of the next. On a GPU the chain is compiled, as the decode step is. The append is left out
everywhere. Copy bandwidth is measured first. If a variant is wrong, nothing is timed and the exit code is 1.
"""

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from claims import ratio  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx
from attention_variants import (
    DTYPES,
    GROUP,
    MLX_LM_GROUP,
    SHAPES,
    SPARE,
    Arrays,
    Variant,
    check,
    make_variants,
)

from kvant.machine import default_device, environment, this_machine
from kvant.operators.dispatch import gpu_backend
from kvant.tools.bench.bandwidth import COPY_BYTES, copy_bandwidth_gb_s
from kvant.tools.statistics import in_turns

CONTEXTS = {"gpu": "1k,2k,4k,8k,16k,32k,64k,128k", "cpu": "1k,4k,16k"}
# of an unquantized cache: chains have fewer layers if this is exceeded
CHAIN_BYTES = {"gpu": 2**30, "cpu": 2**27}
SAMPLE_S = 0.02  # a sample takes at least so long
# Of MLX's bfloat16 time, by bits, and of copy bandwidth at 8 bits; on a GPU.
GOAL, GOAL_RATIOS, GOAL_SHARE = ("qwen3-4b", 32768), {8: 0.6, 4: 0.4}, 0.6


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan = _plan(options)
    except ValueError as error:
        parser.error(str(error))
    here = environment()
    recording: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(
            ["scripts/bench_attention.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute: how busy others kept the machine
        **asdict(here),
        **plan,
        "results": [],
        "skipped": [],
    }
    bandwidth = recording["copy_bandwidth_gb_s"] = round(copy_bandwidth_gb_s(_copy_bytes()), 3)
    mx.clear_cache()
    for shape in plan["shapes"]:
        for context in plan["contexts"]:
            layers, needed = _layers(shape, context, plan)
            if needed > plan["memory_bytes"]:
                size = f"needs {needed / 1e9:.1f} GB, the limit is {plan['memory_bytes'] / 1e9:.1f} (--memory-gb)"
                recording["skipped"].append(f"{shape} at {context:,}: {size}")
                continue
            variants = make_variants(shape, context, layers, plan)
            query = mx.random.normal((1, SHAPES[shape][0], 1, SHAPES[shape][2]), key=mx.random.key(10**6))
            query = query.astype(DTYPES[plan["dtype"]])
            try:
                errors = check(variants, query, plan["dtype"])
            except ArithmeticError as error:
                print(f"{shape} at {context:,}: {error}", file=sys.stderr)
                return 1
            times = measure(variants, query, plan)
            for variant in variants:
                ms = times[variant.label]
                speed = variant.token_bytes * context / median(ms) / 1e6
                recording["results"].append(
                    {
                        "shape": shape,
                        "context": context,
                        "layers": layers,
                        "variant": variant.label,
                        "path": variant.path,
                        "bits": variant.bits,
                        "ms": ms,
                        "ratio": median(
                            own / base for own, base in zip(ms, times[variants[0].label], strict=True)
                        ),
                        "cache_bytes": variant.token_bytes * context,
                        "gb_per_s": speed,
                        "copy_share": speed / bandwidth,
                        "error": errors[variant.label],
                    }
                )
            progress = ", ".join(f"{label} {median(ms):.3g}" for label, ms in times.items())
            print(f"{shape} at {context:,}, ms a layer: {progress}", file=sys.stderr, flush=True)
            del variants
            mx.clear_cache()
    if not recording["results"]:
        print("nothing was measured: no context fits in the memory", file=sys.stderr)
        return 1
    print(table(recording))
    if options.output is not None:
        options.output.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(variants: Sequence[Variant], query: mx.array, plan: dict[str, Any]) -> dict[str, list[float]]:
    """Milliseconds a layer of each variant, one a round; every round has all variants, the order
    alternating.
    """

    def way(variant: Variant) -> Callable[[], float]:
        sample = _sample(_chain(variant, plan["kind"] == "gpu"), query, variant.layers)
        sample(1)  # compiles
        repeats = max(1, math.ceil(SAMPLE_S / sample(1)))
        return lambda: sample(repeats) / repeats / len(variant.layers) * 1e3

    return in_turns({variant.label: way(variant) for variant in variants}, plan["rounds"])


def _chain(variant: Variant, compiled: bool) -> Callable[[mx.array, list[Arrays]], mx.array]:
    def chain(query: mx.array, layers: list[Arrays]) -> mx.array:
        for arrays in layers:
            query = variant.attend(query, arrays)
        return query

    return mx.compile(chain) if compiled else chain


def _sample(
    chain: Callable[[mx.array, list[Arrays]], mx.array], query: mx.array, layers: list[Arrays]
) -> Callable[[int], float]:
    """A function: seconds of so many chains, each queued while the one before runs."""

    def run(repeats: int) -> float:
        output = query
        mx.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            output = chain(output, layers)
            mx.async_eval(output)
        mx.eval(output)
        mx.synchronize()
        return time.perf_counter() - started

    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contexts", help=f"cached tokens; default {CONTEXTS['gpu']}, on a CPU {CONTEXTS['cpu']}"
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: all of %(default)s")
    parser.add_argument("--bits", default="0,8,4", help="of a cached element; default %(default)s")
    parser.add_argument("--paths", help="unfused, fused or both; default: fused on a GPU, unfused on a CPU")
    parser.add_argument("--paged", action="store_true", help="also the fused kernel over a pool's pages")
    parser.add_argument("--rounds", type=int, default=15, help="default %(default)s")
    parser.add_argument(
        "--memory-gb", type=float, help="leave out contexts that need more; default: half the device's"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write JSON there, too")
    return parser


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """The options, checked; a ValueError for one that cannot be used."""
    kind, backend = default_device(), gpu_backend()
    plan: dict[str, Any] = {
        "kind": kind,
        "backend": backend,
        "shapes": options.shapes.split(","),
        "contexts": _numbers("--contexts", options.contexts or CONTEXTS[kind]),
        "bits": _numbers("--bits", options.bits),
        "paths": (options.paths or ("fused" if backend else "unfused")).split(","),
        "paged": options.paged,
        "dtype": "bfloat16" if kind == "gpu" else "float32",
        "rounds": options.rounds,
        "memory_bytes": int(options.memory_gb * 1e9)
        if options.memory_gb
        else this_machine().limit_bytes // 2,
    }
    for name, allowed in (("shapes", [*SHAPES]), ("bits", [0, 8, 4]), ("paths", ["unfused", "fused"])):
        if len(set(plan[name])) < len(plan[name]) or not {*plan[name]} <= {*allowed}:
            raise ValueError(
                f"--{name} is {plan[name]}; expected some of {', '.join(map(str, allowed))}, each once"
            )
    if "fused" in plan["paths"] and backend is None:
        raise ValueError("--paths has fused, but the default device is a CPU: the kernel needs a GPU")
    if options.paged and "fused" not in plan["paths"]:
        raise ValueError(f"--paged is of the fused kernel; --paths is {','.join(plan['paths'])}")
    if (
        options.rounds < 1
        or min(plan["contexts"]) < 1
        or (options.memory_gb is not None and not options.memory_gb > 0)
    ):
        raise ValueError("--rounds, --contexts and --memory-gb are to be above 0")
    if options.output is not None and not options.output.parent.is_dir():
        raise ValueError(f"--output is {options.output}; its folder does not exist")
    return plan


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers, 4k for 4,096."""
    try:
        found = [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{name} is {text!r}; expected numbers separated by commas, such as 1k,4096"
        ) from None
    if len(set(found)) < len(found):
        raise ValueError(f"{name} is {text!r}; expected each once")
    return found


def _layers(shape: str, context: int, plan: dict[str, Any]) -> tuple[int, int]:
    """Layers of a chain, and the bytes of these and of intermediate arrays."""
    _, kv_heads, head_dim, most = SHAPES[shape]
    elements = (context + SPARE) * 2 * kv_heads * head_dim
    width = DTYPES[plan["dtype"]].size
    layers = max(1, min(most, CHAIN_BYTES[plan["kind"]] // (elements * width)))
    held = width + sum(bits / 8 + 2 * width / MLX_LM_GROUP for bits in plan["bits"] if bits)
    held += sum(bits / 8 + 2 / GROUP if bits else width for bits in plan["bits"]) * (
        2 if plan["paged"] else 1
    )
    made = 16  # dequantized keys and values, their products, a kv head in float64
    return layers, int(elements * (layers * held + made))


def _copy_bytes() -> int:
    """Bytes of a copy: on a fast GPU 256 MB take less than launching them does."""
    return (
        COPY_BYTES
        if default_device() == "cpu"
        else min(2**31, max(COPY_BYTES, this_machine().limit_bytes // 16))
    )


def goals(recording: dict[str, Any]) -> list[str]:
    """The goals for a GPU, and whether the figures meet them."""
    counts = recording["kind"] == "gpu" and recording["dtype"] == "bfloat16"
    fused = {
        r["bits"]: r
        for r in recording["results"]
        if (r["shape"], r["context"], r["path"]) == (*GOAL, "fused")
    }
    wanted = [
        *(
            (bits, "ratio", f"at most {most} of MLX's bfloat16 time", -most)
            for bits, most in GOAL_RATIOS.items()
        ),
        (8, "copy_share", f"over {GOAL_SHARE:.0%} of copy bandwidth", GOAL_SHARE),
    ]
    found = []
    for bits, figure, said, bound in wanted:
        verdict = "not measured"
        if counts and bits in fused:
            value = fused[bits][figure]
            verdict = (
                f"{'met' if (value <= -bound if bound < 0 else value > bound) else 'NOT MET'}, {value:.2f}"
            )
        found.append(f"goal: {bits}-bit {said}, {GOAL[0]} at {GOAL[1]:,}: {verdict}")
    return found


def table(recording: dict[str, Any]) -> str:
    """All results, and the goals, as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in recording["versions"].items())
    lines = [
        f"{recording['device']}, {recording['cores']} cores, load {recording['load_average']}; {versions}, "
        f"BLAS {recording['blas']}; {recording['dtype']}, copies {recording['copy_bandwidth_gb_s']:.1f} GB/s"
    ]
    for shape in dict.fromkeys(result["shape"] for result in recording["results"]):
        heads, kv_heads, head_dim, _ = SHAPES[shape]
        lines += ["", f"{shape}: {heads} / {kv_heads} heads of {head_dim}", ""]
        lines += ["| context | variant | ms a layer | to MLX | GB/s | of copy |", "| --- " * 6 + "|"]
        baseline: list[float] = []
        for result in (result for result in recording["results"] if result["shape"] == shape):
            baseline = result["ms"] if result["path"] == "mlx" else baseline
            cells = [
                f"{result['context']:,}",
                result["variant"],
                f"{median(result['ms']):.3g} ({min(result['ms']):.3g}-{max(result['ms']):.3g})",
                ratio(result["ms"], baseline),
                f"{result['gb_per_s']:.3g}",
                f"{result['copy_share']:.0%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", *(f"left out: {reason}" for reason in recording["skipped"]), *goals(recording)]
    )


if __name__ == "__main__":
    sys.exit(main())
