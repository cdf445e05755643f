"""Which models of mlx-lm's can be dealt to several machines by layers."""

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
from kvant.bridge.layer_list import list_layers, redirect
from kvant.errors import ModelError

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
FEW = (
    "dbrx",
    "longcat_flash_ngram",
    "nemotron_h",
    "gptj",
    "deepseek_v32",
    "qwen3_next",
    "talkie",
    "nanbeige",
    "gemma4_text",
)


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

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, more: mx.array | None = None) -> mx.array:
        key = self.k_proj(x)[:, None]
        keys, _ = cache.update_and_fetch(key, key)
        return x + keys.sum(axis=2) + (0 if more is None else more)


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
        past = []
        for number, layer in enumerate(self.layers):
            more = None
            if number == 2 and self.what == "the embedding":
                more = embedded
            elif number == 2 and self.what == "a layer before the last":
                more = past[0]
            elif number == 2 and self.what == "keys":
                more = cache[0].keys_and_values()[0].sum(axis=2)
            elif number == 2 and self.what == "keys as they were":
                more = cache[0].keys.sum(axis=2)
            elif number == 2 and self.what == "another's weights":
                more = self.layers[0].k_proj.bias
            elif number == 2 and self.what == "weights of no layer":
                more = self.scale
            elif number == 2 and self.what == "the shape":
                more = mx.full(x.shape[-1:], x.shape[1])
            other = cache[number - (number == 2 and self.what == "a cache")]
            x = layer(x, mask, cache=other, more=more)
            past.append(x)
            if self.what == "a scale":
                x = x * 2
        x = x * self.scale
        if self.what == "the first layer's keys in the head":
            x = x + cache[0].keys.sum(axis=2)
        if self.what == "a layer's weights in the head":
            x = x + self.layers[1].k_proj.bias
        return self.embed.as_linear(x)


@pytest.mark.parametrize(
    "what",
    [
        "the embedding", "a layer before the last", "keys", "keys as they were", "another's weights", "a scale",
        "a cache", "weights of no layer", "the first layer's keys in the head", "a layer's weights in the head",
    ],
)  # fmt: skip
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
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, more: mx.array | None = None) -> mx.array:
        x = super().__call__(x, mask, cache, more)
        mx.eval(x)
        return x


def test_evaluated_in_the_call() -> None:
    """What an evaluated array was made of cannot be seen."""
    model = Toy()
    model.layers = [Evaluates() for _ in range(3)]
    with pytest.raises(ModelError, match=COMPUTED):
        list_layers(model, "toy")


def test_no_list() -> None:
    model = Toy()
    model.layers = dict(enumerate(model.layers))
    with pytest.raises(ModelError, match=r"toy .*: its layers are no list"):
        list_layers(model, "toy")
    model.layers = [model.embed, nn.gelu]
    with pytest.raises(ModelError, match="its layers are no list"):
        list_layers(model, "toy")


def test_a_layer_twice() -> None:
    model = Toy()
    model.layers[2] = model.layers[0]
    with pytest.raises(ModelError, match=ORDER):
        list_layers(model, "toy")
    assert type(model.layers[0]) is Layer


def test_many_layers() -> None:
    """More weights than MLX writes down by name."""
    config = {"model_type": "llama", **deepcopy(CONFIGS["llama"]), "num_hidden_layers": 126, "layer_types": None}
    module = import_module("mlx_lm.models.llama")
    assert len(list_layers(module.Model(module.ModelArgs.from_dict(config)), "llama").paths) == 126
    model = Toy()
    model.layers = [Layer() for _ in range(301)]
    with pytest.raises(ModelError, match="it has 301 layers; expected at most 300"):
        list_layers(model, "toy")


def test_redirect() -> None:
    """The first argument is apart, by place or by name; the others stay as they are given."""

    class Sum(nn.Module):
        def __call__(self, x: int, y: int = 0, *, z: int = 0) -> int:
            return x + 10 * y + 100 * z

    layer = Sum()
    redirect(layer, lambda own, hidden, others: (own(hidden + 1), others))
    assert isinstance(layer, Sum)
    assert layer(1, 2, z=3) == (322, [2, 3])
    assert layer(x=1, z=3) == (302, [3])
