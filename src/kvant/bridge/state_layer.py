"""The state of a linear or convolution layer: mlx-lm's arrays, with the life of kvant's cache."""

import operator
from copy import copy
from typing import Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvant.cache import KVCache
from kvant.cache.layer_format import DTYPE_NAMES, LayerFormat, Stored
from kvant.cache.sequence import TrimLimit


class StateCache(KVCache):
    """The state of a linear or convolution layer: mlx-lm's arrays, which the model replaces at every step.

    A step that is not committed leaves no trace: the arrays from before it are kept until then. The state goes back to
    nothing and to no other length.

    Attributes:
        arrays: what the model is given.
        absent: another process computes the layer. It has no arrays here.
    """

    def __init__(
        self,
        arrays: ArraysCache,
        max_seq_len: int,
        *,
        shapes: tuple[Stored | None, ...] = (),
        absent: bool = False,
    ) -> None:
        """For empty ``arrays``; ``max_seq_len`` as the model's other layers have it.

        ``shapes``: of the arrays, as :class:`kvant.bridge.probe.State` has them; none: not known.
        """
        self._max_seq_len = max_seq_len
        super().__init__()
        self.arrays = arrays
        self.absent = absent
        self._shapes = shapes
        self._committed = list(arrays.cache)
        self._released = False

    @property
    def max_seq_len(self) -> int:
        """Tokens it can have."""
        return self._max_seq_len

    @property
    def limits(self) -> tuple[TrimLimit, ...]:
        """It goes back to nothing."""
        return (TrimLimit(0, 0),)

    @property
    def buffers(self) -> list[mx.array]:
        """Its arrays; none before the first step."""
        return [array for array in self.arrays.cache if array is not None]

    @property
    def format(self) -> LayerFormat:
        """The arrays of the committed state."""
        state = tuple(None if a is None else (DTYPE_NAMES[a.dtype], a.shape) for a in self.committed)
        return LayerFormat("state", state=state)

    @property
    def committed(self) -> list[mx.array | None]:
        """The arrays of the committed state; None: not computed yet."""
        return list(self._committed) if self.offset else [None] * len(self._committed)

    def stored_state(self) -> list[mx.array]:
        return [array for array in self.committed if array is not None]

    def restore_state(self, arrays: list[mx.array | None]) -> None:
        for number, (array, expected) in enumerate(zip(arrays, self._shapes or [None] * len(arrays), strict=True)):
            if array is None or expected is None:
                continue
            dtype, (_, *most) = expected  # before it has seen enough tokens, a state may be shorter
            fits = len(array.shape) == 1 + len(most) and all(map(operator.le, array.shape[1:], most))
            if DTYPE_NAMES[array.dtype] != dtype or array.shape[0] != 1 or not fits:
                raise ValueError(
                    f"array {number} of a state is {DTYPE_NAMES[array.dtype]} {tuple(array.shape)}; "
                    f"expected {dtype} {(1, *most)}"
                )
        self._committed = list(arrays)
        self.arrays.cache[:] = arrays

    def fork(self) -> Self:
        """See :class:`kvant.cache.KVCache`. A step replaces the arrays, so these can be shared."""
        made = copy(self)
        made.arrays = ArraysCache(len(self.arrays.cache))
        made.restore_state(self.committed)
        return made

    def begin(self) -> None:
        """Put back what a step replaced that was not committed."""
        if not self.offset:
            self._committed = [None] * len(self._committed)
        self.arrays.cache[:] = self._committed

    def settle(self) -> None:
        """The step is committed, all of it: its state is."""
        self._committed = list(self.arrays.cache)

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """A state has no keys."""
        raise TypeError("a layer's state has no keys and values to attend to")

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """A state takes any."""

    def reserve(self, num_tokens: int) -> None:
        """Raise a ContextError unless there is room for ``num_tokens`` more tokens."""
        if self._released:
            raise RuntimeError("the cache was released; expected one that was not")
        self._check_room(num_tokens)

    def is_trimmable(self) -> bool:
        """Only while it is empty."""
        return not self.offset

    def reset(self) -> None:
        """Forget every token; of all layers, in a model's cache."""
        super().reset()
        self.begin()

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        self.sequence.reset()
        self.begin()
        self._released = True
