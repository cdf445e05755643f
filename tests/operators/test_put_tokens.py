"""Where new tokens are put: against NumPy, and without a copy of the cache."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from kvant.operators.compiled_attention import put_tokens

B, K = 1, 2


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations that are chosen for each device. They run on the CPU."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx, request.param)))


def _drawn(rng: np.random.Generator, dtype: type, *shape: int) -> np.ndarray:
    return rng.integers(-100 if dtype is not np.uint8 else 0, 100, shape).astype(dtype)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("row", [0, 5, 16])
@pytest.mark.parametrize("new_tokens", [1, 2, 4])
@pytest.mark.parametrize("sides", [2, 1])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float16])
def test_tokens_are_put_at_the_rows_given(dtype: type, words: bool, sides: int, new_tokens: int, row: int) -> None:
    rng = np.random.default_rng(new_tokens)
    cache, scale = _drawn(rng, dtype, 1, B, sides, K, 20, 24), _drawn(rng, np.float16, 1, B, sides, K, 20, 3)
    new = _drawn(rng, dtype, 1, B, sides, K, new_tokens, 24), _drawn(rng, np.float16, 1, B, sides, K, new_tokens, 3)
    tokens = [mx.view(mx.array(new[0]), mx.uint32) if words else mx.array(new[0]), mx.array(new[1])]
    arrays = put_tokens([mx.array(cache), mx.array(scale)], tokens, mx.array(row))
    for array, part in zip((cache, scale), new, strict=True):
        array[:, :, :, :, row : row + new_tokens] = part
    for given, wanted in zip(arrays, (cache, scale), strict=True):
        assert given.dtype == mx.array(wanted).dtype
        np.testing.assert_array_equal(np.array(given), wanted)


@pytest.mark.usefixtures("device")
def test_every_token_has_a_row_of_its_own() -> None:
    (given,) = put_tokens([mx.zeros((1, B, 2, K, 4, 8))], [mx.ones((1, B, 2, K, 2, 8))], mx.array([[3, 1]]))
    np.testing.assert_array_equal(np.array(given).sum(axis=(0, 1, 2, 3, 5)), [0, 2 * K * 8, 0, 2 * K * 8])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("words", [False, True])
def test_the_write_is_in_place(words: bool, way: str) -> None:
    """A write takes memory for the tokens, not for the cache, whose 4 MB it leaves where they are."""
    arrays = [mx.zeros((1, B, 2, K, 8192, 128), mx.int8), mx.zeros((1, B, 2, K, 8192, 4), mx.float16)]
    tokens = [mx.ones((1, B, 2, K, 1, 128), mx.int8), mx.ones((1, B, 2, K, 1, 4), mx.float16)]
    tokens[0] = mx.view(tokens[0], mx.uint32) if words else tokens[0]

    def put(tokens: Sequence[mx.array], row: mx.array) -> None:
        arrays[:] = put_tokens(arrays, tokens, row)

    step = put if way == "eager" else mx.compile(put, inputs=arrays, outputs=arrays)  # as the engine's compiled step
    mx.eval(arrays, tokens)
    for number in range(4):
        place = mx.array(3) + number
        mx.eval(place)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        step(tokens, place)
        mx.eval(arrays)
        assert mx.get_peak_memory() - held < 100_000
