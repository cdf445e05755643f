"""A bridged model's pool with the fused kernel, against mlx-lm's own caches and the unfused pool."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from support.bridged import bridged
from support.metal_host import host_pytest_skip
from support.numbers import relative_error
from support.tiny_models import CONFIGS

from kvant.bridge.layers import Mask, StepRows
from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedPool
from kvant.cache import CacheOptions
from kvant.cache.pool import PoolSequence
from kvant.operators.paged_kernel import step_pages
from kvant.operators.paged_rows import PagedRows

pytestmark = host_pytest_skip
PROMPTS = [[(7 + 31 * i + 5 * b) % 97 for i in range(length)] for b, length in enumerate((3, 126, 20))]
TEXTS = [[(3 * i + 11 * b) % 97 for i in range(11)] for b in range(len(PROMPTS))]
STEPS = (1, 3, 1, 1, 5)  # new tokens; one sequence comes to its second page
Calls = list[tuple[int, ...]]


def _bridged(name: str) -> BridgedModel:
    """With heads as wide as the kernel takes them."""
    changes = {"v_head_dim": 96} if name == "deepseek_v2" else {"head_dim": 64}
    own = CONFIGS[name].get("text_config")
    return bridged(name, **(changes if own is None else {"text_config": own | changes}))


def _pool(model: BridgedModel, bits: int = 0, kernels: str | None = None) -> BridgedPool:
    sizes = {"tokens": 1024, "sequences": 4, "max_seq_len": 512, "prefill_step_size": 64}
    return model.make_pool(**sizes, options=CacheOptions(kv_bits=bits, kernels=kernels))


def _fed(
    model: BridgedModel, pool: BridgedPool, sequences: Sequence[PoolSequence], ids: Any, rows: int
) -> mx.array:
    """The logits (B, S, vocab) of a committed step."""
    batch = pool.batch(sequences, rows)
    logits = model(mx.array([*ids, *[[0] * len(ids[0])] * (rows - len(ids))]), cache=batch)
    mx.eval(logits)
    return logits[: len(ids)]


def _logits(model: BridgedModel, pool: BridgedPool, which: Sequence[int], rows: int) -> mx.array:
    """Of each text (all of its tokens, vocab), in steps with the others."""
    sequences = [pool.sequence(200) for _ in which]
    for sequence, number in zip(sequences, which, strict=True):
        for first in range(0, len(PROMPTS[number]), 64):
            _fed(model, pool, [sequence], [PROMPTS[number][first : first + 64]], 1)
    found, done = [], 0
    for S in STEPS:
        found.append(_fed(model, pool, sequences, [TEXTS[number][done : done + S] for number in which], rows))
        done += S
    for sequence in sequences:
        sequence.release()
    return mx.concatenate(found, axis=1)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("gpt_oss", 4), ("gemma3_text", 4), ("gemma3n", 6), ("qwen3_next", 2), ("deepseek_v2", 3)],
)
def test_steps_are_mlx_lms_the_unfused_pools_and_those_alone(
    name: str, layers: int, fused_calls: Calls
) -> None:
    """Sinks; a scale of its own; windows of layers that keep all tokens, shared layers; states beside; two
    widths.
    """
    model = _bridged(name)
    given = _logits(model, _pool(model), range(3), rows=4)
    # 3: a prompt
    assert [shape[2] for shape in fused_calls] == [S for S in (3, *STEPS) for _ in range(layers)]
    for b, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        cache = mlx_lm_cache.make_prompt_cache(model.module)
        model.module(mx.array([prompt]), cache=cache)
        assert relative_error(given[b], model.module(mx.array([text]), cache=cache)[0]) < 1e-4
    quantized = _logits(model, _pool(model, 8), range(3), rows=3)
    unfused = _logits(model, _pool(model, 8, "unfused"), range(3), rows=3)
    assert relative_error(quantized, unfused) < 2e-2
    fused = len(fused_calls)
    alone = _logits(model, _pool(model), [1], rows=1)  # where mlx-lm's models ask for other masks
    assert relative_error(alone[0], given[1]) < 1e-5
    assert len(fused_calls) > fused


def _step(lengths: tuple[int, ...], S: int, window: int | None = None, *, is_fused: bool = True) -> StepRows:
    """A step of sequences whose rows begin with what the first new token sees."""
    first = [0 if window is None else max(0, length - window + 1) for length in lengths]
    runs = [[(0, length + S - seen)] for length, seen in zip(lengths, first, strict=True)]
    pages = step_pages([[0]] * len(lengths), first, lengths, max(lengths) + S, window) if is_fused else None
    return StepRows(PagedRows([], runs, first, None, pages), window, lengths, S)


def _window(step: StepRows, mask: Mask) -> object:
    """The window that the kernel is given for a mask; "unknown": it is not called."""
    pages = step.seen_pages(mask)
    return "unknown" if pages is None else pages.window


def test_what_a_mask_shows() -> None:
    """What mlx-lm's models hand back of make_mask, and masks of their own."""
    for S in (1, 3):
        whole, narrow = _step((30, 5), S), _step((30, 5), S, 8)
        assert [_window(whole, whole.mask(window)) for window in (None, 8, 100)] == [None, 8, None]
        assert [_window(narrow, narrow.mask(window)) for window in (8, 5, 100)] == [8, 5, 8]
        assert _window(narrow, narrow.mask(12)) == (8 if S == 1 else "unknown")  # more than was fetched
        assert _window(whole, narrow.mask(8)) == _window(whole, mx.array(whole.mask(8))) == "unknown"
        assert _window(whole, "causal") == "unknown"
        assert [_window(each, None) for each in (whole, narrow)] == ([None, 8] if S == 1 else ["unknown"] * 2)
        unfused = _step((30, 5), S, is_fused=False)
        assert _window(unfused, unfused.mask(None)) == "unknown"
    for length, window, expected in ((30, None, None), (4, 8, 8), (30, 8, "unknown")):
        one = _step((length,), 3, window)
        # all that was fetched: that is more than the window at last
        assert _window(one, "causal") == expected
        assert _window(one, one.mask(5)) == 5


def test_a_query_of_fewer_tokens_than_the_step_is_unfused(fused_calls: Calls) -> None:
    pool = _pool(_bridged("qwen3"))
    batch, query = pool.batch([pool.sequence(9) for _ in range(2)]), mx.random.normal((2, 4, 3, 64))
    batch.begin(mx.zeros((2, 3), mx.int32))
    layer = batch.views[0]
    options: dict[str, Any] = {"scale": 0.1, "mask": layer.make_mask(3), "sinks": None}
    assert layer.attend_fetched(query, query, query, **options) is not None
    assert fused_calls[-1:] == [query.shape]
    fused_calls.clear()
    layer.attend_fetched(query[:, :, 2:], query, query, **options)
    assert not fused_calls


def test_which_layers_are_fused(fused_calls: Calls) -> None:
    model, narrow = _bridged("qwen3"), bridged("qwen3", head_dim=32)
    assert _pool(model).backend == "metal"
    assert _pool(model, kernels="unfused").backend is _pool(narrow).backend is None
    with pytest.raises(ValueError, match="does not take head_dim 32"):
        _pool(narrow, kernels="fused")
