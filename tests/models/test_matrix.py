"""Matrices: the same product whichever way it is taken, and which way that is."""

import threading
from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest
from support.numbers import normal
from support.openblas import has_small_products

from kvant import blas
from kvant.models import gemv
from kvant.models import matrix as matrix_module
from kvant.models import unpacked as unpacked_module
from kvant.models.matrix import QuantizedMatrix, dense_matrix, joined_matrix, quantized_matrix
from kvant.models.quantization import Quantization
from kvant.operators.streams import FEW_ROWS, cpu_streams

Array = np.ndarray
GROUPS = (32, 64, 128)
FLOATS = [Quantization(4, 32, "mxfp4"), Quantization(8, 32, "mxfp8"), Quantization(4, 16, "nvfp4")]
FORMATS = [2, 3, 4, 5, 6, 8, *FLOATS]
Format = int | Quantization  # bits of an affine one
IN = 256
# Of the largest possible sum: 256 float32 products and additions in any order, and a few roundings of each
# weight.
TOLERANCE = 1e-6
on_a_cpu = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="the ways differ on a CPU only")


def _matrix(
    num_rows: int, bits: Format = 4, group_size: int = 64, num_columns: int = IN, seed: int = 0
) -> QuantizedMatrix:
    quantization = Quantization(bits, group_size) if isinstance(bits, int) else bits
    arrays = mx.quantize(normal(seed, num_rows, num_columns), **quantization.form)
    mx.eval(arrays)
    return QuantizedMatrix(quantization, *arrays)


@lru_cache(1)
def _dequantize(matrix: QuantizedMatrix) -> Array:
    """(out, in) float64, by MLX."""
    weight = mx.dequantize(matrix.weight, matrix.scales, matrix.biases, **matrix.quantization.form)
    return np.array(weight.astype(mx.float32), np.float64)


def _check(matrix: QuantizedMatrix, x: mx.array) -> None:
    weight, rows = _dequantize(matrix), np.array(x, np.float64)
    output = matrix.project(x)
    assert output.dtype == x.dtype
    assert output.shape == (*x.shape[:-1], matrix.num_rows)
    error = np.abs(np.array(output, np.float64) - rows @ weight.T)
    assert (error <= TOLERANCE * (np.abs(rows) @ np.abs(weight.T))).all(), error.max()


def _cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    streams = [mx.new_thread_local_stream(mx.cpu) for _ in range(count)]
    monkeypatch.setattr(matrix_module, "cpu_streams", lambda: streams)


SHAPES = [(1, IN), (3, IN), (4, IN), (7, IN), (9, IN), (40, IN), (1, 1, IN), (2, 3, IN), (2, 4, IN), (IN,)]
Patches = dict[str, int]
# Down to one output at a time, the last part a smaller one.
IN_PARTS: list[Patches] = [
    {"DEQUANTIZED": size, "UNPACKED": size} for size in (1, 10 * IN, 11 * IN - 1, 37 * IN - 1)
]
# Outputs fewer than a block, and a rest; with one core and more.
IN_BLOCKS: list[Patches] = [
    {"UNPACK_FROM": 1, "UNPACKED": 100 * IN, "PARALLEL": 16 * IN, "cores": n} for n in (1, 3)
]
WAYS: list[tuple[Patches, tuple[int, ...], tuple[int, ...]]] = [  # and groups, and numbers of outputs
    ({}, (37,), GROUPS),
    *((each, (37,), (64,)) for each in IN_PARTS),
    *((each, (1, 15, 16, 17, 333), (64,)) for each in IN_BLOCKS),
]


@pytest.mark.parametrize("bits", FORMATS, ids=str)
@pytest.mark.parametrize(("patches", "outputs", "groups"), WAYS)
def test_every_format_shape_and_way(
    monkeypatch: pytest.MonkeyPatch,
    bits: Format,
    patches: Patches,
    outputs: tuple[int, ...],
    groups: tuple[int, ...],
) -> None:
    if patches and mx.default_device().type != mx.cpu:
        pytest.skip("the ways differ on a CPU only")
    for name, size in patches.items():
        if name == "cores":
            _cores(monkeypatch, size)
        else:
            module = unpacked_module if name == "UNPACKED" else matrix_module
            monkeypatch.setattr(module, f"{name}_ELEMENTS", size)
    for group_size in groups:
        for num_rows in outputs:
            matrix = _matrix(num_rows, bits, group_size)
            for shape in SHAPES:
                _check(matrix, normal(1, *shape))
            assert matrix.project(mx.zeros((0, IN))).shape == (0, num_rows)


@pytest.mark.parametrize("quantization", FLOATS, ids=str)
def test_rows_of_matrices_side_by_side(quantization: Quantization) -> None:
    parts = [_matrix(20, quantization), _matrix(17, quantization, seed=1)]
    rows = quantized_matrix(parts).rows(mx.arange(37)).astype(mx.float32)
    assert np.array_equal(np.array(rows), np.concatenate([_dequantize(part) for part in parts]))


