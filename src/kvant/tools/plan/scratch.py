"""The memory of a chunk of a prompt: what two layers compute and throw away, operation by operation.

The operations are those of kvant.models.decoder, kvant.models.linear and kvant.operators, with those MLX composes its
own from on a CPU; tests hold the sum against MLX's count of a run. S new tokens, T cached tokens read, H query heads,
K kv heads, D head_dim.
"""

from dataclasses import dataclass

from kvant.models.config import ModelConfig
from kvant.models.linear import DEQUANTIZE_FROM_ROWS, DEQUANTIZED_ELEMENTS, PARALLEL_ELEMENTS
from kvant.models.quantization import Quantization
from kvant.operators.attention import BLOCK_SCORE_BYTES, GPU_FUSED_HEAD_DIMS
from kvant.operators.bias_split import MAX_SCORE_QUERIES
from kvant.operators.streams import cpu_streams
from kvant.tools.plan.tape import Buffer, Tape

FLOAT32 = 4  # bytes
# Entries of a tape that MLX queues before it waits. Dequantizing has streams of its own, each with a queue: what that
# adds was measured with 1, 2, 4 and 8 of them.
QUEUED_AHEAD = 100
QUEUED_WITH_SECOND = 5
QUEUED_WITH_FURTHER = 20  # each
LAYERS = 2  # the widest place may be where one layer ends and the next begins
BLOCKS = 8  # of the attention, the last ones: no more are held at once
PARTS = 64  # of a quantized matrix, the last ones, in whole rounds of streams; Qwen2.5-7B's largest has 34


