"""One layer's attention of one new token: time and achieved bytes a second against the length of the context.

Run: python scripts/bench_attention.py [--contexts 1k,4k,32k] [--output FILE.json] [--plot FILE.svg]    (--help: more)

kvant over its own cache (0, 8 and 4 bits; the fused kernel on a GPU, unfused elsewhere, both with --paths), MLX's
attention over a cache of the activations' dtype, and mlx-lm's pair of quantized products. All variants hold the same
keys and values, are first checked against a float64 reference, and are measured in turns, in an order that alternates.

A sample is a chain of layers. Each has its own cache, so that none is in the device's caches. The output of one is
the query of the next. On a GPU the chain is compiled, as the decode step is. The append is left out everywhere. Copy
bandwidth is measured first. Where a variant is wrong, nothing is timed and the exit code is 1.

Public figures to compare with: on an M4 Pro (273 GB/s) MLX's bfloat16 decode attention of 32 heads, 8 kv heads of 128
takes 0.917 ms at 32k and 3.65 ms at 128k, about 146 GB/s.
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

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
from attention_report import draw, goals, table
from attention_variants import DTYPES, PATHS, SHAPES, SPARE, Arrays, Variant, check, make_variants

from kvant.errors import KvantError
from kvant.machine import environment, this_machine
from kvant.operators.dispatch import gpu_backend
from kvant.operators.kernels.attend import QUERIES
from kvant.tools.bench.bandwidth import COPY_BYTES, copy_bandwidth_gb_s
from kvant.tools.drawing import check_plot_path
from kvant.tools.statistics import Spread, paired_ratio

CONTEXTS = {"gpu": "1k,2k,4k,8k,16k,32k,64k,128k", "cpu": "1k,4k,16k"}
CHAIN_BYTES = {"gpu": 2**30, "cpu": 2**27}  # of an unquantized cache: chains have fewer layers where this is exceeded
SAMPLE_S = 0.02  # a sample takes at least so long


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        plan = _plan(options)
    except (ValueError, KvantError) as error:
        parser.error(str(error))
    if plan["paths"] == ["unfused"]:
        print("The fused kernel does not run here: kvant's path is the unfused one.", file=sys.stderr)
    recording = {**_about(arguments), **plan, "results": [], "skipped": [], "goals": []}
    bandwidth = recording["copy_bandwidth_gb_s"] = round(copy_bandwidth_gb_s(_copy_bytes()), 3)
    mx.clear_cache()
    print(f"{recording['device']}: copies {bandwidth:.1f} GB/s", file=sys.stderr, flush=True)
    for shape in plan["shapes"]:
        for context in plan["contexts"]:
            layers, needed = _layers(shape, context, plan)
            if needed > plan["memory_bytes"]:
                reason = f"{shape} at {context:,}: needs {needed / 1e9:.1f} GB, the limit is"
                recording["skipped"].append(f"{reason} {plan['memory_bytes'] / 1e9:.1f} (--memory-gb)")
                print(f"left out: {recording['skipped'][-1]}", file=sys.stderr, flush=True)
                continue
            variants = make_variants(shape, context, layers, plan)
            query = mx.random.normal((1, SHAPES[shape][0], 1, SHAPES[shape][2]), key=mx.random.key(plan["seed"] + 1))
            query = query.astype(DTYPES[plan["dtype"]])
            try:
                errors = check(variants, query, plan["dtype"])
            except ArithmeticError as error:
                print(f"{shape} at {context:,}: {error}", file=sys.stderr)
                return 1
            times = measure(variants, query, plan)
            recording["results"] += _results(shape, context, layers, variants, errors, times, bandwidth)
            progress = ", ".join(f"{label} {median(ms):.3g}" for label, ms in times.items())
            print(f"{shape} at {context:,}, ms a layer: {progress}", file=sys.stderr, flush=True)
            del variants
            mx.clear_cache()
    if not recording["results"]:
        print("nothing was measured: no context fits in the memory", file=sys.stderr)
        return 1
    recording["goals"] = goals(recording)
    if options.json:
        print(json.dumps(recording, indent=1))
    else:
        print(table(recording))
    if options.output is not None:
        options.output.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        draw(recording, options.plot)
    return 0


def measure(variants: Sequence[Variant], query: mx.array, plan: dict[str, Any]) -> dict[str, list[float]]:
    """Milliseconds a layer of each variant, one a round; every round has all variants, the order alternating."""
    chains = {variant.label: _chain(variant, plan["compiled"]) for variant in variants}
    layers = {variant.label: variant.layers for variant in variants}
    repeats: dict[str, int] = {}
    for label, chain in chains.items():
        _sample(chain, query, layers[label], 1)  # compiles
        took = _sample(chain, query, layers[label], 1)
        repeats[label] = max(1, math.ceil(SAMPLE_S / took))
    times: dict[str, list[float]] = {label: [] for label in chains}
    for number in range(-1, plan["rounds"]):  # the first warms up
        for label in list(chains)[:: -1 if number % 2 else 1]:
            took = _sample(chains[label], query, layers[label], repeats[label])
            if number >= 0:
                times[label].append(took / repeats[label] / len(layers[label]) * 1e3)
    return times


def _chain(variant: Variant, compiled: bool) -> Callable[[mx.array, list[Arrays]], mx.array]:
    def chain(query: mx.array, layers: list[Arrays]) -> mx.array:
        for arrays in layers:
            query = variant.attend(query, arrays)
        return query

    return mx.compile(chain) if compiled else chain


def _sample(
    chain: Callable[[mx.array, list[Arrays]], mx.array], query: mx.array, layers: list[Arrays], repeats: int
) -> float:
    """Seconds of so many chains, each queued while the one before runs."""
    mx.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        query = chain(query, layers)
        mx.async_eval(query)
    mx.eval(query)
    mx.synchronize()
    return time.perf_counter() - started


def _results(
    shape: str,
    context: int,
    layers: int,
    variants: Sequence[Variant],
    errors: dict[str, dict[str, float]],
    times: dict[str, list[float]],
    bandwidth: float,
) -> list[dict[str, Any]]:
    found = []
    baseline = dict(enumerate(times[variants[0].label]))
    for variant in variants:
        ms = times[variant.label]
        speed = variant.token_bytes * context / median(ms) / 1e6
        ratio = paired_ratio(dict(enumerate(ms)), baseline)
        assert ratio is not None  # every round has both
        found.append(
            {
                "shape": shape,
                "context": context,
                "layers": layers,
                "variant": variant.label,
                "path": variant.path,
                "detail": variant.detail,
                "bits": variant.bits,
                "group": variant.group,
                "ms": asdict(Spread(median(ms), min(ms), max(ms), len(ms))),
                "ratio": asdict(ratio),
                "cache_bytes": variant.token_bytes * context,
                "gb_per_s": speed,
                "copy_share": speed / bandwidth,
                "error": errors[variant.label],
            }
        )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", help=f"cached tokens; default {CONTEXTS['gpu']}, on a CPU {CONTEXTS['cpu']}")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: all of %(default)s")
    parser.add_argument("--bits", default="0,8,4", help="of a cached element; default %(default)s")
    parser.add_argument("--paths", help="unfused, fused or both; default: fused on a GPU, unfused on a CPU")
    parser.add_argument(
        "--queries", help="also the fused kernel with so many queries a simdgroup, such as 4,2; default: none"
    )
    parser.add_argument("--paged", action="store_true", help="also the fused kernel over a pool's pages")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of activations and plain caches; default bfloat16, on a CPU float32"
    )
    parser.add_argument("--group", type=int, default=32, help="kvant's; default %(default)s")
    parser.add_argument("--mlx-lm-group", type=int, default=64, help="mlx-lm's; default %(default)s, as there")
    parser.add_argument("--rounds", type=int, default=15, help="default %(default)s")
    parser.add_argument("--eager", action="store_true", help="compile nothing on a GPU")
    parser.add_argument(
        "--memory-gb", type=float, help="leave out contexts that need more; default: half of the device's"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the JSON there too")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg|png", help="draw time against context; needs matplotlib")
    return parser


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """What is measured, checked.

    Raises:
        ValueError, KvantError: options that cannot be used.
    """
    kind = "gpu" if mx.default_device().type == mx.gpu else "cpu"
    where = gpu_backend()
    paths = (options.paths or ("fused" if where else "unfused")).split(",")
    shapes, bits = options.shapes.split(","), [int(n) for n in _numbers("--bits", options.bits)]
    for name, given, allowed in (
        ("--shapes", shapes, [*SHAPES]),
        ("--bits", bits, [0, 8, 4]),
        ("--paths", paths, PATHS),
    ):
        if len(set(given)) < len(given) or not set(given) <= set(allowed):
            raise ValueError(f"{name} is {given}; expected some of {', '.join(map(str, allowed))}, each once")
    if "fused" in paths and where is None:
        raise ValueError("--paths has fused, but the default device is a CPU: the kernel needs a GPU")
    for name, given in (("--queries", options.queries), ("--paged", options.paged)):
        if given and "fused" not in paths:
            raise ValueError(f"{name} is of the fused kernel; --paths is {','.join(paths)}")
    queries = _numbers("--queries", options.queries) if options.queries else []
    choices = () if where is None else (QUERIES[where], QUERIES[where] // 2)
    if where is not None and not set(queries) <= set(choices):
        raise ValueError(f"--queries is {options.queries!r}; expected some of {choices}")
    contexts = _numbers("--contexts", options.contexts or CONTEXTS[kind])
    if options.rounds < 1 or (options.memory_gb is not None and not options.memory_gb > 0):
        raise ValueError("--rounds and --memory-gb are to be above 0")
    for shape in shapes:
        if any(bits) and SHAPES[shape][2] % options.group:
            raise ValueError(f"--group is {options.group}; expected a divisor of {shape}'s head dimension")
    if any(bits) and options.mlx_lm_group not in (32, 64):
        raise ValueError(f"--mlx-lm-group is {options.mlx_lm_group}; expected 32 or 64")
    if options.output is not None and not options.output.parent.is_dir():
        raise ValueError(f"--output is {options.output}; its folder does not exist")
    if options.plot is not None:
        check_plot_path(options.plot)
    return {
        "kind": kind,
        "backend": where,
        "compiled": kind == "gpu" and not options.eager,
        "shapes": shapes,
        "contexts": contexts,
        "bits": bits,
        "paths": paths,
        "queries": queries,
        "queries_used": None if where is None else QUERIES[where],
        "paged": options.paged,
        "dtype": options.dtype or ("bfloat16" if kind == "gpu" else "float32"),
        "group": options.group,
        "mlx_lm_group": options.mlx_lm_group,
        "rounds": options.rounds,
        "seed": options.seed,
        "memory_bytes": int(options.memory_gb * 1e9) if options.memory_gb else this_machine().limit_bytes // 2,
    }


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers, 4k for 4,096."""
    try:
        found = [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected numbers separated by commas, such as 1k,4096") from None
    if min(found) < (0 if name == "--bits" else 1) or len(set(found)) < len(found):
        raise ValueError(f"{name} is {text!r}; expected numbers above 0, each once")
    return found


def _layers(shape: str, context: int, plan: dict[str, Any]) -> tuple[int, int]:
    """Layers of a chain, and the bytes of these and of intermediate arrays."""
    _, kv_heads, head_dim, most = SHAPES[shape]
    elements = (context + SPARE) * 2 * kv_heads * head_dim
    width = DTYPES[plan["dtype"]].size
    layers = max(1, min(most, CHAIN_BYTES[plan["kind"]] // (elements * width)))
    held = width + sum(bits / 8 + 2 * width / plan["mlx_lm_group"] for bits in plan["bits"] if bits)
    own = sum(bits / 8 + 2 / plan["group"] if bits else width for bits in plan["bits"])
    held += own * (2 if plan["paged"] else 1)
    made = 16  # dequantized keys and values, their products, a kv head in float64
    return layers, int(elements * (layers * held + made))


def _copy_bytes() -> int:
    """Bytes of a copy: on a fast GPU 256 MB take less than launching them does."""
    return (
        COPY_BYTES
        if mx.default_device().type == mx.cpu
        else min(2**31, max(COPY_BYTES, this_machine().limit_bytes // 16))
    )


def _about(arguments: Sequence[str] | None) -> dict[str, Any]:
    here = environment()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["scripts/bench_attention.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "device": here.device,
        "cores": here.cores,
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute: how busy others kept the machine
        "system": here.system,
        **here.versions,
        "blas": here.blas,
    }


if __name__ == "__main__":
    sys.exit(main())