@on_a_cpu
@pytest.mark.parametrize("bits", FORMATS, ids=str)
def test_a_row_is_bitwise_the_same_whatever_the_others_are(bits: Format) -> None:
    """A deterministic engine relies on it: its steps have a fixed number of rows."""
    matrix = _matrix(700, bits)
    for count in (2, 8, 16):
        row, others = normal(1, 1, IN), normal(2, count, IN) * 1e4
        alone = mx.concatenate([row, mx.zeros((count - 1, IN))])
        expected = matrix.project(alone)[0]
        _check(matrix, alone)
        # other products round by a row's place
        for place in (0, count - 1) if has_small_products() else (0,):
            company = mx.concatenate([others[:place], row, others[place + 1 :]])
            assert mx.array_equal(matrix.project(company)[place], expected)


@on_a_cpu
@pytest.mark.parametrize("cores", [1, 2, 3, 5])
@pytest.mark.parametrize("bits", FORMATS, ids=str)
def test_in_parallel_the_numbers_are_the_same(
    monkeypatch: pytest.MonkeyPatch, bits: Format, cores: int
) -> None:
    """Also with fewer outputs than cores: MLX divides by zero in a product with none, which ended the
    process.
    """
    _cores(monkeypatch, cores)
    for num_rows in (1, 2, 3, 37):
        matrix = _matrix(num_rows, bits)
        for shape in ((1, IN), (IN,), (1, 1, IN)):
            x = normal(1, *shape)
            expected = matrix.project(x)
            mx.eval(expected)
            with monkeypatch.context() as patched:
                patched.setattr(matrix_module, "PARALLEL_ELEMENTS", 1)
                assert mx.array_equal(matrix.project(x), expected)
            _check(matrix, x)


@on_a_cpu
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_few_rows_are_bitwise_what_each_is_alone(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Checking a draft rounds as decoding does. Outputs are multiples of 4, as any model's are."""
    monkeypatch.setattr(matrix_module, "UNPACK_FROM_ELEMENTS", 1)
    exact = has_small_products()
    # one block, several, blocks of 16 to 50 rows
    shapes = ((700, IN, 64), (1100, 1024, 32), (132, 4864, 128))
    for num_rows, num_columns, group_size in shapes:
        matrix = _matrix(num_rows, bits, group_size, num_columns)
        x = normal(1, FEW_ROWS, num_columns)
        expected = matrix.project(x)
        _check(matrix, x)
        for count in (1, 2, 3, 5):
            for first in (0, FEW_ROWS - count):
                some = slice(first, first + count)
                output = matrix.project(x[some])
                if exact:
                    assert mx.array_equal(output, expected[some]), (num_rows, count)
                else:
                    _check(matrix, x[some])


needs_gemv = pytest.mark.skipif(blas.sgemv() is None, reason="MLX multiplies with its own BLAS")


@on_a_cpu
@pytest.mark.parametrize("by_gemv", [False, pytest.param(True, marks=needs_gemv)])
@pytest.mark.parametrize("shape", [(256, 1280), (640, 256), (700, 513), (896, 1152), (896, 2340)], ids=str)
def test_a_few_rows_of_a_dense_matrix_are_bitwise_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], by_gemv: bool
) -> None:
    """By products of a matrix and a vector, and by MLX: one product for 8 rows, or several."""
    monkeypatch.setattr(gemv, "BREAK_EVEN_ELEMENTS", 0 if by_gemv else 1 << 40)
    matrix, x = dense_matrix([normal(1, *shape[::-1])], mx.float32), normal(1, FEW_ROWS, shape[0])
    assert matrix.computes_at_once == by_gemv
    expected = np.array(x, np.float64) @ np.array(matrix.weight, np.float64)
    for rows in (x, x.reshape(2, 4, -1), x[None]):
        output = matrix.project(rows)
        assert output.shape == (*rows.shape[:-1], shape[1])
        np.testing.assert_allclose(np.array(output).reshape(expected.shape), expected, rtol=1e-4, atol=1e-3)
        if by_gemv or (has_small_products() and shape[1] % 16 == 0):
            assert mx.array_equal(
                output.reshape(expected.shape), mx.stack([matrix.project(row) for row in x])
            )


