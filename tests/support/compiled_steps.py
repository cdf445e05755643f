"""Tests of the compiled step against the one that is not compiled, run by tests/engine/test_step.py in a process."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from kvant import sample_utils as sampling
from kvant.cache import ModelCache
from kvant.engine import run as running
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.draw import Sampler, greedy
from kvant.engine.load import find_model
from kvant.engine.row_sampling import Row, sample_rows
from kvant.engine.run import Run, prefill
from kvant.engine.step import STEP_SIZES, CompiledStep, bucket_size
from kvant.models import Decoder, load_decoder
from support.counts import count
from support.drafts import KnownDrafts
from support.numbers import relative_error
from support.without_compiler import never_fuse

never_fuse()

PROMPT = [(7 * i) % 1000 for i in range(100)]
LONG_PROMPT = [(7 * i) % 1000 for i in range(230)]  # its second bucket begins 27 tokens later
TOKENS = count(40, 600)  # behind it
SIZES = [1, 2, 3, 8, 4, 7]  # 3 is padded to 4, 7 to 8
CACHES = [("pocket", 8), ("pocket", 4), ("pocket", 0), ("windows", 8)]
SEEDED = sampling.make_sampler(2.0, 0.99, 0.001, top_k=900, xtc_probability=0.3, seed=3)


class CountedStep(CompiledStep):
    """The step, known to the tests."""

    last: "CountedStep"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        CountedStep.last = self


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CompiledStep", CountedStep)


@pytest.fixture
def fused(request: pytest.FixtureRequest) -> bool:
    """Whether there is a GPU, whose kernels are MLX's operations: what is seen here is the structure."""
    if request.param:
        request.getfixturevalue("fused_calls")
    return bool(request.param)


@cache
def _model(name: str) -> Decoder:
    """The embedded model; with windows that the prompt has filled, if that is its name."""
    folder = find_model("pocket")
    if name == "pocket":
        return load_decoder(folder)
    settings = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(folder / "model.safetensors", copy)
        Path(copy, "config.json").write_text(json.dumps(config | settings))
        return load_decoder(Path(copy))


def _cache(name: str = "pocket", rows: int = 2048, bits: int = 8, **options: Any) -> ModelCache:
    """A cache with loud stale rows: whoever reads one has no number left."""
    made = _model(name).make_cache(rows, kv_bits=bits, bias_split=name == "pocket", **options)
    for layer in made if not bits else ():
        layer.arrays[0] = mx.full(layer.arrays[0].shape, float("nan"), layer.arrays[0].dtype)
        mx.eval(layer.arrays)
    return made


def _rest(run: Run, layers: ModelCache) -> tuple[list[int], int, int]:
    """The rest of a run's tokens, and bytes: that active memory grew by, and the peak above what was active before."""
    mx.eval([layer.arrays for layer in layers])
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    tokens = [token for token, _ in run]
    return tokens, mx.get_active_memory() - active, mx.get_peak_memory() - active


def _run(
    layers: ModelCache, tokens: int, name: str = "pocket", *, compiled: bool = True, **options: Any
) -> tuple[list[int], int, int]:
    """The tokens of a run, and bytes as above, from its tenth token on."""
    run = Run(_model(name), options.pop("prompt", PROMPT), layers, max_tokens=tokens, compiled=compiled, **options)
    first = [next(run)[0] for _ in range(10)]
    rest, grown, peak = _rest(run, layers)
    return first + rest, grown, peak


@cache
def _expected(name: str, bits: int) -> list[int]:
    layers = _cache(name, bits=bits, kernels="unfused")
    return _run(layers, TOKENS, name, compiled=False, prompt=LONG_PROMPT)[0]


@pytest.mark.parametrize("fused", [False, True], indirect=True)
@pytest.mark.parametrize(("name", "bits"), CACHES)
def test_it_is_compiled_once_a_bucket(name: str, bits: int, fused: bool) -> None:
    """Through the kernel, which reads the offset itself, once."""
    expected = _expected(name, bits)[: 200 if fused else TOKENS]
    layers = _cache(name, 512 if fused else 2048, bits)
    tokens, grown, _ = _run(layers, len(expected), name, prompt=LONG_PROMPT)
    assert tokens == expected
    assert grown < 2**16
    if name == "windows":
        assert tokens != _expected("pocket", bits)[: len(tokens)]
    if fused:
        assert CountedStep.last.compilations == 1
    else:
        first = len(LONG_PROMPT) + 1
        buckets = {bucket_size(past, 2048) for past in range(first, first + len(tokens) - 1)}
        assert CountedStep.last.compilations == len(buckets) >= 2


