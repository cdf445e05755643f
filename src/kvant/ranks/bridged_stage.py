"""A rank's layers of a bridged model. B batch, S new tokens, N ranks.

mlx-lm's module stays whole, and its own loop over layers runs on every rank with the same ids. Layers of
other ranks return their input. A rank's first layer receives the hidden states from the previous rank, its
last one sends them to the next, and rank N - 1 back to rank 0, where the loop continues to the logits:

    rank 0: embedding, own layers, send -> 1     receive <- N - 1, norm, head
    rank 1:       receive <- 0, own layers, send -> 2
    ...

Nothing depends on absent layers, or on a follower's embedding and head. MLX never evaluates them, so their
weights are not read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Never

import mlx.core as mx
from mlx.nn.layers.base import Module

from kvant.bridge.config import BridgedConfig
from kvant.bridge.folder import Progress, check_bridged, evaluate, main_dtype, refuse_adapter
from kvant.bridge.layers import BridgedLayer
from kvant.bridge.model import BridgedModel, bytes_read, parameters
from kvant.bridge.pool import BridgedBatch
from kvant.cache.pool_batch import PoolBatch
from kvant.errors import CheckpointError, ModelError
from kvant.ranks.group import Ranks
from kvant.ranks.layer_list import LayerCall, LayerList, list_layers, redirect
from kvant.sizes import format_bytes, physical_memory
from kvant.threads import check_process


def load_bridged_stage(
    folder: Path, ranks: Ranks, layers: range, progress: Progress | None = None, adapter: Path | None = None
) -> "BridgedStageModel":
    """Load a rank's layers of a bridged model; rank 0 also has the embedding, the final norm and the head.

    ``layers``: their numbers, which follow the previous rank's. ``progress`` counts them. An ``adapter`` is
    refused.
    """
    check_process()
    refuse_adapter(adapter)
    module, config = check_bridged(folder, in_float32=mx.default_device().type == mx.cpu, whole=False)
    try:
        layer_list = list_layers(module, config.model_type)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    _check_range(folder, ranks, layers, len(layer_list.paths))
    model = BridgedStageModel(module, config, main_dtype(module), ranks, layers, layer_list)
    if model.nbytes > physical_memory():
        raise CheckpointError(
            f"{folder}: layers {layers.start} to {layers.stop - 1} have {format_bytes(model.nbytes)}; "
            f"this machine has {format_bytes(physical_memory())}"
        )
    evaluate(module, folder, progress, model.weight_names)
    return model


class BridgedStageModel(BridgedModel):
    """One rank's shard of a bridged model.

    Every rank calls its methods with the same ids and with caches of the same tokens, and evaluates the
    result before the next call. The result is logits on rank 0, and elsewhere what was sent, which is not
    read.
    """

    divided = True  # other ranks have some of its caches

    def __init__(
        self,
        module: Module,
        config: BridgedConfig,
        dtype: mx.Dtype,
        ranks: Ranks,
        layers: range,
        layer_list: LayerList,
    ) -> None:
        """``module``: with possibly lazy weights. ``layers``: this rank's, of all in ``layer_list``."""
        super().__init__(module, config, dtype)
        self.ranks = ranks
        self.layers = layers
        self._layer_list = layer_list
        leads = ranks.rank == 0
        names = {name for n in layers for name in _below(module, layer_list.paths[n])}
        others = {
            name
            for n, path in enumerate(layer_list.paths)
            if n not in layers
            for name in _below(module, path)
        }
        # no other weight is read
        self.weight_names = frozenset(parameters(module).keys() - others if leads else names)
        caches = {cache for n in layers for cache in layer_list.caches[n]}
        elsewhere = {cache for n, each in enumerate(layer_list.caches) if n not in layers for cache in each}
        self.absent_caches = frozenset(elsewhere if leads else set(range(len(self.entries))) - caches)
        self._cache: BridgedBatch | None = None
        self._computes = self._returns = False
        self._sent: list[mx.array] = []
        modules = dict(module.named_modules())
        for number, path in enumerate(layer_list.paths):
            redirect(modules[path], partial(self._call_layer, number))

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        # The last rank sends nothing back.
        begun = self._begun(inputs, cache)
        with self._step(begun, returns=False):
            self.module(inputs, cache=begun.entries)
            return [*begun.state, *self._sent]

    def make_pool(self, *arguments: Any, **options: Any) -> Never:
        raise ModelError(
            f"{self.config.model_type} on several machines takes one sequence at a time: mlx-lm's class "
            f"computes it"
        )

    @property
    def nbytes_read(self) -> int:
        return bytes_read(self.module, self.config.experts_used, self.weight_names)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for name, array in parameters(self.module).items() if name in self.weight_names]

    def _logits(self, inputs: mx.array, cache: BridgedBatch | None) -> mx.array:
        """Compute the logits on rank 0, and elsewhere the sent hidden states (B, S, hidden)."""
        with self._step(cache, returns=True):
            result: mx.array = (
                self.module(inputs) if cache is None else self.module(inputs, cache=cache.entries)
            )
            if self.ranks.rank:
                (result,) = self._sent
        if cache is not None:
            (result,) = mx.depends([result], cache.state)
        return result

    @contextmanager
    def _step(self, cache: BridgedBatch | None, *, returns: bool) -> Iterator[None]:
        """Mark calls of layers as a step's; ``returns``: hidden states come back to rank 0."""
        self._computes = True
        self._returns = returns
        self._cache = cache
        self._sent = []
        try:
            yield
        finally:
            self._computes = False
            self._cache = None
            self._sent = []

    def _call_layer(
        self, number: int, layer_call: LayerCall, hidden: mx.array, others: Sequence[Any]
    ) -> mx.array:
        """Handle the module's call of a layer. Calls outside of a step are a probe's and never evaluated."""
        if not self._computes:
            traced: mx.array = layer_call(hidden)
            return traced
        rank = self.ranks.rank
        size = self.ranks.size
        if number in self.layers:
            if rank and number == self.layers.start:
                hidden = self.ranks.receive(hidden.shape, hidden.dtype, rank - 1)
            hidden = layer_call(hidden)
            if number == self.layers.stop - 1 and size > 1:
                hidden = self._send(hidden)
        elif self._cache is not None:
            for cache in self._layer_list.caches[number]:  # keep their lengths in step with the other rank's
                entry = self._cache.entries[cache]
                for layer_cache in getattr(entry, "caches", [entry]):
                    if isinstance(layer_cache, BridgedLayer):
                        layer_cache.skip(hidden.shape[1])
        if number == len(self._layer_list.paths) - 1 and rank == 0 and size > 1 and self._returns:
            hidden = self.ranks.receive(hidden.shape, hidden.dtype, size - 1)
            mx.eval(hidden)  # so that an abandoned step leaves no message for the next one
        return hidden

    def _send(self, hidden: mx.array) -> mx.array:
        rank = self.ranks.rank
        size = self.ranks.size
        if rank == size - 1 and not self._returns:
            return hidden
        sent = self.ranks.send(hidden, (rank + 1) % size)
        self._sent.append(sent)
        if rank == 0:  # nothing orders the receive after the send; MLX could start with it and deadlock
            mx.eval(sent)
        return sent


def _check_range(folder: Path, ranks: Ranks, layers: range, total: int) -> None:
    """Raise a ModelError for missing or no layers, or a first or last rank without the outermost layer."""
    first = ranks.rank == 0
    last = ranks.rank == ranks.size - 1
    starts = layers.start == 0 if first else layers.start > 0
    ends = layers.stop == total if last else layers.stop < total
    if layers.step != 1 or not layers or not starts or not ends:
        raise ModelError(
            f"{folder}: rank {ranks.rank} of {ranks.size} has the layers from {layers.start} up to "
            f"{layers.stop}, of {total} in all; expected one or more, rank 0's from 0 and the last rank's up "
            f"to {total}"
        )


def _below(module: Module, path: str) -> list[str]:
    """Return the names of the weights below a path of a module."""
    return [name for name in parameters(module) if name.startswith(f"{path}.")]
