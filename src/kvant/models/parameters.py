"""The tensors a config.json describes, by their names in a checkpoint: the architecture's table with its sizes."""

from collections.abc import Iterator

from kvant.models.architectures.table import Parameter
from kvant.models.config import ModelConfig


def parameters(config: ModelConfig) -> Iterator[tuple[str, int | None, Parameter]]:
    """Path, layer and row of the table of each parameter, in the order of the model; layer None: it is in no layer."""
    table = config.architecture
    yield table.embedding.path, None, table.embedding
    for layer in range(config.num_hidden_layers):
        prefix = table.layers.format(layer)
        yield from ((prefix + row.path, layer, row) for row in table.of_layer(config.has_experts(layer)))
    yield table.final_norm.path, None, table.final_norm
    yield table.head.path, None, table.head


def matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Each matrix's module path and (outputs, inputs): those stored as ``path.weight``, quantized or not.

    One for each expert is (experts, outputs, inputs); :mod:`kvant.models.stacking` has the other ways to store them.
    The output head is among them even if it is tied: a tied checkpoint may still carry it.
    """
    shapes = ((path, config.shape(row)) for path, _, row in parameters(config))
    return {path: shape for path, shape in shapes if len(shape) > 1}
