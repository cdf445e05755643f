"""Write src/kvant/operators/pmx/vectors.json and vectors.safetensors: the test vectors of PMX's operators.

    python scripts/operator_vectors.py [folder]

The calls are those of tests/support/pmx_cases.py: first a few in the shapes of models, then those of seeds
whose format or another trait no earlier seed has. The float64 oracle, tests/support/oracle.py, computes what
they give. The same versions write the same bytes.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

import kvant  # noqa: F401  before MLX, which support imports

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import oracle  # noqa: E402
from support.operator_cases import OUTPUT_TOLERANCE  # noqa: E402
from support.oracle import Array, Sequences, Spec  # noqa: E402
from support.pmx_cases import Call, Case, draw_case, draw_values, plain_case  # noqa: E402

FOLDER = ROOT / "src" / "kvant" / "operators" / "pmx"
SEEDS = 3000
MOST_ELEMENTS = 1400  # of a case's cache
MARGIN = 1e-3  # of x / scale from a half
# relative: a float32 division may be so wrong, and a scale in half precision is still the same
DOUBT = 2.0**-22
INDEXES = ("seqstarts", "kvstarts", "cachestarts", "start_pos", "decoding_batches", "max_seqlen", "max_kvlen")


def make_files() -> dict[str, bytes]:
    """The contents of both files by name."""
    cases, arrays = [], {}
    for case in (*usual_cases(), *chosen_cases()):
        name, call = name_of(case), Call(case)
        if case.spec.quant_bit:
            rng = np.random.default_rng((case.seed, 31))
            call.key, call.value = (without_near_ties(x, case, rng) for x in (call.key, call.value))
        inputs, attributes = arguments(call)
        expected = results(call)
        arrays |= {f"{name}/inputs/{own}": x for own, x in inputs.items()}
        arrays |= {f"{name}/expected/{own}": x for own, x in expected.items()}
        entry = {"name": name, "operator": operator_of(case), "attributes": attributes, "inputs": [*inputs]}
        cases.append(
            json.dumps(entry | {"expected": {own: tolerance_of(own, case.spec) for own in expected}})
        )
    index = (
        f'{{"tolerances": {json.dumps(tolerances(), indent=1)},\n"cases": [\n' + ",\n".join(cases) + "\n]}\n"
    )
    return {"vectors.json": index.encode(), "vectors.safetensors": save(arrays)}


def usual_cases() -> Iterator[Case]:
    """The shapes of models: 14 query heads and 2 kv heads of 64, groups of 32, float16."""
    tables, sequences = [[24, 0], [8], [16]], Sequences([10, 0, 5], [1, 4, 2])
    rows = [
        [table[t // 8] + t % 8 for t in range(end)]
        for table, end in zip(tables, sequences.tokens, strict=True)
    ]
    packed = {
        "sequences": sequences._replace(rows=rows),
        "max_rows": (1, 32),
        "tables": tables,
        "page_size": 8,
    }
    for seed, (quant_bit, new) in enumerate(product((0, 8, 4), (1, 4)), SEEDS):
        usual = plain_case(quant_bit, 12, new, seed=seed, ratio=7, head_dim=64)
        half = {"cache_dtype": usual.spec.cache_dtype if quant_bit else "float16", "scale_dtype": "float16"}
        spec = usual.spec._replace(dtype="float16", quant_group=32, **half)
        yield replace(usual, spec=spec)
        if new == 1:
            more = {"forms": ("list",) * 4, "decoding_batches": 1, "seed": seed + 100}
            yield replace(usual, spec=spec._replace(cache_layout=3), **packed, **more)


def chosen_cases() -> Iterator[Case]:
    """Cases of small calls, each with a format or a trait that is new for its operator."""
    seen: set[tuple[Any, ...]] = set()
    for case in map(draw_case, range(SEEDS)):
        spec, operator = case.spec, operator_of(case)
        if np.prod(case.max_rows) * spec.num_layer * 2 * case.num_kv_heads * case.head_dim > MOST_ELEMENTS:
            continue
        own = {
            "format": (spec.cache_layout, case.page_size is None, spec.quant_bit, spec.dtype),
            "dtypes": (spec.dtype, spec.cache_dtype, spec.scale_dtype if spec.quant_bit else ""),
            "data": (case.data, spec.quant_bit),
            "tokens": (
                max(case.sequences.earlier) > 0,
                max(case.sequences.new) > 1,
                len(case.sequences.new) > 1,
            ),
            "layer": (spec.num_layer, spec.layer_idx),
            "group": spec.quant_group if spec.quant_bit else 0,
            "width": case.head_dim,
            "page": case.page_size,
            "repeat": (case.num_repeat, case.num_kv_heads > 1),
            "heads": (case.ratio, case.num_kv_heads > 1, case.is_alibi and case.num_heads),
            "mask": (case.mask, case.mask_rank, case.mask_batch > 1, case.mask_padding > 0)
            if case.mask_rank > 3
            else (case.mask, case.mask_rank, case.mask_padding > 0),
            "mask dtype": case.mask_dtype,
            "order": (case.is_causal, case.is_alibi, case.decoding_batches > 0, max(case.sequences.new) > 1),
        }
        unused = ("repeat",) if case.attends else ("heads", "mask", "mask dtype", "order")
        traits = {(operator, name, value) for name, value in own.items() if name not in unused}
        if not traits <= seen:
            seen |= traits
            yield case


def operator_of(case: Case) -> str:
    name = "multi_head_cache_attention" if case.attends else "key_value_cache"
    return f"dynamic_batching.{name}" if case.packed else name


def name_of(case: Case) -> str:
    """What a reader chooses cases by, and the seed."""
    spec = case.spec
    words = ["dynamic" if case.packed else "static", "attention" if case.attends else "cache"]
    words += [f"layout{spec.cache_layout}"] + ["paged"] * (case.page_size is not None)
    words += [f"{spec.quant_bit}bit", spec.dtype]
    if case.attends:
        words += ["alibi"] * case.is_alibi + ["causal"] * (case.is_causal and not case.is_alibi)
        words += [f"{case.mask}mask"] * (case.mask != "none")
    return "-".join([*words, str(case.seed)])


def without_near_ties(x: Array, case: Case, rng: np.random.Generator) -> Array:
    """The values, with others in place of those whose x / scale could be rounded either way."""
    while (near := near_ties(x, case.spec)).any():
        x = np.where(near, draw_values(rng, x.shape, case.data, case.spec), x)
    return x


def near_ties(x: Array, spec: Spec) -> Array:
    """Where x / scale, exact or rounded to T1, is near a half, and groups whose scale could be rounded either
    way.

    A tie that every arithmetic finds exactly is allowed.
    """
    limit, group = oracle.max_quantized(spec.quant_bit), spec.quant_group
    scale = oracle.quantized_and_scale(x, spec.dtype, spec.quant_bit, group)[1]
    ratio = np.abs(x.astype(np.float64)).reshape(*scale.shape, group).max(axis=-1) / limit
    doubtful = np.zeros(scale.shape, bool)
    for dtype in {spec.dtype, spec.scale_dtype} - {"float32"}:
        doubtful |= oracle.cast(ratio * (1 - DOUBT), dtype) != oracle.cast(ratio * (1 + DOUBT), dtype)
    scale, near = (np.repeat(own, group, axis=-1) for own in (scale, doubtful))
    exact = x.astype(np.float64) / scale
    rounded = oracle.cast(x / scale, spec.dtype).astype(np.float64)
    certain = (exact == rounded) & (np.frexp(scale)[0] == 0.5)  # the scale is a power of two
    for quotient in (exact, rounded):
        near = near | ((np.abs(np.abs(quotient - np.floor(quotient)) - 0.5) < MARGIN) & ~certain)
    return near


def arguments(call: Call) -> tuple[dict[str, Array], dict[str, Any]]:
    """Inputs as the files hold them, and attributes."""
    case, spec = call.case, call.case.spec
    inputs = {"current_key": (call.key, spec.dtype), "current_value": (call.value, spec.dtype)}
    if case.attends:
        inputs = {"query": (call.query, spec.dtype)} | inputs
    inputs = {name: (call.in_batch(x), dtype) for name, (x, dtype) in inputs.items()}
    inputs["cache"] = (call.cache, spec.cache_dtype)
    if call.scale is not None:
        inputs["scale"] = (call.scale, spec.scale_dtype)
    if case.attends and call.mask is not None:
        inputs["attn_mask"] = (call.mask, case.mask_dtype if call.mask.size else "float32")
    arrays = {name: held(x, dtype) for name, (x, dtype) in inputs.items()}
    options = case.options()
    attributes = {name: value for name, value in options.items() if name not in INDEXES}
    indexes: dict[str, Any] = {name: options[name] for name in INDEXES if name in options}
    indexes["start_pos"] = case.sequences.earlier if case.packed else case.sequences.earlier[0]
    if case.tables is not None:
        width = max(map(len, case.tables))
        tables = [table + [-1] * (width - len(table)) for table in case.tables]
        indexes["cachestarts"] = tables if case.page_size else [first for (first,) in tables]
        indexes["seqstarts"], indexes["kvstarts"] = case.starts
    return arrays | {name: np.array(value, np.int64) for name, value in indexes.items()}, attributes


def results(call: Call) -> dict[str, Array]:
    """What the oracle gives."""
    spec, names = call.case.spec, ("output",) if call.case.attends else ("key", "value")
    cache, scale = oracle.store(call.key, call.value, call.case.sequences, call.cache, call.scale, spec)
    expected = zip(names, call.expected(cache, scale), strict=True)
    found = {name: held(oracle.cast(x, spec.dtype), spec.dtype) for name, x in expected}
    found["cache"] = held(cache, spec.cache_dtype)
    return found | ({} if scale is None else {"scale": held(scale, spec.scale_dtype)})


def tolerances() -> dict[str, dict[str, Any]]:
    """Every tolerance by its name: relative, absolute, and why."""

    def rule(relative: float, absolute: float, why: str) -> dict[str, Any]:
        return {"relative": relative, "absolute": absolute, "why": why}

    division = "a float32 division may be inexact in the last place"
    outputs = {
        f"output {dtype}": rule(bound, bound, f"a few roundings of {dtype}, for values of unit scale")
        for dtype, bound in OUTPUT_TOLERANCE.items()
    }
    return {
        "exact": rule(0, 0, "every rounding is specified, and none is near a tie but exact ones"),
        "scale": rule(2.0**-23, 0, division),
        "tokens": rule(2.0**-22, 0, f"{division}, and the product with the scale is rounded"),
        **outputs,
    }


def tolerance_of(result: str, spec: Spec) -> str:
    """The name of the tolerance of a call's result."""
    if result == "output":
        return f"output {spec.dtype}"
    if result == "cache" or not spec.quant_bit or (spec.dtype, spec.scale_dtype) != ("float32", "float32"):
        return "exact"
    return "scale" if result == "scale" else "tokens"


def held(x: Array, dtype: str) -> Array:
    """An array as the file holds it: bfloat16 as its 16 bits in uint16."""
    x = np.ascontiguousarray(x)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, data in make_files().items():
        (folder / name).write_bytes(data)
        print(f"{folder / name}: {len(data)} bytes")
