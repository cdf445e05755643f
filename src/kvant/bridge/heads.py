"""Load heads for multi-token prediction with mlx-lm's models; mlx-lm's loading drops them.

See :mod:`kvant.models.mtp` for how a head works. It contains a regular layer of the architecture. mlx-lm's
class is built with additional layers, its ``sanitize`` handles the head's tensors as those of the last one,
and that layer then becomes the head's. Tensor names are from the indexes of published checkpoints:
DeepSeek-V3 (``model.layers.61``), GLM-4.5 (``model.layers.92``, Air: 46), MiMo-7B (``model.mtp_layers.0``),
Qwen3-Next and Qwen3.5 (``mtp``). If there are several heads, the first one is used.
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
PARTS = ("head_input", "head_token_norm", "head_hidden_norm", "head_final_norm")  # besides the layer
FIRST_LAYER = "layers.0.input_layernorm.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the checkpoints of a model family store a head."""

    prefix: str  # of tensor names; "{}" is the number of the model's layers
    parts: tuple[str, str, str, str]  # its modules besides the layer, in the order of PARTS
    layer: str = ""  # prefix of the modules of its layer
    copies: tuple[str, ...] = ()  # of the embedding and the output head; not read
    hidden_first: bool = False  # the projection's input begins with the hidden state
    passes_normalized: bool = True  # the next draft uses the output after the final norm
    mask_as_array: bool = False  # mlx-lm's attention adds scores to the mask
    period: int = 1  # every nth layer is of the head's kind, unless config.json says otherwise


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
# module of mlx_lm.models -> layout
LAYOUTS = {
    "deepseek_v3": replace(_NEXTN, mask_as_array=True),
    "glm4_moe": _NEXTN,
    "mimo": _MIMO,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
}


def without_heads(raw: Mapping[str, Any], weights: Weights) -> Weights:
    """Return the tensors without heads stored as layers after the model's.

    mlx-lm's DeepSeek-V3 class drops only layer 61, and so keeps the head of a smaller model.
    """
    if LAYOUTS.get(module_name(raw), _MIMO).prefix != _NEXTN.prefix:
        return weights
    places = {name: LAYER.match(name) for name in weights}
    number = size(raw, "num_hidden_layers", default=MAX_SIZE)
    return {name: weights[name] for name, at in places.items() if at is None or int(at[1]) < number}


class HeadPlace:
    """Moves a head's tensors to ``stand_in``, a layer of its kind after the model's, then to ``number``.

    ``number`` is the index of the first layer that the model does not have.
    """

    def __init__(self, raw: Mapping[str, Any], tensors: TensorFiles) -> None:
        """Find the head of a checkpoint; raise an ArgumentError if it has none."""
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
        refuse_headless([self.prefix + name for name in layout.parts], tensors)
        # mlx-lm's DeepSeek-V3 class drops layer 61, so the layer after it stands in. Every nth of Qwen's
        # layers has attention.
        settings = translated(dict(sizes), module_name(raw))
        period = size(settings, "full_attention_interval", default=layout.period)
        self.stand_in = -(-(self.number + 2) // period) * period - 1
        names = [
            name for name in tensors.names if name.endswith(FIRST_LAYER) and not name.startswith(self.prefix)
        ]
        self._layers = min(names, key=len, default="model." + FIRST_LAYER).removesuffix(
            "0.input_layernorm.weight"
        )

    def extended(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of a model that includes the stand-in layer."""
        more = {"num_hidden_layers": self.stand_in + 1}
        made = {**raw, **(more if self._key is None else {self._key: {**raw[self._key], **more}})}
        check(made)
        return made

    def shorten(self, module: Module) -> None:
        """Keep the model's layers and append the stand-in layer with the head's other modules."""
        inner = cast(Any, module).model
        layer = inner.layers[self.stand_in]
        inner.layers = [*inner.layers[: self.number], layer]
        hidden, eps = inner.norm.weight.shape[0], inner.norm.eps
        layer[PARTS[0]] = Linear(2 * hidden, hidden, bias=False)
        for name in PARTS[1:]:
            layer[name] = RMSNorm(hidden, eps)

    def placed(self, weights: Weights) -> Weights:
        """Return the tensors under the names of a model that includes the stand-in layer."""
        layout, placed = self.layout, {}
        names = {f"{prefix}.": f"{name}." for prefix, name in zip(layout.parts, PARTS, strict=True)}
        for name, array in weights.items():
            rest = name.removeprefix(self.prefix)
            module = next((prefix for prefix in names if rest.startswith(prefix)), None)
            if not name.startswith(self.prefix):
                layer = name.removeprefix(self._layers).partition(".")[0]
                is_layer = name.startswith(self._layers) and layer.isdecimal()
                if not (is_layer and int(layer) >= self.number):  # skip layers of further heads
                    placed[name] = array
            elif module is not None:
                placed[f"{self._layers}{self.stand_in}.{names[module]}{rest.removeprefix(module)}"] = array
            elif rest.startswith(layout.layer) and not rest.startswith(layout.copies):
                placed[f"{self._layers}{self.stand_in}.{rest.removeprefix(layout.layer)}"] = array
        return placed

    def moved(self, weights: Weights, before: Weights) -> Weights:
        """Return the sanitized tensors, with the stand-in layer as the last one of a shortened model.

        ``before`` are the tensors before ``sanitize``. If it added 1 to the norms of Qwen's layers, the
        head's norms get it too.
        """
        moved = {}
        marker = f".layers.{self.stand_in}."
        norm = f"{self._layers}{self.stand_in}.input_layernorm.weight"
        sanitized = next(
            (array for name, array in weights.items() if name.endswith(f"{marker}input_layernorm.weight")),
            None,
        )
        shifts = sanitized is not None and sanitized is not before.get(norm)
        for name, array in weights.items():
            is_norm = any(f"{marker}{module}." in name for module in PARTS[1:])
            moved[name.replace(marker, f".layers.{self.number}.")] = (
                array + 1.0 if shifts and is_norm else array
            )
        return moved


class HeadedModule(Module):
    """mlx-lm's model with a head, which needs one cache more. B batch, S new tokens."""

    def __init__(self, main: Module, layout: Layout) -> None:
        """Remove the last layer, the head's, from ``main``, which :class:`HeadPlace` has shortened."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.main = main
        self.heads = [cast(Any, main).model.layers.pop()]
        self._layout = layout

    def make_cache(self) -> list[Any]:
        """Return mlx-lm's caches for the model and one for the head."""
        main = cast(Any, self.main)
        caches = main.make_cache() if hasattr(main, "make_cache") else [KVCache() for _ in main.layers]
        return [*caches, KVCache()]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Return the logits (B, S, vocabulary) of (B, S) ids. The head's state before them is zeros."""
        hidden = self.hidden_states(inputs, cache, None)
        return self.logits(hidden)

    def hidden_states(self, inputs: mx.array, cache: list[Any] | None, before: mx.array | None) -> mx.array:
        """Return the model's normalized states (B, S, hidden), and write the head's rows to the last cache.

        ``before`` are the states (B, 1, hidden) before the ids; None: zeros.
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
        """Return the head's logits after (B, S) ids, and its output; see :meth:`HeadedModel.guess`."""
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
    # The output head is applied below, only to the requested positions.
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
