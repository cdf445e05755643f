"""Generation through the compiled step, for tests/engine/test_step.py: run in a process of its own, prints JSON.

On a CPU, MLX compiles only where a C++ compiler is installed, and then fuses what it can into kernels that this
compiler makes. Tests shall need none: the first ``g++`` on PATH is one that does nothing (test_step.py), and MLX is set
not to fuse, a setting of its C++ interface. Tracing, replaying and donating are the same.
"""

import ctypes
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from kvant import sample_utils
from kvant.engine import run as running
from kvant.engine.load import find_model
from kvant.engine.run import Run
from kvant.engine.step import CompiledStep
from kvant.models import Decoder, load_decoder
from support import compiled_steps
from support.counts import count
from support.fused_path import pretend_gpu

NO_FUSE = 2
PROMPT = [(7 * i) % 1000 for i in range(100)]
LONG_PROMPT = [(7 * i) % 1000 for i in range(230)]  # its second bucket begins 27 tokens later
TOKENS = {8: count(70, 1000), 4: count(70, 600), 0: count(70, 600)}  # behind it, by bits


class CountedStep(CompiledStep):
    """The step, known to the caller."""

    last: "CountedStep"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        CountedStep.last = self


def generate(
    model: Decoder,
    count: int,
    *,
    compiled: bool,
    bits: int = 8,
    rows: int = 2048,
    split: bool = True,
    prompt: list[int] = PROMPT,
    kernels: str | None = None,
    **options: Any,
) -> Any:
    """Tokens of a run, and bytes: that active memory grew by, and the peak above what was active before."""
    cache = model.make_cache(rows, kv_bits=bits, bias_split=split, kernels=kernels)
    if bits == 0:  # loud stale rows: whoever reads one has no number left
        for layer in cache:
            layer.arrays[0] = mx.full(layer.cache.shape, float("nan"), layer.cache.dtype)
            mx.eval(layer.arrays)
    steps = Run(model, prompt, cache, max_tokens=count, compiled=compiled, **options)
    tokens = [next(steps)[0] for _ in range(20)]
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    tokens += [token for token, _ in steps]
    grown, peak = mx.get_active_memory() - active, mx.get_peak_memory() - active
    assert cache[0].offset == len(prompt) + count - 1
    return tokens, grown, peak


def sampled(model: Decoder, seed: int, *, compiled: bool) -> list[int]:
    """30 sampled tokens."""
    mx.random.seed(seed)
    tokens, *_ = generate(model, 30, compiled=compiled, sampler=make_sampler(temp=2.0))
    return tokens


def seeded(model: Decoder, seed: int) -> list[Any]:
    """30 tokens of kvant's own sampler: not compiled, then for each way of compiling the same, and its compilations."""
    sampler = sample_utils.make_sampler(2.0, 0.99, 0.001, top_k=900, xtc_probability=0.3, seed=seed)
    found: list[Any] = [generate(model, 30, compiled=False, sampler=sampler)[0]]
    for options in ({}, {"logits_processors": [lambda tokens, logits: logits]}):
        tokens, *_ = generate(model, 30, compiled=True, sampler=sampler, **options)
        found.append([tokens, CountedStep.last.compilations])
    return found


def changed(**settings: Any) -> Decoder:
    """The embedded model with another config.json."""
    folder = find_model("pocket")
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(folder / "model.safetensors", name)
        Path(name, "config.json").write_text(json.dumps(config | settings))
        return load_decoder(Path(name))


def with_windows() -> Decoder:
    """The embedded model with windows that the prompt of 100 tokens has filled."""
    return changed(use_sliding_window=True, sliding_window=40, max_window_layers=1)


def windowed(model: Decoder, plain: list[int]) -> list[Any]:
    """Through rings: the same tokens, compilations, and bytes it grew by."""
    eager = generate(model, 60, compiled=False, split=False, kernels="unfused")[0]
    compiled, grown, _ = generate(model, 60, compiled=True, split=False)
    return [compiled == eager, CountedStep.last.compilations, grown, eager != plain]


def fused(model: Decoder, bits: int, expected: list[int]) -> list[Any]:
    """A run through the fused path, compiled: whether tokens are as expected, compilations, bytes it grew by."""
    tokens = min(200, len(expected))
    given, grown, _ = generate(model, tokens, compiled=True, bits=bits, rows=512, prompt=LONG_PROMPT)
    return [given == expected[:tokens], CountedStep.last.compilations, grown]


def main() -> None:
    """Everything that is checked."""
    library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
    library._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(NO_FUSE)
    running.CompiledStep = CountedStep  # type: ignore[misc]
    model, _ = kvant.load("pocket")
    found: dict[str, Any] = {}
    eager = {
        bits: generate(model, most, compiled=False, bits=bits, prompt=LONG_PROMPT)[0] for bits, most in TOKENS.items()
    }
    for bits, tokens in eager.items():
        compiled, grown, _ = generate(model, TOKENS[bits], compiled=True, bits=bits, prompt=LONG_PROMPT)
        found[f"{bits} bits"] = [compiled == tokens, CountedStep.last.compilations, grown]
    plain = generate(model, 60, compiled=False)[0]
    found["windowed"] = windowed(rings := with_windows(), plain)
    found["several"] = compiled_steps.several(model, rings)
    found["discarded"] = compiled_steps.discarded(model)
    found["drafted"] = compiled_steps.with_drafts(model)
    found["peaks"] = [generate(model, 60, compiled=True, rows=rows)[2] for rows in (2048, 131_072)]

    found["seeds"] = [sampled(model, seed, compiled=compiled) for seed in (1, 2) for compiled in (True, True, False)]
    found["seeded"] = [seeded(model, seed) for seed in (1, 2)]
    processors = make_logits_processors(None, 1.5, 20)
    found["processed"] = [
        generate(model, 60, compiled=compiled, logits_processors=processors)[0] for compiled in (True, False)
    ]
    calls = []

    def counting(logprobs: mx.array) -> mx.array:
        calls.append(logprobs.item() if logprobs.size == 1 else logprobs.max().item())  # looks at values
        return mx.argmax(logprobs, axis=-1) if len(calls) % 2 else mx.argmin(logprobs, axis=-1)

    found["stateful"] = [
        generate(model, 40, compiled=True, sampler=counting)[0],
        len(calls),
        CountedStep.last.compilations,
        CountedStep.last.samples,
    ]

    pretend_gpu()
    found["fused windowed"] = windowed(rings, plain)
    found["several fused"] = compiled_steps.several(model, rings, bits=[8])
    found["drafted"]["fused"] = compiled_steps.drafted(model, compiled_steps.SAMPLERS[1], 256)
    found["fused"] = {bits: fused(model, bits, tokens) for bits, tokens in eager.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
