"""The facts of a model that decide the memory of a run in addition to the weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache.layer_format import LayerFormat, State, stored_bytes

SCANNED = 4  # axes of a state that a scan makes; those of convolutions have three


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that stores keys and values."""

    format: LayerFormat  # for the longest possible sequence
    query_heads: int
    dtype: mx.Dtype  # of queries, keys and values
    # kvant reads the rows and attends to them, on a CPU some at a time; if False, all rows are converted to
    # floats for mlx-lm's model
    by_rows: bool = True
    takes_mask: bool = False  # its mask is an array, whatever the window
    makes_scores: bool = False  # the model has its own attention, with a whole matrix of scores

    @property
    def width(self) -> int:
        """Return how many numbers a token's keys and values have."""
        return self.format.num_kv_heads * (self.format.head_dim + self.format.value_head_dim)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a stored token."""
        return sum(map(stored_bytes, self.format.arrays(1).values()))

    @property
    def splits(self) -> bool:
        """Return whether the biases of its keys and values stay out of the cache."""
        return self.format.split_pairs is not None


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a model, or of one rank's shard."""

    layers: Sequence[Layer | None]  # None: the layer has a state instead of rows
    # takes the maximum length of a sequence; returns the number of layers for each format
    formats: Callable[[int], Mapping[LayerFormat, int]]
    token_bytes: int  # of the activations of a new token in one layer
    sampled_bytes: int  # of a row of logits and its copies
    weight_bytes: int = 0  # of pieces of quantized matrices that are floats at once
    states: Sequence[State] = ()  # of linear and convolution layers
    states_of_a_token: int = 0  # states per token of a chunk that exist at once; 0: one after the other

    @property
    def scan_heads(self) -> int:
        """Return the heads of states that are computed by products over many tokens: (1, heads, ..)."""
        shapes = [shape for state in self.states for _, shape in filter(None, state.shapes)]
        return max((shape[1] for shape in shapes if len(shape) == SCANNED), default=0)
