"""What a layer or a pool's sequence must hold and give: every token's bytes in NumPy, attention in float64.

A quantized value may come out one step higher or lower if a number lay on the edge. So a pool's bytes of new tokens are
compared, and then taken over; they are never read again.
"""

from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from kvant.cache.layer_format import LayerFormat
from kvant.cache.pool import Pool, PoolSequence
from kvant.models import Decoder
from kvant.operators.bias_split import BiasSplit
from kvant.operators.quantization import quantize
from support import oracle
from support.oracle import Array, unpack_nibbles

PAGE = 128


@dataclass
class OracleLayer:
    """One layer of one sequence; a model attends through it."""

    format: LayerFormat
    bias_split: BiasSplit | None
    frequencies: Array
    values: list[Array] = field(default_factory=list)  # (2, K, last) of each token
    scales: list[Array] = field(default_factory=list)
    written: list[Array] = field(default_factory=list)  # (2, K, S, last) each, that a pool wrote in this step

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Of one sequence: (1, H, S, D). ``mask`` (S, T) is added to the scores."""
        self._append(key, value)
        keys, values = self._tokens()
        window, keep = self.format.window, self.format.keep
        if window is not None:  # a token that nobody sees may be unknown: 0 times NaN is NaN
            values[keep : max(keep, len(values) - query.shape[2] - window + 1)] = 0
        output = oracle.attend(
            np.array(query.swapaxes(1, 2)), keys[None], values[None], is_causal=True, window=window, keep=keep,
            attn_mask=None if mask is None else np.array(mask), sinks=None if sinks is None else np.array(sinks),
        )  # fmt: skip
        return mx.array(output.swapaxes(1, 2).astype(np.float32))

    def _append(self, key: mx.array, value: mx.array) -> None:
        own = mx.stack([key[0], value[0]])  # (2, K, S, D)
        bits, group = self.format.kv_bits, self.format.kv_group_size
        expected = [np.array(x) for x in (quantize(own, quant_bit=bits, quant_group=group) if bits else [own])]
        written = self.written or expected
        if bits:
            levels, given = (unpack_nibbles(x[0]) if bits == 4 else x[0] for x in (expected, written))
            moved = np.abs(levels.astype(int) - given)
            assert moved.max() <= 1
            assert (moved > 0).mean() < 0.02
            np.testing.assert_allclose(written[1], expected[1], rtol=2e-3)
        else:
            np.testing.assert_allclose(written[0], expected[0], atol=1e-4)
        for number in range(key.shape[2]):
            self.values.append(written[0][:, :, number])
            self.scales.append(written[-1][:, :, number])

    def _tokens(self) -> tuple[Array, Array]:
        """Keys and values (T, K, D) with their biases."""
        both = np.stack(self.values, axis=2)
        if self.format.kv_bits:
            levels = unpack_nibbles(both) if self.format.kv_bits == 4 else both
            scales = np.stack(self.scales, axis=2).astype(np.float64)
            both = levels * np.repeat(scales, self.format.kv_group_size, axis=-1)
        keys, values = both.astype(np.float64).swapaxes(1, 2)
        if (split := self.bias_split) is not None:
            angle = np.arange(len(keys))[:, None] * self.frequencies[list(split.pairs)]  # (T, P)
            keys += oracle.key_bias(np.array(split.key_bias), split.pairs, angle, keys.shape[-1])
            values += np.array(split.value_bias, np.float64)
        return keys, values

    def cut(self, length: int) -> None:
        """Forget the tokens past so many."""
        del self.values[length:], self.scales[length:]

    def page(self, number: int) -> tuple[list[Array], list[Array]]:
        part = slice(number * PAGE, number * PAGE + PAGE)
        return self.values[part], self.scales[part]


class OracleSequence:
    """All layers of a sequence, and the ids of its tokens."""

    def __init__(self, model: Decoder, pool: Pool) -> None:
        frequencies = np.array(model.config.rope.rotary(model.config.head_dim).frequencies)
        self.ids: list[int] = []
        self.layers = [OracleLayer(layer.format, layer.bias_split, frequencies) for layer in pool.layers]

    def fork(self) -> "OracleSequence":
        made = object.__new__(OracleSequence)
        made.ids = list(self.ids)
        made.layers = [
            replace(layer, values=list(layer.values), scales=list(layer.scales), written=[]) for layer in self.layers
        ]
        return made

    def step(self, model: Decoder, written: list[list[Array]], ids: list[int]) -> mx.array:
        """Logits (S, vocab) of new tokens, whose bytes the pool wrote: of each layer its arrays (2, K, S, last)."""
        start = len(self.ids)
        for layer, rows in zip(self.layers, written, strict=True):
            layer.written = rows
        self.ids += ids
        return model.logits(model.states(mx.array([ids]), start, self.layers))[0]

    def trim_to(self, length: int) -> None:
        del self.ids[length:]
        for layer in self.layers:
            layer.cut(length)


def rows_of(pool: Pool, sequence: PoolSequence, first: int, end: int) -> list[list[Array]]:
    """What the arrays of each layer hold at the positions of a sequence: found through its page tables."""
    tables = {id(layer): n for n, part in enumerate(pool.parts) for layer in part.layers}
    found = []
    for layer in pool.layers:
        table = sequence.tables[tables[id(layer)]]
        skipped = table.first // PAGE
        rows = [table.pages[at // PAGE - skipped] * PAGE + at % PAGE for at in range(first, end)]
        found.append([np.array(array[:, :, mx.array(rows)]) for array in layer.arrays])
    return found
