"""Train the pocket model's head for the token after the next one, in MLX: the model's own weights stay as
they are.

The head learns what the model itself expects there: the target of each place is the model's distribution.
Half of the loss is of the head's own recursion, in which its output stands for the model's hidden state.

Run: python scripts/lab/pocket/train_head.py build/mtp.safetensors --minutes 20
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from batches import Batch, encode, pack
from corpus import documents
from curriculum import STAGES
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from kvant.engine.load import find_model

PREFIX = "model.mtp_layers.0."
TOKENS = 2048  # of a step
MASKED = -1e9
GROUP_SIZE = 64  # weights that share a scale


class Attention(nn.Module):
    """Qwen2's attention, of a row to the rows before it and to itself."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, size: int, theta: float) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * size)
        self.k_proj = nn.Linear(hidden, kv_heads * size)
        self.v_proj = nn.Linear(hidden, kv_heads * size)
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)
        self._kv_heads = kv_heads
        self._size = size
        self._theta = theta

    def keys_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(B, S, hidden) -> (B, K, S, D) each."""
        return self._turned(self._split(self.k_proj(x))), self._split(self.v_proj(x))

    def __call__(self, x: mx.array, before: tuple[mx.array, mx.array] | None = None) -> mx.array:
        """``before``: keys and values of the rows before each one; None: those of ``x``."""
        B, S, _ = x.shape
        K, D = self._kv_heads, self._size
        query = self._turned(self._split(self.q_proj(x))) * D**-0.5
        own_keys, own_values = self.keys_values(x)
        keys, values = before or (own_keys, own_values)
        query = query.reshape(B, K, -1, S, D)  # (B, H, S, D) -> (B, K, H / K, S, D)
        scores = query @ keys[:, :, None].swapaxes(-1, -2)
        scores = scores + mx.triu(mx.full((S, S), MASKED), k=0 if before else 1)
        if before:  # a row's own key is not among them
            own = (query * own_keys[:, :, None]).sum(-1, keepdims=True)
            shares = mx.softmax(mx.concatenate([scores, own], -1), axis=-1)
            output = shares[..., :-1] @ values[:, :, None] + shares[..., -1:] * own_values[:, :, None]
        else:
            output = mx.softmax(scores, axis=-1) @ values[:, :, None]
        return self.o_proj(output.reshape(B, -1, S, D).transpose(0, 2, 1, 3).reshape(B, S, -1))

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self._size).transpose(0, 2, 1, 3)

    def _turned(self, x: mx.array) -> mx.array:
        return mx.fast.rope(x, self._size, traditional=False, base=self._theta, scale=1.0, offset=0)


class Head(nn.Module):
    """A head in MiMo's layout: one layer of Qwen2 behind a projection of hidden state and embedding."""

    def __init__(self, config: kvant.models.ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_layernorm = nn.RMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.self_attn = Attention(hidden, *heads, config.rope.theta)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = Mlp(hidden, config.intermediate_size)
        self.final_layernorm = nn.RMSNorm(hidden, eps)

    def inputs(self, hidden: mx.array, embedding: mx.array) -> mx.array:
        """The layer's input, of the hidden states before the tokens and the tokens' embeddings."""
        both = [self.hidden_layernorm(hidden), self.token_layernorm(embedding)]
        return self.input_proj(mx.concatenate(both, axis=-1))

    def __call__(self, x: mx.array, before: tuple[mx.array, mx.array] | None = None) -> mx.array:
        """What the output head reads."""
        x = x + self.self_attn(self.input_layernorm(x), before)
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    folder = find_model(args.model)
    model, _ = kvant.load(folder)
    table = mx.load(str(folder / "model.safetensors"))["model.embed_tokens.weight"].astype(mx.float32)
    mx.random.seed(args.seed)
    head = Head(model.config)
    began = time.time()

    def rate() -> float:
        share = (time.time() - began) / (60 * args.minutes)
        return args.rate * min(1.0, 20 * share + 0.02) * max(0.0, 1 - share)

    optimizer = optim.AdamW(learning_rate=args.rate, betas=[0.9, 0.95], weight_decay=0.01)
    step = nn.value_and_grad(head, lambda *given: _loss(head, table, *given))
    source = _batches(folder, args.seed)
    number = 0
    while time.time() - began < 60 * args.minutes:
        batch = next(source)
        ids = mx.array(batch.ids)
        hidden = model.hidden_states(ids)
        expected = mx.softmax(model.logits(hidden).astype(mx.float32), axis=-1)
        # The weight of a place is that of the token behind it.
        weights = mx.pad(mx.array(batch.weights)[:, 1:] > 0, [(0, 0), (0, 1)]).astype(mx.float32)
        (_, right), grads = step(ids, hidden, expected, weights)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.learning_rate = rate()
        optimizer.update(head, grads)
        mx.eval(head.parameters(), optimizer.state, right)
        number += 1
        if number % 50 == 0:
            shares = ", ".join(f"{share:.3f}" for share in right.tolist())
            print(f"{time.time() - began:6.0f} s, step {number}: as the model {shares}", flush=True)
            _save(head, args.output)
    _save(head, args.output)


def _loss(
    head: Head, table: mx.array, ids: mx.array, hidden: mx.array, expected: mx.array, weights: mx.array
) -> tuple[mx.array, mx.array]:
    """The mean cross entropy of both passes, and how often each one's first choice is the model's."""
    embedding = table[ids]
    x = head.inputs(_later(hidden), embedding)
    output = head(x)
    losses = [_cross_entropy(output @ table.T, expected, weights)]
    again = head(head.inputs(_later(output), embedding), head.self_attn.keys_values(head.input_layernorm(x)))
    losses.append(_cross_entropy(again @ table.T, expected, weights))
    loss = sum(each for each, _ in losses) / len(losses)
    return loss, mx.stack([share for _, share in losses])


def _later(states: mx.array) -> mx.array:
    """Each place's state from the place before; zeros at the first."""
    return mx.pad(states[:, :-1], [(0, 0), (1, 0), (0, 0)])


def _cross_entropy(logits: mx.array, expected: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
    each = mx.logsumexp(logits, axis=-1) - (expected * logits).sum(-1)
    right = mx.argmax(logits, axis=-1) == mx.argmax(expected, axis=-1)
    return (each * weights).sum() / weights.sum(), (right * weights).sum() / weights.sum()


def _batches(folder: Path, seed: int) -> Iterator[Batch]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stage = next(each for each in STAGES if each.name == "asking")
    source = documents(seed, stage.mix)
    spare = []
    while True:
        spare += [row for row in encode(tokenizer, [next(source) for _ in range(64)]) if len(row[0]) <= 1024]
        made, spare = pack(spare, TOKENS)
        yield from made


def _save(head: Head, path: Path) -> None:
    """Write the matrices in 8 bits, and the rest in bfloat16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, array in tree_flatten(head.parameters()):
        array = array.astype(mx.bfloat16)
        if array.ndim < 2:
            tensors[PREFIX + name] = array
            continue
        parts = mx.quantize(array, group_size=GROUP_SIZE, bits=8)
        for part, own in zip(("weight", "scales", "biases"), parts, strict=True):
            tensors[PREFIX + name.removesuffix("weight") + part] = own
    mx.save_safetensors(str(path), tensors, metadata={"format": "mlx"})


if __name__ == "__main__":
    main()
