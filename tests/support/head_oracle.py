"""A head for multi-token prediction in NumPy, float64, as it is published; by the published names of tensors.

DeepSeek-V3 Technical Report, arXiv:2412.19437, sections 2.1 and 2.2, for the head, latent attention and
experts; transformers' Qwen2, Qwen3-Next and GLM-4.5 for their layers. S rows, H query heads, D numbers a head.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class HeadOracle:
    """The head of a checkpoint."""

    def __init__(
        self,
        tensors: Mapping[str, Array],
        config: Mapping[str, Any],
        *,
        layer: str,  # the layer's names begin so
        beside: str,  # and those of the head's other parts
        parts: tuple[str, str, str, str],  # projection, and norms of hidden state, embedding and output
        ends: tuple[str, str],  # the model's embedding and output head
        hidden_first: bool,
        passes_normalized: bool,
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._layer = layer
        self._projection, *norms = (f"{beside}{part}" for part in parts)
        self._norms = norms
        self._ends = ends
        self._hidden_first = hidden_first
        self._passes_normalized = passes_normalized
        self._offset = 1.0 if beside == "mtp." else 0.0  # of norms' weights

    def __call__(self, ids: list[int], hidden: Array) -> tuple[Array, Array]:
        """The logits (S, vocabulary) of all rows, each of a token and of the state before it, and what stands
        for the next states.
        """
        embedding = self._tensors[self._ends[0]][np.array(ids)]
        both = [self._norm(embedding, self._norms[1]), self._norm(hidden, self._norms[0])]
        if self._hidden_first:
            both.reverse()
        x = np.concatenate(both, axis=-1) @ self._tensors[f"{self._projection}.weight"].T
        x = x + self._attention(self._norm(x, f"{self._layer}input_layernorm"))
        x = x + self._mlp(self._norm(x, f"{self._layer}post_attention_layernorm"))
        output = self._norm(x, self._norms[2])
        return output @ self._tensors[self._ends[1]].T, output if self._passes_normalized else x

    def _norm(self, x: Array, path: str) -> Array:
        weight = self._tensors[f"{path}.weight"] + self._offset
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self._config["rms_norm_eps"]) * weight

    def _linear(self, x: Array, path: str) -> Array:
        bias = self._tensors.get(f"{self._layer}{path}.bias")
        return x @ self._tensors[f"{self._layer}{path}.weight"].T + (0.0 if bias is None else bias)

    def _attention(self, x: Array) -> Array:
        if f"{self._layer}self_attn.kv_b_proj.weight" in self._tensors:
            return self._latent_attention(x)
        config = self._config
        H, K = config["num_attention_heads"], config["num_key_value_heads"]
        D = config.get("head_dim") or config["hidden_size"] // H
        query = self._linear(x, "self_attn.q_proj").reshape(len(x), H, -1)
        query, gate = query[..., :D], query[..., D:]
        key = self._linear(x, "self_attn.k_proj").reshape(len(x), K, D)
        value = self._linear(x, "self_attn.v_proj").reshape(len(x), K, D)
        if f"{self._layer}self_attn.q_norm.weight" in self._tensors:
            query = self._norm(query, f"{self._layer}self_attn.q_norm")
            key = self._norm(key, f"{self._layer}self_attn.k_norm")
        rotary = config.get("rope_parameters") or config
        turned = int(D * rotary.get("partial_rotary_factor", 1.0))
        query, key = (self._rotated(each, turned, rotary["rope_theta"]) for each in (query, key))
        key, value = (np.repeat(each, H // K, axis=1) for each in (key, value))
        output = _attend(query, key, value)
        if gate.size:
            output = output * _sigmoid(gate)
        return self._linear(output.reshape(len(x), -1), "self_attn.o_proj")

    def _latent_attention(self, x: Array) -> Array:
        config, own = self._config, f"{self._layer}self_attn."
        H, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        latent = self._norm(self._linear(x, "self_attn.q_a_proj"), f"{own}q_a_layernorm")
        query = self._linear(latent, "self_attn.q_b_proj").reshape(len(x), H, -1)
        compressed = self._linear(x, "self_attn.kv_a_proj_with_mqa")
        shared = compressed[:, None, rank:]  # one rotary key for all heads
        latent = self._norm(compressed[:, :rank], f"{own}kv_a_layernorm")
        key_value = self._linear(latent, "self_attn.kv_b_proj").reshape(len(x), H, -1)
        turned = [self._rotated(each, rope, theta, pairs=True) for each in (query[..., nope:], shared)]
        query = np.concatenate([query[..., :nope], turned[0]], axis=-1)
        key = np.concatenate([key_value[..., :nope], np.repeat(turned[1], H, axis=1)], axis=-1)
        output = _attend(query, key, key_value[..., nope:])
        return self._linear(output.reshape(len(x), -1), "self_attn.o_proj")

    def _rotated(self, x: Array, size: int, theta: float, *, pairs: bool = False) -> Array:
        """The first ``size`` numbers of (S, H, D) heads turned; ``pairs``: of neighbours, not of halves."""
        angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(0, size, 2) / size)
        low, high = (x[..., 0:size:2], x[..., 1:size:2]) if pairs else np.split(x[..., :size], 2, axis=-1)
        turned = low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)
        first = (
            np.stack(turned, axis=-1).reshape(*x.shape[:-1], size)
            if pairs
            else np.concatenate(turned, axis=-1)
        )
        return np.concatenate([first, x[..., size:]], axis=-1)

    def _mlp(self, x: Array) -> Array:
        if f"{self._layer}mlp.gate.weight" not in self._tensors:
            return self._swiglu(x, "mlp.")
        config = self._config
        scores = self._linear(x, "mlp.gate")
        bias = self._tensors.get(f"{self._layer}mlp.gate.e_score_correction_bias")
        if bias is None:
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores = scores / scores.sum(-1, keepdims=True)
            choice = scores
        else:
            scores = _sigmoid(scores)
            choice = scores + bias
            groups = choice.reshape(len(x), config["n_group"], -1)
            best = np.sort(groups, axis=-1)[..., -2:].sum(-1)
            worst = np.argsort(best, axis=-1)[:, : config["n_group"] - config["topk_group"]]
            np.put_along_axis(groups, worst[..., None], 0.0, axis=1)
            choice = groups.reshape(len(x), -1)
        output = np.zeros_like(x)
        for row in range(len(x)):
            chosen = np.argsort(choice[row])[-config["num_experts_per_tok"] :]
            shares = scores[row, chosen]
            if config["norm_topk_prob"]:
                shares = shares / shares.sum()
            for expert, share in zip(chosen, shares * config.get("routed_scaling_factor", 1.0), strict=True):
                output[row] += share * self._swiglu(x[row : row + 1], f"mlp.experts.{expert}.")[0]
        if bias is None:
            shared = self._swiglu(x, "mlp.shared_expert.")
            return output + _sigmoid(self._linear(x, "mlp.shared_expert_gate")) * shared
        return output + self._swiglu(x, "mlp.shared_experts.")

    def _swiglu(self, x: Array, path: str) -> Array:
        gate = self._linear(x, f"{path}gate_proj")
        return self._linear(gate * _sigmoid(gate) * self._linear(x, f"{path}up_proj"), f"{path}down_proj")


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _attend(query: Array, key: Array, value: Array) -> Array:
    """Causal attention (S, H, Dv)."""
    scores = np.einsum("shd,thd->hst", query, key) * query.shape[-1] ** -0.5
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    found: Array = np.einsum("hst,thd->shd", shares / shares.sum(-1, keepdims=True), value)
    return found
