"""The MLP of a dense layer, or of one expert."""

from dataclasses import dataclass

import mlx.core as mx

from kvant.models.linear import Linear
from kvant.operators.exponential import silu_times


@dataclass(frozen=True, slots=True)
class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    gate_up_proj: Linear
    down_proj: Linear

    def __call__(self, x: mx.array) -> mx.array:
        """(..., hidden) -> (..., hidden)."""
        return self.down_proj(gated(self.gate_up_proj(x)))

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the MLP."""
        return [*self.gate_up_proj.arrays, *self.down_proj.arrays]


def gated(gate_up: mx.array) -> mx.array:
    """silu(gate) * up: (..., 2 inner) -> (..., inner)."""
    return silu_times(*mx.split(gate_up, 2, axis=-1))
