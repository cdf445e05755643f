"""The layers of an mlx-lm model, checked so that they can be divided among machines.

They can be if each layer gets exactly the array that the previous layer returned, and nothing else from it.
One call that is never evaluated shows this: MLX exports the graph of its arrays.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path

from kvant.bridge.probe import called
from kvant.errors import ModelError

MAX_LAYERS = 300  # MLX does not export more than three names for each
MORE = "its layers exchange more than hidden states"
LayerCall = Callable[[Any], Any]  # a layer's call: hidden states (B, S, hidden) to the next layer's


@dataclass(frozen=True, slots=True)
class LayerList:
    """A model's layers, first to last."""

    paths: tuple[str, ...]  # the name of each layer's module, such as "model.layers.3"
    caches: tuple[tuple[int, ...], ...]  # the numbers of the model's caches that each layer uses


def list_layers(model: Module, model_type: str) -> LayerList:
    """Return the layers of a model with lazy weights; raise a ModelError if they cannot be divided."""
    refused = f"config.json: {model_type} cannot be dealt to several machines by layers"
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, Module) for layer in layers):
        raise ModelError(f"{refused}: its layers are not a list")
    if len(layers) > MAX_LAYERS:
        raise ModelError(f"{refused}: it has {len(layers)} layers; expected at most {MAX_LAYERS}")
    path_of = {id(module): path for path, module in model.named_modules()}
    paths = tuple(path_of[id(layer)] for layer in layers)
    calls: list[tuple[int, Any, Sequence[Any], Any]] = []

    def noted(number: int, layer_call: LayerCall, hidden: Any, others: Sequence[Any]) -> Any:
        result = layer_call(hidden)
        calls.append((number, hidden, others, result))
        return result

    kinds = [type(layer) for layer in layers]
    weights = model.parameters()
    try:
        sources = _mark_weights(model, paths)
        for number, layer in enumerate(layers):
            redirect(layer, partial(noted, number))
        probes, logits = called(model)
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
        model.update(weights)
    if [number for number, *_ in calls] != list(range(len(layers))):
        raise ModelError(f"{refused}: they are not called once each, in their order")
    hidden = [*(before for _, before, _, _ in calls), calls[-1][3]]
    passed = all(result is after for (*_, result), after in zip(calls, hidden[1:], strict=True))
    if not passed or not all(isinstance(array, mx.array) for array in hidden):
        raise ModelError(f"{refused}: {MORE}")
    caches = [
        tuple(n for n, probe in enumerate(probes) if any(other is probe for other in others))
        for _, _, others, _ in calls
    ]
    problem = _problem(sources, caches, hidden, [_arrays(probe) for probe in probes], logits)
    if problem:
        raise ModelError(f"{refused}: {problem}")
    return LayerList(paths, tuple(caches))


def redirect(layer: Module, call: Callable[[LayerCall, Any, Sequence[Any]], Any]) -> None:
    """Redirect a layer's calls to ``call(layer_call, hidden, others)``. Its attributes stay.

    ``layer_call`` is the original call; it takes only hidden states, and adds the other arguments.
    """
    kind = type(layer)

    def replaced(self: Module, *arguments: Any, **named: Any) -> Any:
        first = next(iter(named), "")

        def layer_call(hidden: Any) -> Any:
            if arguments:
                return kind.__call__(self, hidden, *arguments[1:], **named)
            return kind.__call__(self, **named | {first: hidden})

        hidden, *others = *arguments, *named.values()
        return call(layer_call, hidden, others)

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": replaced})


def _mark_weights(model: Module, paths: Sequence[str]) -> list[mx.array]:
    """Replace a model's weights by zeros; return the source array of each layer's, and of all others last."""
    sources = [mx.array(0.0) for _ in (*paths, "")]

    def marked(name: str, array: mx.array) -> mx.array:
        owner = next((number for number, path in enumerate(paths) if name.startswith(f"{path}.")), -1)
        return mx.broadcast_to(sources[owner].astype(array.dtype), array.shape)

    model.update(tree_map_with_path(marked, model.parameters()))
    return sources


def _problem(
    sources: Sequence[mx.array],
    caches: Sequence[tuple[int, ...]],
    hidden: Sequence[mx.array],
    cache_arrays: Sequence[Sequence[mx.array]],
    logits: mx.array,
) -> str:
    """Describe a dependency between layers, or past the last one to the logits, other than hidden states.

    Returns "" if there is none.

    Args:
        hidden: the input of each layer, and the output of the last one.
        cache_arrays: the arrays passed to each cache.
    """
    used = [number for numbers in caches for number in numbers]
    if len(set(used)) != len(used):
        return MORE

    def end(array: mx.array, numbers: Iterable[int]) -> mx.array:
        """Make an array that also depends on the arrays of some caches."""
        made: mx.array = mx.depends(
            [array], [source for number in numbers for source in cache_arrays[number]]
        )[0]
        return made

    ends = [end(array, numbers) for array, numbers in zip(hidden[1:], caches, strict=True)]
    elsewhere = end(mx.array(0.0), set(range(len(cache_arrays))) - set(used))
    graph = _Graph([*sources, *hidden, *ends, elsewhere, logits])
    *weights, others = map(graph.name, sources)
    between = [*map(graph.name, hidden)]
    known = {*weights, others, *between}
    for before, result, weight, made in zip(between[:-1], between[1:], weights, ends, strict=True):
        allowed = {before, weight}
        stops = known - {result} | allowed
        reached = graph.reached(made, stops) & stops
        if not reached <= allowed:
            return MORE
        if before not in reached:  # an evaluated array has lost its inputs
            return "mlx-lm's class computes a layer while it is called"
    is_separate = (
        graph.reached(logits, known) & known <= {between[-1], others}
        and not graph.reached(elsewhere, known) & known
    )
    return "" if is_separate else MORE


def _arrays(probe: Any) -> list[mx.array]:
    """Return the arrays passed to a probe's cache."""
    parts = getattr(probe, "caches", [probe])
    fetched = [getattr(cache, "fetched", None) or getattr(cache, "cache", None) or () for cache in parts]
    return [array for arrays in fetched for array in arrays if array is not None]


class _Graph:
    """The graph of arrays that are not evaluated yet, from :func:`mx.export_to_dot`."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = {self.name(array): array for array in arrays}
        self._made_of: dict[str, list[str]] = {}
        text = io.StringIO()
        mx.export_to_dot(text, **self._arrays)
        # An operation, then each input as `"a" -> operation`, then each result as `operation -> "b"`. An
        # operation's number does not identify it: mx.compile reuses numbers.
        for operation, source, result in re.findall(
            r'(\[label)|^"(\w+)" -> |-> "(\w+)"$', text.getvalue(), re.MULTILINE
        ):
            if operation:
                inputs: list[str] = []
            elif source:
                inputs.append(source)
            else:
                self._made_of[result] = inputs

    def name(self, array: mx.array) -> str:
        """Return the name of one of the arrays; MLX's own names are capitals."""
        return f"a{id(array)}"

    def reached(self, end: mx.array, stops: set[str]) -> set[str]:
        """Return the names of arrays that an array depends on, going back no further than ``stops``."""
        left = list(self._made_of.get(self.name(end), ()))
        names: set[str] = set()
        while left:
            name = left.pop()
            if name not in names:
                names.add(name)
                if name not in stops:
                    left += self._made_of.get(name, ())
        return names
