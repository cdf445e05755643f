"""Why a key/value cache is right, shown in numbers on one attention layer and on the embedded model.

Run: python scripts/why_a_cache.py
"""

import time

import kvant.blas  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

import kvant
from kvant.models import Decoder
from kvant.operators import multi_head_cache_attention
from kvant.text.prompt import encode_rendered, render_chat

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def random_rows(tokens: int) -> tuple[mx.array, mx.array, mx.array]:
    """Seeded query (1, S, H, D), key and value (1, S, K, D)."""
    keys = mx.random.split(mx.random.key(1), 3)
    return tuple(
        mx.random.normal((1, tokens, heads, HEAD_DIM), key=key)
        for heads, key in zip((HEADS, KV_HEADS, KV_HEADS), keys, strict=True)
    )  # type: ignore[return-value]


def attend(rows: tuple[mx.array, mx.array, mx.array], start: int, cache: mx.array) -> mx.array:
    """The PMX operator without quantization, causal."""
    return multi_head_cache_attention(
        *rows, start, cache, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, is_causal=True, cache_layout=1
    )


def empty_cache(tokens: int) -> mx.array:
    """Layout 1: (L, B, 2, K, MaxS, D)."""
    return mx.zeros((1, 1, 2, KV_HEADS, tokens, HEAD_DIM))


def last_row_difference(tokens: int = 48) -> float:
    """The largest difference of the newest query's output through the cache from the full computation's last row."""
    rows = random_rows(tokens)
    full = attend(rows, 0, empty_cache(tokens))
    cache = empty_cache(tokens)
    attend(tuple(x[:, :-1] for x in rows), 0, cache)  # type: ignore[arg-type]
    last = attend(tuple(x[:, -1:] for x in rows), tokens - 1, cache)  # type: ignore[arg-type]
    return mx.abs(full[:, -1:] - last).max().item()  # type: ignore[return-value]


def earlier_rows_differences(tokens: int = 48) -> tuple[float, float]:
    """The largest changes that one more token makes: in the earlier outputs, and in the earlier keys and values."""
    rows = random_rows(tokens)
    shorter, longer = empty_cache(tokens), empty_cache(tokens)
    before = attend(tuple(x[:, :-1] for x in rows), 0, shorter)  # type: ignore[arg-type]
    after = attend(rows, 0, longer)
    outputs = mx.abs(after[:, :-1] - before).max().item()
    cached = mx.abs(longer[..., : tokens - 1, :] - shorter[..., : tokens - 1, :]).max().item()
    return outputs, cached  # type: ignore[return-value]


def greedy_tokens(model: Decoder, prompt: list[int], count: int, *, cached: bool) -> list[int]:
    """Greedy tokens: one token a step through a cache, or everything computed again at every step."""
    ids, cache = list(prompt), model.make_cache(len(prompt) + count, quant_bit=0) if cached else None
    feed = ids
    for _ in range(count):
        logits = model(mx.array([feed]), cache=cache)[0, -1]
        ids.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
        feed = ids[-1:] if cached else ids
    return ids[len(prompt) :]


def main() -> None:
    """Print the three reasons."""
    print(f"last row alone against the full computation: difference {last_row_difference():.1e}")
    outputs, cached = earlier_rows_differences()
    print(f"one more token changes earlier outputs by {outputs:.1e}, earlier keys and values by {cached:.1e}")
    model, tokenizer = kvant.load("pocket")
    question = [{"role": "user", "content": "Tell me a story about a fox named Pip."}]
    prompt = encode_rendered(tokenizer, render_chat(tokenizer, question))
    runs = {}
    for cached_run in (True, False):
        started = time.perf_counter()
        runs[cached_run] = greedy_tokens(model, prompt, 64, cached=cached_run)
        kind = "with a cache" if cached_run else "recomputing everything"
        print(f"64 tokens {kind}: {time.perf_counter() - started:.2f} s")
    print(f"the same tokens: {runs[True] == runs[False]}")


if __name__ == "__main__":
    main()