@pytest.mark.parametrize(
    ("name", "bits", "fused"),
    [(name, bits, fused) for name, bits in CACHES for fused in (False, True) if bits == 8 or not fused],
    indirect=["fused"],
)
def test_steps_of_several_tokens(name: str, bits: int, fused: bool) -> None:
    """The first half of each is committed: what is behind it, padding too, is written over.

    Every row is drawn as if alone, with its own position's key. Rounding flips a quantized value now and then: a step
    that is not compiled takes its tokens one by one on a CPU.
    """
    model, sampler = _model(name), greedy if bits == 4 else SEEDED
    plain, *caches = (_cache(name, 512, bits, kernels="unfused" if i == 0 else None) for i in range(3))
    for each in (plain, *caches):
        prefill(model, PROMPT, each)
    steps = [
        CompiledStep(model, each, sampler, processed=processed, most_tokens=8)
        for each, processed in zip(caches, (True, False), strict=True)
    ]
    for i, size in enumerate(SIZES):
        ids, kept, offset = [(31 * (i + j)) % 1000 for j in range(size)], -(-size // 2), plain.offset
        expected = model(mx.array([ids]), cache=plain)[0]
        plain.trim(size - kept)
        (logits,), (tokens, logprobs) = (step(ids) for step in steps)
        assert relative_error(logits, expected) < {4: 2e-2, 8: 1e-3}.get(0 if name == "windows" else bits, 1e-5)
        rows = [sample_rows(logits[j : j + 1], [Row(sampler, (), offset + 1 + j, ())]) for j in range(size)]
        alone = [mx.concatenate([token for token, _ in rows]), mx.stack([row for _, row in rows])]
        assert all(map(mx.array_equal, (tokens, logprobs.reshape(alone[1].shape)), alone))
        for each in caches:
            each.commit(kept)
    for layer, other in zip(caches[0], plain, strict=True):
        kept = layer.window or plain.offset
        for mine, theirs in zip(layer.stored(), other.stored(), strict=True):
            differ = mx.mean(mx.abs(mine[..., -kept:, :] - theirs[..., -kept:, :]) > 1e-4).item()
            assert differ < (1e-2 if bits == 4 else 1e-3)  # type: ignore[operator]
    assert caches[0].ids == caches[1].ids == plain.ids
    assert [step.compilations for step in steps] == [len(STEP_SIZES)] * 2
    if (
        name == "windows"
    ):  # the last step, of 7 tokens, overwrote by its padding one row more of those that a trim needs
        backs = [each.can_trim_to(each.offset - back) for each in (plain, caches[0]) for back in (13, 14)]
        assert backs == [True, True, True, False]


def test_a_step_that_is_discarded_leaves_the_cache() -> None:
    """The arrays are those from before it, and the next step writes into them: no copy of a cache of 36 MB."""
    model = _model("pocket")
    layers, plain = _cache(rows=32_768), _cache(rows=32_768)
    for each in (layers, plain):
        prefill(model, PROMPT, each)
    first, second = (CompiledStep(model, each, greedy, processed=False, most_tokens=4) for each in (layers, plain))
    for ids in ([5, 6, 7, 8], [9]) * 2:
        mx.eval([layer.arrays for layer in layers])
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        held = layers.hold()
        first([1])
        layers.put_back(held)
        del held
        result = first(ids)
        mx.eval(result)
        assert mx.get_peak_memory() - active < 2**21 < layers.nbytes / 8
        expected = second(ids)
        assert mx.array_equal(result[0], expected[0]).item()
        for each in (layers, plain):
            each.commit()
        del result, expected
    for layer, other in zip(layers, plain, strict=True):
        assert all(map(mx.array_equal, layer.arrays, other.arrays))


@pytest.mark.parametrize(
    ("sampler", "rows", "compiled", "processed", "fused"),
    [
        pytest.param(SEEDED, 8192, True, False, False, id="seeded"),
        pytest.param(SEEDED, 8192, True, True, False, id="processed"),
        pytest.param(greedy, len(PROMPT) + 20, True, False, False, id="full"),  # near its end 8 tokens have no room
        pytest.param(SEEDED, 256, True, False, True, id="fused"),
        pytest.param(greedy, 8192, False, False, False, id="not compiled"),
    ],
    indirect=["fused"],
)
def test_drafts_are_verified_compiled(
    sampler: Sampler, rows: int, compiled: bool, processed: bool, fused: bool
) -> None:
    """The text of a run without drafts; where a draft replaces a step that was built, nothing of 36 MB is copied."""
    options: dict[str, Any] = {"sampler": sampler, "compiled": compiled, "max_tokens": 30}
    if processed:
        options["logits_processors"] = sampling.make_logits_processors({30: 1.0}, repetition_penalty=1.2)
    model = _model("pocket")
    plain = [token for token, _ in Run(model, PROMPT, _cache(rows=rows, bits=0), **options)]
    layers = _cache(rows=rows, bits=0)
    run = DraftedRun(model, PROMPT, layers, drafts=KnownDrafts(text=[*PROMPT, *plain], mistakes=0.1), **options)
    tokens = [next(run)[0] for _ in range(10)]
    rest, _, peak = _rest(run, layers)
    assert tokens + rest == plain
    assert layers.ids[0] == [*PROMPT, *plain[:-1]]
    assert peak < 2**21
    assert run.drafts is not None
    assert run.drafts.steps < 0.6 * len(plain)
    if compiled:
        assert CountedStep.last.compilations in (3, 4)


@pytest.mark.parametrize("trace", [1, 3])
def test_a_drafted_run_that_is_interrupted_while_a_step_is_traced(monkeypatch: pytest.MonkeyPatch, trace: int) -> None:
    options: dict[str, Any] = {"compiled": True, "max_tokens": 12}
    model, layers, calls, tokens = _model("pocket"), _cache(rows=256), [], list[int]()
    plain = [token for token, _ in Run(model, PROMPT, _cache(rows=256), **options)]
    run = DraftedRun(model, PROMPT, layers, drafts=KnownDrafts(text=[*PROMPT, *plain], mistakes=0.1), **options)
    step_logits = model.step_logits

    def broken_off(*arguments: Any) -> mx.array:
        calls.append(step_logits(*arguments))
        if len(calls) == trace:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(model, "step_logits", broken_off)
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(token for token, _ in run)
    monkeypatch.undo()
    assert layers.ids[0] == ([*PROMPT, *tokens[:-1]] if tokens else [])
    rest = [token for token, _ in Run(model, tokens[-1:] or PROMPT, layers, **options)]
    assert [*tokens, *rest][:12] == plain


def test_the_cache_is_not_copied_however_much_is_reserved() -> None:
    small, large = (_run(_cache(rows=rows), 30)[2] for rows in (2048, 131_072))
    assert large < 4 * 2**20  # of 140 MB
    assert large - small < 2**20


def test_mlx_lms_samplers() -> None:
    """A seed reproduces, compiled or not, and samples vary."""
    texts = []
    for seed in (1, 2):
        for compiled in (True, True, False):
            mx.random.seed(seed)
            texts.append(_run(_cache(), 25, compiled=compiled, sampler=make_sampler(temp=2.0))[0])
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert texts[3] == texts[4] == texts[5]
    assert len(set(texts[0])) > 10


def test_kvants_sampler() -> None:
    """A seed's key is an input of the step: one compilation, and every token another key."""
    texts = []
    for seed in (1, 2):
        sampler = sampling.make_sampler(2.0, 0.99, 0.001, top_k=900, xtc_probability=0.3, seed=seed)
        texts.append(_run(_cache(), 25, compiled=False, sampler=sampler)[0])
        for processors in ([], [lambda tokens, logits: logits]):
            assert _run(_cache(), 25, sampler=sampler, logits_processors=processors)[0] == texts[-1]
            assert CountedStep.last.compilations == 1
        assert len(set(texts[-1])) > 10
    assert texts[0] != texts[1]


def test_processors_and_python_samplers_work_uncompiled() -> None:
    processors = make_logits_processors(None, 1.5, 20)
    compiled, eager = (_run(_cache(), 30, compiled=c, logits_processors=processors)[0] for c in (True, False))
    assert compiled == eager
    calls = []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(logprobs.max().item())  # looks at values
        return mx.argmax(logprobs, axis=-1) if len(calls) % 2 else mx.argmin(logprobs, axis=-1)

    tokens = _run(_cache(), 20, sampler=sampler)[0]
    assert len(calls) == 20  # every token, not once a trace
    assert len(set(tokens)) > 2
    assert CountedStep.last.compilations == 1
    assert not CountedStep.last.samples
