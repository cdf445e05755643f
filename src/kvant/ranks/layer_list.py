"""The layers of an mlx-lm model as a list of which machines can each have a part.

A model can be dealt where each layer gets exactly the array that the layer before it returned, and nothing
else of it. One call that is never evaluated shows it: MLX writes down which array is made of which.
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

MAX_LAYERS = 300  # three names each are as many as MLX takes
MORE = "its layers exchange more than hidden states"
Own = Callable[[Any], Any]  # a layer's call: hidden states (B, S, hidden) to the next layer's


@dataclass(frozen=True, slots=True)
class LayerList:
    """A model's layers, first to last."""

    paths: tuple[str, ...]  # the name of each layer's module, such as "model.layers.3"
    caches: tuple[tuple[int, ...], ...]  # the numbers of the model's caches that each layer uses


def list_layers(model: Module, model_type: str) -> LayerList:
    """The layers of a model whose weights were not computed yet."""
    refused = f"config.json: {model_type} cannot be dealt to several machines by layers"
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, Module) for layer in layers):
        raise ModelError(f"{refused}: its layers are no list")
    if len(layers) > MAX_LAYERS:
        raise ModelError(f"{refused}: it has {len(layers)} layers; expected at most {MAX_LAYERS}")
    path_of = {id(module): path for path, module in model.named_modules()}
    paths = tuple(path_of[id(layer)] for layer in layers)
    calls: list[tuple[int, Any, Sequence[Any], Any]] = []

    def noted(number: int, own: Own, hidden: Any, others: Sequence[Any]) -> Any:
        result = own(hidden)
        calls.append((number, hidden, others, result))
        return result

    kinds, weights = [type(layer) for layer in layers], model.parameters()
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
    hidden = [*(given for _, given, _, _ in calls), calls[-1][3]]
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


def redirect(layer: Module, call: Callable[[Own, Any, Sequence[Any]], Any]) -> None:
    """Have calls of a layer go to ``call(own, hidden, others)``. Its attributes stay.

    ``own`` is the layer's own call, with the other arguments as they were given: it takes the hidden states
    alone.
    """
    kind = type(layer)

    def replaced(self: Module, *arguments: Any, **named: Any) -> Any:
        first = next(iter(named), "")

        def own(hidden: Any) -> Any:
            if arguments:
                return kind.__call__(self, hidden, *arguments[1:], **named)
            return kind.__call__(self, **named | {first: hidden})

        hidden, *others = *arguments, *named.values()
        return call(own, hidden, others)

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": replaced})


def _mark_weights(model: Module, paths: Sequence[str]) -> list[mx.array]:
    """Put zeros in place of a model's weights. Returns of what those of each layer are made, and last all
    others.
    """
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
    kept: Sequence[Sequence[mx.array]],
    logits: mx.array,
) -> str:
    """Whether more than hidden states leads from a layer to another, or past the last one to the logits;
    empty: no.

    ``hidden``: what each layer was given, and what the last one returned. ``kept``: arrays that each cache
        was given.
    """
    used = [number for numbers in caches for number in numbers]
    if len(set(used)) != len(used):
        return MORE

    def end(array: mx.array, numbers: Iterable[int]) -> mx.array:
        """One array that is made of what some caches were given, too."""
        made: mx.array = mx.depends([array], [part for number in numbers for part in kept[number]])[0]
        return made

    ends = [end(array, numbers) for array, numbers in zip(hidden[1:], caches, strict=True)]
    elsewhere = end(mx.array(0.0), set(range(len(kept))) - set(used))
    graph = _Graph([*sources, *hidden, *ends, elsewhere, logits])
    *weights, others = map(graph.name, sources)
    between = [*map(graph.name, hidden)]
    known = {*weights, others, *between}
    for given, result, weight, made in zip(between[:-1], between[1:], weights, ends, strict=True):
        own = {given, weight}
        stops = known - {result} | own
        reached = graph.reached(made, stops) & stops
        if not reached <= own:
            return MORE
        if given not in reached:  # what an evaluated array was made of is forgotten
            return "mlx-lm's class computes a layer while it is called"
    alone = (
        graph.reached(logits, known) & known <= {between[-1], others}
        and not graph.reached(elsewhere, known) & known
    )
    return "" if alone else MORE


def _arrays(probe: Any) -> list[mx.array]:
    """What a cache of a probe was given."""
    parts = getattr(probe, "caches", [probe])
    found = [getattr(part, "fetched", None) or getattr(part, "cache", None) or () for part in parts]
    return [array for arrays in found for array in arrays if array is not None]


class _Graph:
    """Which arrays not yet evaluated are made of which others: what :func:`mx.export_to_dot` writes."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = {self.name(array): array for array in arrays}
        self._made_of: dict[str, list[str]] = {}
        text = io.StringIO()
        mx.export_to_dot(text, **self._arrays)
        # An operation, then each input as `"a" -> operation`, then each result as `operation -> "b"`. An
        # operation's number is no name for it: those of mx.compile are used again.
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
        """The name of one of the arrays; MLX's own names are capitals."""
        return f"a{id(array)}"

    def reached(self, end: mx.array, stops: set[str]) -> set[str]:
        """What an array is made of, back to ``stops``, whose own making is not followed."""
        left = list(self._made_of.get(self.name(end), ()))
        found: set[str] = set()
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                if name not in stops:
                    left += self._made_of.get(name, ())
        return found
