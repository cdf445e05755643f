"""A layer's MLP, or its experts: a router sends each token through a few of many MLPs.

T tokens, E experts, k experts per token, N = T k rows: each row is a token for one of its experts.
"""

from dataclasses import dataclass

import mlx.core as mx

from kvant.models.matrix import PARALLEL_ELEMENTS, Linear, in_parallel
from kvant.operators.exponential import silu_times
from kvant.operators.streams import cpu_streams

SORT_FROM = 64  # rows; sorting fewer costs more than it saves (mlx-lm has the same number)
# Rows per expert from which, on a CPU, a product for each expert is faster than one for each row. Measured on
# 2 cores with experts of 512 x 256 and 2,048 x 768: with 16 to 32 rows per expert 1.5 to 3 times as fast in
# float32, and 3.5 times with 4 bits, which are then unpacked once per expert.
SEPARATE_FROM = 4


@dataclass(frozen=True, slots=True)
class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    gate_up_proj: Linear
    down_proj: Linear

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the MLP: (..., hidden) -> (..., hidden)."""
        return self.down_proj(gated(self.gate_up_proj(x)))

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.gate_up_proj.arrays, *self.down_proj.arrays]


def gated(gate_up: mx.array) -> mx.array:
    """Return silu(gate) * up: (..., 2 inner) -> (..., inner)."""
    return silu_times(*mx.split(gate_up, 2, axis=-1))


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer and their router."""

    router: Linear  # (hidden) -> (E)
    gate_up_proj: Linear  # like down_proj of all experts: arrays have a leading axis of experts
    down_proj: Linear
    per_token: int  # k
    normalized: bool  # the shares of a token's experts add up to 1

    def __call__(self, x: mx.array) -> mx.array:
        """Add up the outputs of each token's experts: (B, S, hidden) -> (B, S, hidden)."""
        tokens = x.reshape(-1, x.shape[-1])  # (B, S, hidden) -> (T, hidden)
        chosen, shares = self.route(tokens)
        experts = chosen.reshape(-1)  # (T, k) -> (N,)
        if experts.size < SORT_FROM:
            outputs = self._run_gathered(mx.repeat(tokens, self.per_token, axis=0), experts, in_order=False)
        else:  # sort the rows by expert
            order = mx.argsort(experts)
            rows = tokens[order // self.per_token]
            experts = experts[order]
            if mx.default_device().type == mx.cpu and takes_turns(experts.size, self.num_experts):
                outputs = self._run_experts_on_cores(rows, experts)
            else:
                outputs = self._run_gathered(rows, experts, in_order=True)
            outputs = outputs[mx.argsort(order)]
        outputs = outputs.reshape(*chosen.shape, -1)  # (N, hidden) -> (T, k, hidden)
        return (outputs * shares[..., None]).sum(axis=1).reshape(x.shape)

    def route(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Return each token's experts and their shares of its output: (T, hidden) -> (T, k), (T, k).

        The softmax is over all experts, in float32.
        """
        k = self.per_token
        likely = mx.softmax(self.router(tokens).astype(mx.float32), axis=-1)  # (T, E)
        chosen = mx.argpartition(likely, kth=-k, axis=-1)[:, -k:]
        shares = mx.take_along_axis(likely, chosen, axis=-1)
        if self.normalized:
            shares /= shares.sum(axis=-1, keepdims=True)
        return chosen, shares.astype(tokens.dtype)

    def _run_gathered(self, rows: mx.array, experts: mx.array, *, in_order: bool) -> mx.array:
        """Multiply each row by its own expert's matrices. On a CPU the cores share the rows."""

        def gathered(rows: mx.array, experts: mx.array) -> mx.array:
            # (N, 1, hidden) to (N, 1, I)
            inner = gated(self.gate_up_proj.gather(rows[:, None], experts, in_order))
            return self.down_proj.gather(inner, experts, in_order)[:, 0]  # (N, 1, hidden) -> (N, hidden)

        elements = experts.size * self.down_proj.num_rows * self.gate_up_proj.num_rows
        if mx.default_device().type != mx.cpu or elements < PARALLEL_ELEMENTS:
            return gathered(rows, experts)
        return in_parallel(gathered, [rows, experts], 0)

    def _run_experts_on_cores(self, rows: mx.array, experts: mx.array) -> mx.array:
        """Run each expert's MLP on its rows, on the cores in rotation.

        This evaluates the router's choice, because the number of an expert's rows is a shape.
        """
        chosen = mx.zeros(self.num_experts, mx.int32).at[experts].add(1)
        counts: list[int] = chosen.tolist()  # type: ignore[assignment]
        cores = cpu_streams()
        first = 0
        outputs: list[mx.array] = []
        for expert, count in enumerate(counts):
            if not count:
                continue
            with mx.stream(cores[len(outputs) % len(cores)]):
                x = rows[first : first + count]
                # MLX must not dequantize more experts at a time than there are cores
                if len(outputs) >= len(cores):
                    (x,) = mx.depends([x], [outputs[-len(cores)]])
                mlp = MLP(self.gate_up_proj.of_expert(expert), self.down_proj.of_expert(expert))
                outputs.append(mlp(x))
            first += count
        return mx.concatenate(outputs, axis=0)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.router.num_rows

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.router.arrays, *self._stacked]

    @property
    def nbytes_idle(self) -> int:
        """Bytes of the experts that a token does not use."""
        return sum(a.nbytes for a in self._stacked) * (self.num_experts - self.per_token) // self.num_experts

    @property
    def _stacked(self) -> list[mx.array]:
        return [*self.gate_up_proj.arrays, *self.down_proj.arrays]


def takes_turns(num_rows: int, num_experts: int) -> bool:
    """Return whether a CPU runs experts separately for this number of rows."""
    return num_rows >= max(SORT_FROM, SEPARATE_FROM * num_experts)
