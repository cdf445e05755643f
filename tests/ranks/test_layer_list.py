"""Which models of mlx-lm's can be dealt to several machines by layers."""

from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from support.counts import count
from support.tiny_models import CONFIGS

from kvant.bridge.architectures import ALLOWED, NEEDS_METAL
from kvant.errors import ModelError
from kvant.ranks.layer_list import list_layers

ORDER, MORE = "they are not called once each, in their order", "its layers exchange more than hidden states"
COMPUTED = "mlx-lm's class computes a layer while it is called"
REFUSED = {
    "afm7": MORE,  # layers attend to the keys and values of one before
    "dbrx": COMPUTED,  # experts are chosen in NumPy
    "gemma3n": MORE,  # several streams, inputs of each layer
    "gemma4": MORE,  # inputs of each layer, keys and values of layers before
    "gemma4_text": MORE,
    "hunyuan": MORE,  # every second layer attends to the keys and values of the one before
    "iquestloopcoder": ORDER,  # a second time, by parts
    "kimi_k3": MORE,  # residuals of layers before
    "nanbeige": ORDER,  # twice
    "rwkv7": MORE,  # the first layer's values
    "talkie": MORE,  # the embedding, in every layer
}
FEW = ["dbrx", "longcat_flash_ngram", "nemotron_h", "gptj", "deepseek_v32", "qwen3_next"]
FEW += ["talkie", "nanbeige", "gemma4_text"]


def make(name: str) -> nn.Module:
    """mlx-lm's model with weights that are never computed."""
    module = import_module(f"mlx_lm.models.{name}")
    return module.Model(module.ModelArgs.from_dict({"model_type": name, **deepcopy(CONFIGS[name])}))


@pytest.mark.parametrize("name", count(FEW, sorted(ALLOWED - NEEDS_METAL)))
def test_an_architecture(name: str) -> None:
    model = make(name)
    before = mx.get_active_memory()
    if name in REFUSED:
        with pytest.raises(ModelError, match=f"^config.json: {name} cannot be dealt .*: {REFUSED[name]}$"):
            list_layers(model, name)
        return
    found = list_layers(model, name)
    modules = dict(model.named_modules())
    assert [modules[path] for path in found.paths] == list(model.layers)
    used = [number for numbers in found.caches for number in numbers]
    assert sorted(set(used)) == sorted(used)
    assert mx.get_active_memory() - before < 2**16  # no weight was computed


def test_caches_of_layers() -> None:
    """Layers without a cache, and a cache of no layer."""
    assert list_layers(make("nemotron_h"), "").caches == ((0,), (1,), (), (2,), (), (3,))
    assert list_layers(make("longcat_flash_ngram"), "").caches == ((1,), (2,))
    assert list_layers(make("gemma3"), "").paths[2] == "language_model.model.layers.2"


class Layer(nn.Module):
    """Attention without heads: keys are cached, and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(8, 8)

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any = None, more: mx.array | None = None
    ) -> mx.array:
        key = self.k_proj(x)[:, None]
        keys, _ = cache.update_and_fetch(key, key)
        return x + keys.sum(axis=2) + (0 if more is None else more)


# What the third layer is given besides hidden states: of the toy, its embedded tokens, past states, and
# caches.
PASSED: dict[str, Callable[..., mx.array]] = {
    "the embedding": lambda toy, embedded, past, cache: embedded,
    "a layer before the last": lambda toy, embedded, past, cache: past[0],
    "keys": lambda toy, embedded, past, cache: cache[0].keys_and_values()[0].sum(axis=2),
    "keys as they were": lambda toy, embedded, past, cache: cache[0].keys.sum(axis=2),
    "another's weights": lambda toy, embedded, past, cache: toy.layers[0].k_proj.bias,
    "weights of no layer": lambda toy, embedded, past, cache: toy.scale,
    "the shape": lambda toy, embedded, past, cache: mx.full(embedded.shape[-1:], embedded.shape[1]),
}
IN_THE_HEAD: dict[str, Callable[..., mx.array]] = {
    "the first layer's keys in the head": lambda toy, cache: cache[0].keys.sum(axis=2),
    "a layer's weights in the head": lambda toy, cache: toy.layers[1].k_proj.bias,
}
REFUSED_TOYS = [*(what for what in PASSED if what != "the shape"), *IN_THE_HEAD, "a scale", "a cache"]


class Toy(nn.Module):
    """Three layers; ``what`` passes between them besides hidden states."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what = what
        self.embed = nn.Embedding(16, 8)
        self.layers: Any = [Layer() for _ in range(3)]
        self.scale = mx.ones(8)

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        embedded = x = self.embed(inputs)
        mask = create_attention_mask(x, cache[0])
        past: list[mx.array] = []
        for number, layer in enumerate(self.layers):
            is_third = number == 2
            more = (
                PASSED[self.what](self, embedded, past, cache) if is_third and self.what in PASSED else None
            )
            x = layer(x, mask, cache=cache[number - (is_third and self.what == "a cache")], more=more)
            past.append(x)
            if self.what == "a scale":
                x = x * 2
        x = x * self.scale
        if self.what in IN_THE_HEAD:
            x = x + IN_THE_HEAD[self.what](self, cache)
        return self.embed.as_linear(x)


@pytest.mark.parametrize("what", REFUSED_TOYS)
def test_more_than_hidden_states(what: str) -> None:
    with pytest.raises(ModelError, match=f"toy cannot be dealt to several machines by layers: {MORE}"):
        list_layers(Toy(what), "toy")


@pytest.mark.parametrize("what", ["", "the shape"])
def test_hidden_states_alone(what: str) -> None:
    model = Toy(what)
    found = list_layers(model, "toy")
    assert found.paths == ("layers.0", "layers.1", "layers.2")
    assert found.caches == ((0,), (1,), (2,))
    assert {type(layer) for layer in model.layers} == {Layer}  # as they were


class Evaluates(Layer):
    """What an evaluated array was made of cannot be seen."""

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any = None, more: mx.array | None = None
    ) -> mx.array:
        x = super().__call__(x, mask, cache, more)
        mx.eval(x)
        return x


def _twice() -> list[Layer]:
    layer = Layer()
    return [layer, Layer(), layer]


WRONG_LISTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: [Evaluates() for _ in range(3)], COMPUTED),
    (lambda: {0: Layer()}, "its layers are not a list"),
    (lambda: [nn.Embedding(16, 8), nn.gelu], "its layers are not a list"),
    (_twice, ORDER),
    (lambda: [Layer() for _ in range(301)], "it has 301 layers; expected at most 300"),
]


@pytest.mark.parametrize(("layers", "message"), WRONG_LISTS)
def test_wrong_lists(layers: Callable[[], Any], message: str) -> None:
    model = Toy()
    model.layers = layers()
    with pytest.raises(ModelError, match=f"toy .*: {message}"):
        list_layers(model, "toy")
    assert type(model.layers[0]) in (Layer, Evaluates, nn.Embedding)  # as it was


def test_many_layers() -> None:
    """More weights than MLX writes down by name."""
    config = {
        "model_type": "llama",
        **deepcopy(CONFIGS["llama"]),
        "num_hidden_layers": 126,
        "layer_types": None,
    }
    module = import_module("mlx_lm.models.llama")
    assert len(list_layers(module.Model(module.ModelArgs.from_dict(config)), "llama").paths) == 126
