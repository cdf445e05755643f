"""Heads for multi-token prediction beside mlx-lm's models, whose own loading drops them.

:mod:`kvant.models.mtp` says what a head is and how its rows are kept. Its layer is one of the architecture's
own: mlx-lm's class is built with more layers, its ``sanitize`` takes the head's tensors for those of the last
one, and that layer is then the head's. The names of tensors are those of the published checkpoints' indexes:
DeepSeek-V3 (``model.layers.61``), GLM-4.5 (``model.layers.92``, of Air 46), MiMo-7B (``model.mtp_layers.0``),
Qwen3-Next and Qwen3.5 (``mtp``). Of several heads the first drafts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from kvant.bridge.architectures import module_name
from kvant.bridge.config import BridgedConfig, check
from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedBatch
from kvant.bridge.translation import translated
from kvant.cache.pool_batch import PoolBatch
from kvant.errors import ArgumentError
from kvant.fields import MAX_SIZE, size
from kvant.models.mtp import HeadedModel, refuse_headless
from kvant.models.tensors import TensorFiles

Weights = dict[str, mx.array]
PARTS = ("head_input", "head_token_norm", "head_hidden_norm", "head_final_norm")  # beside the layer
FIRST_LAYER = "layers.0.input_layernorm.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family's checkpoints have a head."""

    prefix: str  # of its tensors' names; "{}": the number of the model's layers
    parts: tuple[str, str, str, str]  # its modules beside the layer, in the order of PARTS
    layer: str = ""  # before the names of its layer's modules
    copies: tuple[str, ...] = ()  # of the model's embedding and output head; not read
    hidden_first: bool = False  # the projection's inputs are the hidden state, then the embedding
    passes_normalized: bool = True  # what stands for the next hidden state went through the final norm
    mask_as_array: bool = False  # mlx-lm's attention adds its scores to a mask
    period: int = 1  # every nth layer is of the head's kind, if config.json does not say which


