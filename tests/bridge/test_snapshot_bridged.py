"""Snapshots and forks of the caches of mlx-lm's models: every kind of layer, states of linear layers too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.counts import at_widths
from support.numbers import relative_error
from support.tiny_models import build

from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.cache import Identity
from kvant.engine.run import Run
from kvant.errors import SnapshotError

PROMPT = [(7 + 31 * i) % 97 for i in range(40)]
# append only; windows; sinks; a linear layer's state; latent attention; chunks; shared rows; a state beside keys
MODELS = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3", "llama4", "gemma3n", "falcon_h1"]
WITH_STATE = ["qwen3_next", "falcon_h1"]
STEP = mx.array([[5, 6, 7]])


@pytest.fixture(scope="module", autouse=True)
def _without_compilation() -> Iterator[None]:
    """It would call a C++ compiler, the first time."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _model(name: str) -> BridgedModel:
    return BridgedModel(build(name)[0], BridgedConfig(name, 2**17, None), mx.float32)  # of any vocabulary


def _fill(model: Any, cache: Any) -> None:
    """A prompt in chunks, then single tokens: windows have wrapped."""
    for ids in (PROMPT[:13], PROMPT[13:30], *([token] for token in PROMPT[30:])):
        mx.eval(model(mx.array([ids]), cache=cache))


@pytest.mark.parametrize(("name", "bits"), at_widths(MODELS))
def test_the_next_tokens_are_those_of_an_uninterrupted_run(name: str, bits: int, tmp_path: Path) -> None:
    model = _model(name)
    options = {"kv_bits": bits, "kv_group_size": 16}
    cache, larger = (model.make_cache(size, **options) for size in (64, 100))
    _fill(model, cache)
    if name not in WITH_STATE:
        cache.trim(2)
    cache.save(tmp_path / "saved", {"a": "b"})
    assert larger.load(tmp_path / "saved") == {"a": "b"}
    others = [larger, cache.fork()]
    before = [state.nbytes for state in cache.layers]
    for step in (STEP, mx.array([[8]])):
        expected = model(step, cache=cache)
        for other in others:
            assert mx.array_equal(model(step, cache=other), expected)
            assert other.ids == cache.ids
    for other in others[1:]:
        assert [layer.nbytes for layer in other.layers] == before
        assert [type(entry) for entry in other] == [type(entry) for entry in cache]


def test_a_state_goes_back_to_nothing_only(tmp_path: Path) -> None:
    model = _model("qwen3_next")
    cache = model.make_cache(64)
    _fill(model, cache)
    fork = cache.fork()
    cache.save(tmp_path / "saved")
    loaded = model.make_cache(64)
    loaded.load(tmp_path / "saved")
    for other in (fork, loaded):
        assert not other.can_trim_to(39)
        other.reset()
        fresh = model.make_cache(64)
        assert mx.array_equal(model(STEP, cache=other), model(STEP, cache=fresh))
    assert cache.offset == len(PROMPT)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_while_a_run_is_suspended(name: str, tmp_path: Path) -> None:
    """The step that it has queued is not in the copy, and the run goes on."""
    model = _model(name)
    tokens = [token for token, _ in Run(model, PROMPT, model.make_cache(64), max_tokens=12)]
    cache = model.make_cache(64)
    run = Run(model, PROMPT, cache, max_tokens=12)
    given = [next(run)[0] for _ in range(5)]
    cache.save(tmp_path / "saved")
    others = [cache.fork(), model.make_cache(64)]
    others[1].load(tmp_path / "saved")
    assert given + [token for token, _ in run] == tokens
    for other in others:
        assert [token for token, _ in Run(model, tokens[4:5], other, max_tokens=7)] == tokens[5:]


def test_mlx_lms_prefill_leaves_the_buffers_alone() -> None:
    """It evaluates ``state`` after every chunk: a ring whose tokens wait is not copied, and nothing is lost."""
    module, _ = build("gemma3_text")
    cache, plain = kvant.make_prompt_cache(module, 2000, kv_bits=0), make_prompt_cache(module)
    for start in range(0, 600, 60):
        ids = mx.array([[(7 + 31 * i) % 97 for i in range(start, start + 60)]])
        given, expected = (module(ids, cache=one) for one in (cache, plain))
        mx.eval([layer.state for layer in cache])
        mx.eval([layer.state for layer in plain])
        assert relative_error(given, expected) < 1e-5
        del given, expected
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for token in range(5):
        mx.eval(module(mx.array([[token]]), cache=cache))
        mx.eval([layer.state for layer in cache])
    assert mx.get_peak_memory() - before < cache[-1].nbytes


def test_other_models_are_refused(tmp_path: Path) -> None:
    model, other = _model("gemma3_text"), _model("qwen3_next")
    model.identity = other.identity = Identity("a" * 64, "b" * 64)
    cache = model.make_cache(64)
    _fill(model, cache)
    path = tmp_path / "saved"
    cache.save(path)
    with pytest.raises(SnapshotError, match="of another model: its layout has"):
        other.make_cache(64).load(path)
    model.identity = Identity("c" * 64, "b" * 64)
    with pytest.raises(SnapshotError, match="the model's digest is aaaa"):
        model.make_cache(64).load(path)


def test_a_layout_of_other_layers(tmp_path: Path) -> None:
    """As many layers, of other windows."""
    model, other = _model("gemma3_text"), _model("gemma3_text")
    other.module.args.sliding_window = 9
    path = tmp_path / "saved"
    model.make_cache(64).save(path)
    for layer in other.module.layers:
        layer.self_attn.sliding_window = 9
    other.module.model.window_size = 9
    made = other.make_cache(64)
    assert made.layout != model.make_cache(64).layout
    with pytest.raises(
        SnapshotError, match=r'of another model: its layout has .*"window": 8.*; expected .*"window": 9'
    ):
        made.load(path)