@on_a_cpu
@needs_gemv
def test_a_product_by_gemv_reads_what_is_there() -> None:
    """Rows that are a view, a matrix that lies in memory turned, and values that change neither."""
    weight, x = normal(0, 640, 1000), normal(1, 3, 2, 640)
    expected = np.array(x[:, 1], np.float64) @ np.array(weight, np.float64)
    turned = mx.contiguous(weight.T).T
    before = np.array(weight), np.array(x)
    for matrix in (weight, turned):
        assert gemv.serves(x, matrix)
        first = gemv.gemv_rows(x[:, 1], matrix)
        second = gemv.gemv_rows(x[:, 0], matrix)
        np.testing.assert_allclose(np.array(first), expected, rtol=1e-4, atol=1e-3)
        assert not mx.array_equal(first, second)
    assert np.array_equal(before[0], np.array(weight))
    assert np.array_equal(before[1], np.array(x))


@on_a_cpu
@needs_gemv
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_gemv_from_every_core(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """More cores than outputs are worth, too, and in several blocks of inputs."""
    monkeypatch.setattr(gemv, "PARALLEL_ELEMENTS", 0)
    monkeypatch.setattr(gemv, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(gemv, "cpu_cores", lambda: cores)
    for shape in ((640, 1000), (130, 200), (16, 20), (1, 1)):
        weight, x = normal(0, *shape), normal(1, FEW_ROWS, shape[0])
        output = gemv.gemv_rows(x, weight)
        np.testing.assert_allclose(np.array(output), np.array(x) @ np.array(weight), rtol=1e-4, atol=1e-3)
        assert mx.array_equal(output, mx.stack([gemv.gemv_rows(row, weight) for row in x]))


@on_a_cpu
@needs_gemv
def test_a_product_by_gemv_inside_of_mlx_s_transformations() -> None:
    weight, x = normal(0, 640, 1000), normal(1, 3, 640)
    assert gemv.serves(x, weight)
    for transformed in (mx.compile, mx.vmap):
        ours = transformed(lambda rows: gemv.gemv_rows(rows, weight))(x)
        np.testing.assert_allclose(np.array(ours), np.array(x) @ np.array(weight), rtol=1e-4, atol=1e-3)
    for argument in (0, 1):
        gradients = [
            mx.grad(lambda x, w, product=product: (product(x, w) ** 2).sum(), argument)(x, weight)
            for product in (gemv.gemv_rows, mx.matmul)
        ]
        np.testing.assert_allclose(*map(np.array, gradients), rtol=1e-3, atol=1e-1)


@on_a_cpu
def test_what_gemv_does_not_serve() -> None:
    large = mx.zeros((640, 1000))
    assert not gemv.serves(large.astype(mx.bfloat16), large)
    assert not gemv.serves(large, large.astype(mx.float16))
    assert not gemv.serves(large, mx.zeros((4, 640, 1000)))
    assert not gemv.serves(large, large[:100])


@on_a_cpu
@pytest.mark.parametrize("bits", FORMATS, ids=str)
def test_an_unpacked_matrix_has_the_numbers_that_mlx_dequantizes(bits: Format) -> None:
    group_size = 64 if isinstance(bits, int) else bits.group_size
    matrix = _matrix(48, bits, group_size)
    unpacked = joined_matrix([matrix], mx.float32)
    assert np.array_equal(np.array(unpacked.weight).T, _dequantize(matrix))


@on_a_cpu
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_many_rows_of_a_dense_matrix(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """From all cores, more of them than outputs or rows too."""
    _cores(monkeypatch, cores)
    monkeypatch.setattr(matrix_module, "PARALLEL_PRODUCT", 1)
    for num_rows in (1, 2, 37):
        weight = normal(0, num_rows, 64)
        for shape in ((64,), (0, 64), (1, 1, 64), (9, 64), (3, 4, 64)):
            x = normal(1, *shape)
            output = dense_matrix([weight], mx.float32).project(x)
            np.testing.assert_allclose(
                np.array(output), np.array(x) @ np.array(weight).T, rtol=1e-4, atol=1e-4
            )


@on_a_cpu
@pytest.mark.parametrize("first_in_thread", [True, False])
def test_in_parallel_from_other_threads(monkeypatch: pytest.MonkeyPatch, first_in_thread: bool) -> None:
    """Whichever thread made the streams, and though it has ended; there are always the same."""
    monkeypatch.setattr(matrix_module, "PARALLEL_ELEMENTS", 1)
    cpu_streams.cache_clear()
    matrix, x = _matrix(37, bits=3), normal(1, 1, IN)
    expected = _dequantize(matrix) @ np.array(x[0], np.float64)
    mx.eval(x)
    outputs: list[mx.array] = []

    def project() -> None:
        output = matrix.project(x)
        mx.eval(output)
        outputs.append(output)

    if not first_in_thread:
        project()
    for _ in range(2):
        thread = threading.Thread(target=project)
        thread.start()
        thread.join()
    project()
    assert len(outputs) == (3 if first_in_thread else 4)
    assert all(mx.array_equal(output, outputs[0]) for output in outputs)
    np.testing.assert_allclose(np.array(outputs[0][0]), expected, rtol=1e-4, atol=1e-4)
    assert cpu_streams() is cpu_streams()