@dataclass(frozen=True, slots=True)
class Chunk:
    """S tokens of a prompt, the last of which is row T of the cache.

    Attributes:
        itemsize: bytes of a number of the compute dtype.
        on_cpu: MLX composes its fused operations on a CPU, and quantized matrices are dequantized part by part.
        kv_bits: 8, 4 or 0.
        pairs: rotary pairs a layer whose key bias is split off; None: the cache splits nothing off.
        new: S.
        rows: T.
    """

    config: ModelConfig
    itemsize: int
    on_cpu: bool
    kv_bits: int
    pairs: int | None
    new: int
    rows: int

    def scratch(self) -> int:
        """The most bytes that are held beside the weights and the cache.

        On a GPU, where what is freed depends on its command buffers, everything a layer makes is counted.
        """
        tape = Tape(self._queued_ahead() if self.on_cpu else float("inf"))
        x = tape.make(self._features(self.config.hidden_size))
        for _ in range(min(LAYERS, self.config.num_hidden_layers) if self.on_cpu else 1):
            x = self._mlp(tape, self._attention(tape, x))
        return tape.peak()

    def _queued_ahead(self) -> int:
        streams = 1 if self.config.quantization is None else len(cpu_streams())
        return QUEUED_AHEAD + QUEUED_WITH_SECOND * (streams > 1) + QUEUED_WITH_FURTHER * max(0, streams - 2)

    def _features(self, count: float) -> float:
        """Bytes of ``count`` numbers for each new token."""
        return count * self.new * self.itemsize

    def _attention(self, tape: Tape, x: Buffer) -> Buffer:
        config = self.config
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv = self._project(tape, self._norm(tape, x), config.hidden_size, (H + 2 * K) * D)
        tape.read(qkv, entries=7)  # bias, reshape, transpose, slices
        query_key = qkv
        if config.query_key_norm:
            query_key = self._norm(tape, qkv, (H + K) * D)
        query_key = self._rotate(tape, query_key, (H + K) * D)
        cached = self._cached_rows(tape, query_key, qkv)
        joined = self._attend(tape, query_key, cached)
        merged = tape.make(self._features(H * D), joined, entries=3)  # (B, H, S, D) -> (B, S, H D)
        projected = self._project(tape, merged, H * D, config.hidden_size)
        tape.read(x, projected)
        return projected

    def _mlp(self, tape: Tape, x: Buffer) -> Buffer:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate_up = self._project(tape, self._norm(tape, x), hidden, 2 * inner)
        gated = tape.make(self._features(inner), gate_up, entries=3)  # sigmoid; both products are written into it
        tape.read(gated, gate_up, entries=4)
        down = self._project(tape, gated, inner, hidden)
        tape.read(down, x)
        return down

    def _norm(self, tape: Tape, x: Buffer, features: int | None = None) -> Buffer:
        size = self._features(features or self.config.hidden_size)
        if not self.on_cpu:
            return tape.make(size, x)
        square = tape.make(size, x)
        tape.read(square, entries=10)  # mean, epsilon, root
        normed = tape.make(size, x, entries=3)
        tape.read(normed, entries=3)  # its weight
        return normed

    def _project(self, tape: Tape, x: Buffer, width: int, out: int) -> Buffer:
        """A product with a matrix (out, width)."""
        # Matrices that were left in floating point beside quantized ones only need less.
        quantization = self.config.quantization
        if not self.on_cpu or quantization is None or self.new < DEQUANTIZE_FROM_ROWS:
            return tape.make(self._features(out), x)
        streams = len(cpu_streams()) if out * width >= PARALLEL_ELEMENTS else 1
        rounds = -(-out * width // (DEQUANTIZED_ELEMENTS * streams))
        size = -(-out // (rounds * streams))
        starts = range(0, out, size)
        parts: list[Buffer] = []
        last = max(PARTS // streams, 1) * streams
        if len(starts) > last:
            parts.append(tape.make(self._features(starts[-last]), x))  # the earlier ones' results
            starts = starts[-last:]
        for first in range(0, len(starts), streams):
            sizes = [min(size, out - start) for start in starts[first : first + streams]]
            parts += self._dequantized_parts(tape, x, width, sizes, quantization)
        return parts[0] if len(parts) == 1 else tape.make(self._features(out), *parts, entries=len(parts) + 1)

    def _dequantized_parts(
        self, tape: Tape, x: Buffer, width: int, sizes: list[int], quantization: Quantization
    ) -> list[Buffer]:
        """A product with ``sizes`` rows of a quantized matrix each, side by side on streams of their own."""
        beside = len(sizes)
        weights = []
        tape.read(entries=4)
        for rows in sizes:
            elements = rows * width
            steps, size, entries = _unpacking(quantization)
            unpacked = [tape.make(elements * size, entries=entries / beside) for _ in range(steps)]
            weights.append(tape.make(elements * FLOAT32, *unpacked, entries=(steps + 2) / beside))
        for weight in weights:
            tape.read(weight, entries=13 / beside)  # scales, biases
        return [tape.make(self._features(rows), x, weight) for rows, weight in zip(sizes, weights, strict=True)]

    def _rotate(self, tape: Tape, x: Buffer, features: int) -> Buffer:
        if not self.on_cpu:
            return tape.make(self._features(features), x)
        angle_bytes = self._features(self.config.head_dim / 2)
        tape.read(x, entries=21)  # positions, frequencies
        angles = tape.make(angle_bytes, entries=4)
        tables = [tape.make(angle_bytes, angles) for _ in range(2)]
        halves = [tape.make(self._features(features / 2), x, *tables, entries=3) for _ in range(4)]
        tape.read(*halves, entries=4)  # their sum and difference
        return tape.make(self._features(features), halves[0], halves[2], entries=4)

    def _cached_rows(self, tape: Tape, query_key: Buffer, qkv: Buffer) -> list[Buffer]:
        """Append the new keys and values, and read those of T rows as floating point."""
        K, D = self.config.num_key_value_heads, self.config.head_dim
        new_bytes = self._features(2 * K * D)
        new = tape.make(new_bytes, query_key, qkv, entries=4)
        values = 2 * K * D * self.rows
        if not self.kv_bits:
            tape.read(new, entries=3)
            found: list[Buffer] = []  # the cache itself
        else:
            absolute = tape.make(new_bytes, new)
            tape.read(absolute, entries=7)
            quotient = tape.make(new_bytes, new, entries=3)
            levels = tape.make(new_bytes / self.itemsize, quotient)
            tape.read(levels, entries=22 if self.kv_bits == 4 else 10)
            unpacked: list[Buffer] = []
            if self.kv_bits == 4:
                words = tape.make(values, entries=3)
                unpacked = [tape.make(values, words)]
                tape.read(*unpacked, entries=9)
            found = [tape.make(values * FLOAT32, *unpacked, entries=4)]
            tape.read(*found, entries=8)  # scales
            if self.itemsize != FLOAT32:
                found = [tape.make(values * self.itemsize, *found)]
        if not self.on_cpu and self.pairs is not None and self.itemsize != FLOAT32:
            found = [tape.make(values * FLOAT32, *found)]
        if self.pairs and self.new > MAX_SCORE_QUERIES:
            tape.read(entries=34)  # the bias's place among the pairs
            biased = tape.make(values // 2 * FLOAT32, *found, entries=4)
            tape.read(biased)
            found.append(biased)
        return found

    def _attend(self, tape: Tape, query: Buffer, cached: list[Buffer]) -> Buffer:
        """Attention in blocks of queries; where one is enough, and on a GPU, in one."""
        H, D = self.config.num_attention_heads, self.config.head_dim
        if not self.on_cpu:
            query_bytes = self.new * H * D * FLOAT32
            if D not in GPU_FUSED_HEAD_DIMS:
                tape.make(self.new * H * self.rows * FLOAT32, query, *cached)
            return tape.make(query_bytes, tape.make(query_bytes, query), *cached)
        block = max(1, min(self.new, BLOCK_SCORE_BYTES // (H * self.rows * FLOAT32)))
        starts = range(0, self.new, block)
        outputs = []
        if len(starts) > BLOCKS:
            earlier = starts[-BLOCKS]
            outputs.append(tape.make(earlier * H * D * FLOAT32, query, *cached))
            starts = starts[-BLOCKS:]
        for start in starts:
            count = min(block, self.new - start)
            keys = self.rows - self.new + start + count
            scaled = tape.make(count * H * D * FLOAT32, query, *outputs[-1:], entries=9)
            scores = tape.make(count * H * keys * FLOAT32, scaled, *cached, entries=3)
            mask = tape.make(count * keys, entries=10)
            tape.read(scores, mask, entries=4)
            tape.read(scores)  # softmax
            output = tape.make(count * H * D * FLOAT32, scores, *cached, entries=4)
            if self.pairs is not None:
                tape.read(output, entries=8)  # the values' bias
            outputs.append(output)
        if len(outputs) == 1:
            return outputs[0]
        blocks = -(-self.new // block)
        return tape.make(self.new * H * D * FLOAT32, *outputs, entries=blocks + 1)


def _unpacking(quantization: Quantization) -> tuple[int, float, int]:
    """How MLX unpacks levels on a CPU: arrays it makes, bytes an element in each, entries of a tape for each."""
    if not quantization.has_biases:  # small floats: both halves of a byte looked up, or a byte converted
        return (2, FLOAT32 / 2 + 0.5, 6) if quantization.bits == 4 else (1, 1, 6)
    if 32 % quantization.bits:  # a word for every bit: values straddle words
        return 1, FLOAT32 * quantization.bits, 14
    return 32 // quantization.bits, FLOAT32 * quantization.bits / 32, 7  # words shifted once for each value in one
