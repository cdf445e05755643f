"""Every type's blocks against the gguf package's own dequantization."""

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from support.gguf_files import Array

from kvant.tools.gguf.blocks import BLOCK_TYPES, BlockType, Fidelity, Packed

ROWS, BLOCKS = 3, 6  # of a row
HALVES = {  # where the float16 numbers of a block are
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "MXFP4": [], "F16": [0], "BF16": [], "F32": [],
}  # fmt: skip
SPECIAL = np.array([0, -0.0, 6e-8, -6e-8, 6.1e-5, 1, -1, 500], np.float16)  # 6e-8: the smallest float16
TYPES = list(BLOCK_TYPES.items())
NAMES = [kind.name for kind in BLOCK_TYPES.values()]


def _blocks(kind: BlockType, seed: int) -> Array:
    """(ROWS * BLOCKS, bytes) random blocks with finite scales, some of them special."""
    rng = np.random.default_rng(seed)
    count = ROWS * BLOCKS
    blocks = rng.integers(0, 256, (count, kind.nbytes), dtype=np.uint8)
    for place in HALVES[kind.name]:
        halves = rng.normal(0, 0.05, count).astype(np.float16)
        halves[rng.permutation(count)[: len(SPECIAL)]] = SPECIAL / (64 if "K" in kind.name else 1)
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind.name in ("F32", "BF16"):
        blocks[:, kind.nbytes - 1] &= 0x3F  # neither NaN nor infinity
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(100, 140, count)
    return blocks


def _values(kind: BlockType, packed: Packed) -> Array:
    """What MLX makes of a tensor, in float32."""
    if kind.quantization is None:
        return np.array(packed["weight"].astype(mx.float32))
    scales, biases = packed["scales"], packed.get("biases")
    if biases is not None:
        assert scales.dtype == biases.dtype == mx.float16
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return np.array(
        mx.dequantize(packed["weight"], scales, biases, **kind.quantization.form).astype(mx.float32)
    )


@pytest.mark.parametrize(("number", "kind"), TYPES, ids=NAMES)
def test_sizes_are_the_packages(number: int, kind: BlockType) -> None:
    reference = GGMLQuantizationType(number)
    assert kind.name == reference.name
    assert (kind.size, kind.nbytes) == GGML_QUANT_SIZES[reference]


@pytest.mark.parametrize(("number", "kind"), TYPES, ids=NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_values_are_the_packages(number: int, kind: BlockType, seed: int) -> None:
    blocks = _blocks(kind, seed)
    shape = (ROWS, BLOCKS * kind.size)
    expected = quants.dequantize(blocks.reshape(ROWS, -1), GGMLQuantizationType(number)).reshape(shape)
    assert np.array_equal(kind.expand(blocks).reshape(shape), expected)
    found = _values(kind, kind.pack(blocks)).reshape(shape)
    if kind.fidelity is Fidelity.EXACT:
        assert np.array_equal(found, expected)
        return
    # scale and offset by half a unit of float16 each, the smallest at least
    if kind.fidelity is Fidelity.ROUNDED:
        groups = expected.reshape(-1, 32)
        largest = np.abs(blocks_to_products(blocks)).max(-1, keepdims=True)
        error = np.abs(found.reshape(-1, 32) - groups)
        numbers = 2 ** (kind.quantization.bits if kind.quantization else 0)
        assert (error <= largest * 2.0**-11 * (numbers + 1) + 6e-8 * numbers).all()
        return
    groups = expected.astype(np.float16).astype(np.float32).reshape(-1, 32)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 255
    edge = np.abs(groups).max(-1, keepdims=True)
    # half a step, MLX's zero point (which moves the step), and scale and bias rounded to float16
    assert (np.abs(found.reshape(-1, 32) - groups) <= step + edge * 2.0**-9 + 1e-5).all()


def blocks_to_products(blocks: Array) -> Array:
    """(groups, 2): scale and offset of each group of K blocks, one number at a time as ggml's
    get_scale_min_k4.
    """
    found = []
    for block in blocks:
        d, dmin = block[:4].view(np.float16).astype(np.float32)
        q = block[4:16].astype(int)
        for j in range(8):
            if j < 4:
                scale, offset = q[j] & 63, q[j + 4] & 63
            else:
                scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4
                offset = (q[j + 4] >> 4) | (q[j] >> 6) << 4
            found.append((d * scale, dmin * offset))
    return np.array(found, np.float32)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 60000.0])
def test_a_scale_that_float16_does_not_hold_is_refused(bad: float) -> None:
    """60,000 is a float16; times -128, the bias it would need, it is none."""
    kind = BLOCK_TYPES[8]
    blocks = _blocks(kind, 0)
    blocks[5, :2] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="not a finite float16"):
        kind.pack(blocks)
