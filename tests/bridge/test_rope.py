"""Positions turned by a matrix on a CPU, against the modules of mlx and mlx-lm that they replace."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import rope_utils
from support.numbers import relative_error

from kvant.bridge.rope import MatrixRoPE, _Matrices

KINDS: dict[str, Any] = {
    "plain": lambda: nn.RoPE(64, base=10000.0),
    "in pairs": lambda: nn.RoPE(64, traditional=True, base=5000.0, scale=0.5),
    "a part": lambda: nn.RoPE(32, base=10000.0),
    "llama 3": lambda: rope_utils.Llama3RoPE(64, scaling_config={"factor": 8.0}),
    "yarn": lambda: rope_utils.YarnRoPE(64, scaling_factor=4.0, original_max_position_embeddings=256),
    "su": lambda: rope_utils.SuScaledRoPE(64, long_factor=[1.0 + i / 8 for i in range(32)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_turns_as_before(kind: str) -> None:
    own, matrix = KINDS[kind](), MatrixRoPE(KINDS[kind](), _Matrices())
    x = mx.random.normal((2, 3, 1, 64), key=mx.random.key(0))
    for offset in (0, 1, 77, 77, 4095, 100_000):
        expected = own(x, offset=offset)
        assert relative_error(matrix(x, offset=offset), expected) < 1e-6
        assert offset == 0 or relative_error(x, expected) > 0.1
    wide = mx.random.normal((1, 3, 1, 128), key=mx.random.key(1))
    if kind in ("plain", "a part"):
        assert relative_error(matrix(wide, offset=77), own(wide, offset=77)) < 1e-6


def test_all_else_goes_through_the_models_own() -> None:
    own, matrix = KINDS["plain"](), MatrixRoPE(KINDS["plain"](), _Matrices())
    x = mx.random.normal((1, 2, 5, 64), key=mx.random.key(0))
    one = x[:, :, :1]
    for given, offset in ((x, 3), (one, mx.array(3)), (one.astype(mx.float16), 3)):
        assert mx.array_equal(matrix(given, offset=offset), own(given, offset=offset))


def test_threads_share_no_matrix() -> None:
    """Two that compute the same lazy array crash. The second thread asks the model's own rotation again."""
    calls = []

    class Counted(nn.RoPE):
        def __call__(self, x: mx.array, offset: int | mx.array = 0, **options: Any) -> mx.array:
            calls.append(offset)
            return super().__call__(x, offset=offset, **options)

    rope = MatrixRoPE(Counted(32), _Matrices())
    x = mx.ones((1, 1, 1, 32))
    for _ in range(2):
        rope(x, offset=3)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(rope, x, offset=3).result()
    assert calls == [3, 3]
