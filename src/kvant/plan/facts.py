"""The facts of a model, kvant's or mlx-lm's, that decide what a run takes beside the weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache.layer_format import LayerFormat, State, stored_bytes

SCANNED = 4  # axes of a state that a scan makes; those of convolutions have three


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that keeps keys and values."""

    format: LayerFormat  # of a sequence as long as any
    query_heads: int
    dtype: mx.Dtype  # of queries, keys and values
    # kvant reads the rows and attends to them, on a CPU some at a time; else all of them become floats, which
    # mlx-lm's model is given
    by_rows: bool = True
    takes_mask: bool = False  # an array is its mask, whatever the window
    makes_scores: bool = False  # the model attends in a way of its own, with a whole matrix of scores

    @property
    def width(self) -> int:
        """Numbers of a token's keys and values."""
        return self.format.num_kv_heads * (self.format.head_dim + self.format.value_head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token as it is stored."""
        return sum(map(stored_bytes, self.format.arrays(1).values()))

    @property
    def splits(self) -> bool:
        """Whether the biases of its keys and values stay out of the cache."""
        return self.format.split_pairs is not None


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a model is here, of several ranks on one."""

    layers: Sequence[Layer | None]  # None: it has a state in place of rows
    # by the tokens that a sequence has at most: how many layers store tokens in each way
    formats: Callable[[int], Mapping[LayerFormat, int]]
    token_bytes: int  # of the activations of a new token in one layer
    sampled_bytes: int  # of a row of logits and its copies
    weight_bytes: int = 0  # of the parts of quantized matrices that are floats at once
    states: Sequence[State] = ()  # of linear and convolution layers
    states_of_a_token: int = 0  # that a chunk makes for each of its tokens; 0: they follow each other

    @property
    def scan_heads(self) -> int:
        """Heads of the states that products over many tokens make, which are matrices (1, heads, ..)."""
        shapes = [shape for own in self.states for _, shape in filter(None, own.shapes)]
        return max((shape[1] for shape in shapes if len(shape) == SCANNED), default=0)
