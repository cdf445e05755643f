"""The pocket model for training: Qwen2's mathematics in plain torch, with the parameter names of Hugging
Face.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of the network."""

    vocab: int = 1280
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 640
    context: int = 2048
    rope_theta: float = 1e6
    eps: float = 1e-6

    def config(self) -> dict[str, object]:
        """Return the shape as a Hugging Face config.json."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": True,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        shape = self.shape
        q = self.q_proj(x).view(rows, length, shape.heads, shape.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, shape.kv_heads, shape.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = attend(q, k, v) if length <= 640 else attend_long(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by plain products: on a CPU, the fastest for short rows."""
    rows, heads, length, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    mask = torch.full((length, length), -1e4, dtype=q.dtype).triu(1).repeat(group, 1)
    q = q.reshape(rows * kv_heads, group * length, size)
    k, v = k.reshape(rows * kv_heads, length, size), v.reshape(rows * kv_heads, length, size)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(rows, heads, length, size)


def attend_long(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's own kernel: the fastest for long rows."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class Network(nn.Module):
    """The whole model; the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        angles = torch.outer(
            torch.arange(shape.context).float(),
            shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim),
        )
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)
        self._start()

    def _start(self) -> None:
        depth = (2 * self.shape.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "embed_tokens" in name:
                nn.init.normal_(parameter, std=0.04)
            elif parameter.ndim == 2:
                nn.init.normal_(
                    parameter,
                    std=parameter.shape[1] ** -0.5 * (depth if "o_proj" in name or "down" in name else 0.7),
                )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the hidden states after the last norm."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        return functional.linear(hidden, self.model.embed_tokens.weight)