_NEXTN = Layout(
    prefix="model.layers.{}.",
    parts=("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    copies=("embed_tokens.", "shared_head.head."),
    passes_normalized=False,
)
_QWEN = Layout(
    prefix="mtp.",
    parts=("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    layer="layers.0.",
    period=4,
)
_MIMO = Layout(
    prefix="model.mtp_layers.0.",
    parts=("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    hidden_first=True,
)
# by modules of mlx_lm.models
LAYOUTS = {
    "deepseek_v3": replace(_NEXTN, mask_as_array=True),
    "glm4_moe": _NEXTN,
    "mimo": _MIMO,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
}


def without_heads(raw: Mapping[str, Any], weights: Weights) -> Weights:
    """The tensors without those of heads in layers behind the model's: of DeepSeek-V3's class mlx-lm drops
    layer 61 alone, and not that of a smaller model of the kind.
    """
    if LAYOUTS.get(module_name(raw), _MIMO).prefix != _NEXTN.prefix:
        return weights
    places = {name: LAYER.match(name) for name in weights}
    number = size(raw, "num_hidden_layers", default=MAX_SIZE)
    return {name: weights[name] for name, at in places.items() if at is None or int(at[1]) < number}


class HeadPlace:
    """Where the tensors of a folder's head go: to a layer behind the model's, ``stand_in``, of the head's
    kind, and from there to the place of the first layer that the model does not have, ``number``.
    """

    def __init__(self, raw: Mapping[str, Any], tensors: TensorFiles) -> None:
        """Find the head of a checkpoint, or refuse it."""
        layout = LAYOUTS.get(module_name(raw))
        if layout is None:
            raise ArgumentError(
                "draft",
                f"is 'mtp'; kvant knows heads of {', '.join(LAYOUTS)}, and none of {raw['model_type']}",
            )
        self.layout = layout
        text = raw.get("text_config")
        self._key = "text_config" if isinstance(text, dict) else None
        sizes = text if isinstance(text, dict) else raw
        self.number = size(sizes, "num_hidden_layers")
        self.prefix = layout.prefix.format(self.number)
        refuse_headless([self.prefix + part for part in layout.parts], tensors)
        # mlx-lm's class of DeepSeek-V3 drops layer 61: the layer behind it stands in. Of Qwen's layers every
        # nth has attention.
        said = translated(dict(sizes), module_name(raw))
        period = size(said, "full_attention_interval", default=layout.period)
        self.stand_in = -(-(self.number + 2) // period) * period - 1
        own = [
            name for name in tensors.names if name.endswith(FIRST_LAYER) and not name.startswith(self.prefix)
        ]
        self._layers = min(own, key=len, default="model." + FIRST_LAYER).removesuffix(
            "0.input_layernorm.weight"
        )

    def extended(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of a model that has the layer that stands in."""
        more = {"num_hidden_layers": self.stand_in + 1}
        made = {**raw, **(more if self._key is None else {self._key: {**raw[self._key], **more}})}
        check(made)
        return made

    def shorten(self, module: Module) -> None:
        """Leave the model's own layers and, as the last, that of the head with its other parts."""
        inner = cast(Any, module).model
        layer = inner.layers[self.stand_in]
        inner.layers = [*inner.layers[: self.number], layer]
        hidden, eps = inner.norm.weight.shape[0], inner.norm.eps
        layer[PARTS[0]] = Linear(2 * hidden, hidden, bias=False)
        for part in PARTS[1:]:
            layer[part] = RMSNorm(hidden, eps)

    def placed(self, weights: Weights) -> Weights:
        """The tensors as those of a model that has the layer that stands in."""
        layout, found = self.layout, {}
        names = {f"{own}.": f"{name}." for own, name in zip(layout.parts, PARTS, strict=True)}
        for name, array in weights.items():
            rest = name.removeprefix(self.prefix)
            part = next((own for own in names if rest.startswith(own)), None)
            if not name.startswith(self.prefix):
                layer = name.removeprefix(self._layers).partition(".")[0]
                is_layer = name.startswith(self._layers) and layer.isdecimal()
                if not (is_layer and int(layer) >= self.number):  # a further head's is not read
                    found[name] = array
            elif part is not None:
                found[f"{self._layers}{self.stand_in}.{names[part]}{rest.removeprefix(part)}"] = array
            elif rest.startswith(layout.layer) and not rest.startswith(layout.copies):
                found[f"{self._layers}{self.stand_in}.{rest.removeprefix(layout.layer)}"] = array
        return found

    def moved(self, weights: Weights, before: Weights) -> Weights:
        """What mlx-lm's ``sanitize`` made of the tensors ``before``, in the last place of a shortened model.

        If it added 1 to the norms of Qwen's layers, those of the head get it too.
        """
        found = {}
        marker = f".layers.{self.stand_in}."
        norm = f"{self._layers}{self.stand_in}.input_layernorm.weight"
        sanitized = next(
            (array for name, array in weights.items() if name.endswith(f"{marker}input_layernorm.weight")),
            None,
        )
        shifts = sanitized is not None and sanitized is not before.get(norm)
        for name, array in weights.items():
            is_norm = any(f"{marker}{part}." in name for part in PARTS[1:])
            found[name.replace(marker, f".layers.{self.number}.")] = (
                array + 1.0 if shifts and is_norm else array
            )
        return found


class HeadedModule(Module):
    """mlx-lm's model and a head, as one that asks for a cache more. B batch, S new tokens."""

    def __init__(self, main: Module, layout: Layout) -> None:
        """``main``: shortened by :class:`HeadPlace`; the last layer is taken out of it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.main = main
        self.heads = [cast(Any, main).model.layers.pop()]
        self._layout = layout

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches of the model, and one of the head."""
        main = cast(Any, self.main)
        own = main.make_cache() if hasattr(main, "make_cache") else [KVCache() for _ in main.layers]
        return [*own, KVCache()]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """The logits (B, S, vocabulary) of (B, S) ids, as if nothing came before that the head saw."""
        hidden = self.hidden_states(inputs, cache, None)
        return self.logits(hidden)

    def hidden_states(self, inputs: mx.array, cache: list[Any] | None, before: mx.array | None) -> mx.array:
        """The model's normalized states (B, S, hidden); the head's rows are written, after the states
        (B, 1, hidden) ``before``; None: zeros.
        """
        inner = cast(Any, self.main).model
        if cache is None:
            return cast(mx.array, inner(inputs))
        hidden: mx.array = inner(inputs, cache[:-1])
        before = mx.zeros_like(hidden[:, :1]) if before is None else before
        x = self._inputs(inputs, mx.concatenate([before, hidden[:, :-1]], axis=1))
        head = self.heads[0]
        head.self_attn(head.input_layernorm(x), self._mask(x, cache[-1]), cache[-1])
        return hidden

    def guess(self, ids: mx.array, hidden: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """The head's logits behind (B, S) ids and its output; see :meth:`HeadedModel.guess`."""
        x = self._inputs(ids, hidden)
        x = self.heads[0](x, self._mask(x, cache), cache)[:, -1]
        output = self.heads[0].head_final_norm(x)
        return self.logits(output), output if self._layout.passes_normalized else x

    def logits(self, hidden: mx.array) -> mx.array:
        """(..., hidden) -> (..., vocabulary)"""
        text: Any = getattr(self.main, "language_model", self.main)
        if "lm_head" in text:
            return cast(mx.array, text.lm_head(hidden))
        return cast(mx.array, text.model.embed_tokens.as_linear(hidden))

    def _inputs(self, ids: mx.array, hidden: mx.array) -> mx.array:
        head = self.heads[0]
        both = [
            head.head_token_norm(cast(Any, self.main).model.embed_tokens(ids)),
            head.head_hidden_norm(hidden),
        ]
        if self._layout.hidden_first:
            both.reverse()
        return cast(mx.array, head.head_input(mx.concatenate(both, axis=-1)))

    def _mask(self, x: mx.array, cache: Any) -> Any:
        return create_attention_mask(x, cache, return_array=self._layout.mask_as_array)


class HeadedBridgedModel(HeadedModel, BridgedModel):
    """A bridged model that drafts with its head."""

    module: HeadedModule
    # The output head is applied here, to the positions that are asked for.
    feeds_last_token_separately = False

    def __init__(self, module: HeadedModule, config: BridgedConfig, dtype: mx.Dtype) -> None:
        super().__init__(module, config, dtype)
        self._width = cast(Any, module.main).model.norm.weight.shape[0]

    def _outputs(self, inputs: mx.array, cache: PoolBatch | None) -> mx.array:
        if cache is None:
            return self.module.hidden_states(inputs, None, None)
        begun = self._begun(inputs, cache)
        hidden = self.module.hidden_states(inputs, begun.entries, self.hidden_before_of(begun))
        made: list[mx.array] = mx.depends([hidden], begun.state)
        begun.give_hidden(made[0])
        return made[0]

    def logits(self, hidden_states: mx.array) -> mx.array:
        return self.module.logits(hidden_states)

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        return [self._outputs(inputs, cache)[:, -1]]

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self.logits(self._outputs(inputs, cache)[:, -1])

    def hidden_before_of(self, batch: PoolBatch) -> mx.array:
        return batch.hidden_before(self._width, self.dtype)

    def guess(self, ids: mx.array, hidden: mx.array, batch: PoolBatch) -> tuple[mx.array, mx.array]:
        return self.module.guess(ids, hidden, cast(BridgedBatch, batch).entries[-1])
