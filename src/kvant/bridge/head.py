"""Find the output head of mlx-lm's model, and capture the hidden states that it gets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from kvant.bridge.probe import called
from kvant.errors import ModelError

Observer = Callable[[Module, mx.array, mx.array], object]  # called with a module, its input and its output


def find_head(model: Any, name: str) -> Module:
    """Return the linear layer, or the tied embedding, that computes the logits of a model.

    It is the last such module in a call, never evaluated, whose output is as wide as the logits.
    """
    calls: list[tuple[Module, mx.array]] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Linear | QuantizedLinear | Embedding | QuantizedEmbedding):
                stack.enter_context(
                    _observed(module, lambda module, _, output: calls.append((module, output)))
                )
        _, logits = called(model)
    heads = [
        module
        for module, output in calls
        if isinstance(output, mx.array) and output.shape[-1] == logits.shape[-1]
    ]
    if not heads:
        raise ModelError(f"{name} cannot compute embeddings: no output head was found in mlx-lm's class")
    return heads[-1]


@contextmanager
def inputs_of(head: Module) -> Iterator[Sequence[mx.array]]:
    """Collect the inputs of a head inside the context."""
    inputs: list[mx.array] = []
    with _observed(head, lambda *call: inputs.append(call[1])):
        yield inputs


@contextmanager
def _observed(module: Module, observe: Observer) -> Iterator[None]:
    """Call ``observe`` after each product with the module's weight, but not after an embedding's lookups."""
    kind = type(module)
    method = "as_linear" if isinstance(module, Embedding | QuantizedEmbedding) else "__call__"
    product = getattr(kind, method)

    def observed(self: Module, x: mx.array) -> mx.array:
        output: mx.array = product(self, x)
        observe(self, x, output)
        return output

    module.__class__ = type(kind.__name__, (kind,), {method: observed})
    try:
        yield
    finally:
        module.__class__ = kind
