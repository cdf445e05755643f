"""What a sequence of a pool must hold and give: every token's bytes in NumPy, attention to all tokens in
float64.

A token's key and value are those of a number, which its text gives: the salt, and all ids up to its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from zlib import crc32

import numpy as np

from kvant.cache.layer_format import LayerFormat
from kvant.cache.pool import Pool, PoolSequence
from kvant.operators.bias_split import BiasSplit
from support import oracle
from support.exact_tails import in_bfloat16, read_exactly
from support.oracle import Array

PAGE, NUMBERS = 128, 1999


def numbers_of(ids: Sequence[int], salt: bytes = b"") -> Array:
    """The number of each token of a text."""
    texts = accumulate(
        ids, lambda text, token: (text * 6364136223846793005 + token + 1) % 2**64, initial=crc32(salt)
    )
    return np.array([text % NUMBERS for text in list(texts)[1:]], int)


@dataclass
class OracleLayer:
    """One layer: ``tokens`` (2, K, NUMBERS, D) are the keys and values of each number, without ``split``.

    Keys are stored less ``center``, divided by ``balance``, powers of two.
    """

    format: LayerFormat
    tokens: Array
    frequencies: Array
    split: BiasSplit | None = None
    sinks: Array | None = None
    center: Array | None = None
    balance: Array | None = None

    def __post_init__(self) -> None:
        own, kept = self.format, self.tokens.copy()
        if self.center is not None:
            kept[0] -= self.center
        if self.balance is not None:
            kept[0] /= self.balance
        self.stored, self.floats = [kept], kept.astype(np.float64)
        if own.kv_bits:
            bits, found = (own.kv_bits, own.value_bits), []
            for tokens, each in zip(kept, bits, strict=True):
                spec = oracle.Spec(scale_dtype="float16", quant_bit=each, quant_group=own.kv_group_size)
                found.append(oracle.quantize(tokens, spec, fit=each == 4))
            pairs = zip(*found, strict=True)
            self.stored = [
                np.stack(pair) if len({*bits}) == 1 else oracle.beside(*pair)[None] for pair in pairs
            ]
            self.floats = np.stack(oracle.sides(*self.stored, own.head_dim, bits, own.kv_group_size))
        self.exact = in_bfloat16(kept)
        for floats in (self.floats, self.exact):
            if self.balance is not None:
                floats[0] *= self.balance
            if self.center is not None:
                floats[0] += self.center

    def new(self, numbers: Array) -> tuple[Array, Array]:
        """Keys and values (K, S, D) as a cache is given them."""
        key, value = self.tokens[:, :, numbers]
        return key, value

    def attend(
        self,
        query: Array,
        places: Array,
        numbers: Array,
        mask: Array | None = None,
        exact: tuple[int, int] | None = None,
    ) -> Array:
        """Attention (H, Q, D) of queries at some places to all tokens; ``mask`` (Q, T) is added to the
        scores.

        ``exact``: how many of the first tokens, and from which one on the others, are exact too; None: none.
        """
        keys, values = self.floats[:, :, numbers].swapaxes(1, 2)  # (T, K, D)
        at = np.arange(len(keys))
        read = np.ones((len(places), len(keys)), bool)
        if exact is not None:  # the tokens follow once more, as they were given
            for own, place in zip(read, places.tolist(), strict=True):
                own[: place + 1] = ~read_exactly(place, *exact)
            tail_keys, tail_values = self.exact[:, :, numbers].swapaxes(1, 2)
            keys, values = np.concatenate([keys, tail_keys]), np.concatenate([values, tail_values])
            at, read = np.tile(at, 2), np.concatenate([read, ~read], axis=1)
            mask = None if mask is None else np.tile(mask, 2)
        if (split := self.split) is not None:
            angle = at[:, None] * self.frequencies[list(split.pairs)]  # (T, P)
            keys = keys + oracle.key_bias(np.array(split.key_bias), split.pairs, angle, keys.shape[-1])
            values = values + np.array(split.value_bias, np.float64)
        distance = places[:, None] - at
        seen = read & (distance >= 0) & (distance < (self.format.window or len(keys)))
        added = np.where(seen, 0 if mask is None else mask, -np.inf)
        rows = query.swapaxes(0, 1)[None], keys[None], values[None]
        return oracle.attend(*rows, is_causal=False, attn_mask=added, sinks=self.sinks)[0].swapaxes(0, 1)


def check_rows(
    pool: Pool, layers: Sequence[OracleLayer], texts: Sequence[tuple[PoolSequence, Array]]
) -> None:
    """The bytes of each sequence's tokens, found through its page tables, are those of their numbers."""
    parts = {id(layer): number for number, part in enumerate(pool.groups) for layer in part.layers}
    for layer, own in zip(pool.layers, layers, strict=True):
        arrays = [np.asarray(memoryview(array)) for array in layer.arrays]  # not copied
        for sequence, numbers in texts:
            table = sequence.tables[parts[id(layer)]]
            places = np.arange(table.first, sequence.length)
            rows = np.array(table.pages, int)[(places - table.start) // PAGE] * PAGE + places % PAGE
            np.testing.assert_array_equal(arrays[0][:, :, rows], own.stored[0][:, :, numbers[places]])
            for scale, expected in zip(arrays[1:], own.stored[1:], strict=True):
                fit = 4 in own.format.bits
                oracle.check_scales(scale[:, :, rows], expected[:, :, numbers[places]], fit=fit)
