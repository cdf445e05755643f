"""PMX's operators by the convention of the test vectors, in NumPy alone: the oracle with another front."""

from typing import Any

import numpy as np

from support import oracle
from support.oracle import Array, Sequences, Spec


def numpy_operators(operator: str, inputs: dict[str, Array], attributes: dict[str, Any]) -> dict[str, Array]:
    arrays = {name: from_bits(x) for name, x in inputs.items()}
    packed, attends = operator.startswith("dynamic"), "attention" in operator
    key, value, cache = (arrays[x] for x in ("current_key", "current_value", "cache"))
    scale = arrays.get("scale")
    names = ("num_layer", "layer_idx", "quant_bit", "quant_group", "cache_layout")
    dtypes = [dtype_of(inputs.get(name, inputs["cache"])) for name in ("current_key", "cache", "scale")]
    spec = Spec(*dtypes, **{name: attributes[name] for name in names})
    shape = key.shape[:-2]  # (N,) or (B, S)
    if packed:
        seq, kv = inputs["seqstarts"].tolist(), inputs["kvstarts"].tolist()
        earlier, new = inputs["start_pos"].tolist(), np.diff(seq).tolist()
        rows = rows_of(inputs["cachestarts"], np.diff(kv).tolist(), attributes)
        sequences, decoding = Sequences(earlier, new, rows), int(inputs["decoding_batches"]) if attends else 0
    else:
        sequences, decoding = Sequences([int(inputs["start_pos"])] * shape[0], [shape[1]] * shape[0]), 0
        seq, kv = ([b * x[0] for b in range(shape[0] + 1)] for x in (sequences.new, sequences.tokens))
    new_tokens = (x.reshape(-1, *x.shape[-2:]) for x in (key, value))  # (N, K, D)
    cache, scale = oracle.store(*new_tokens, sequences, cache, scale, spec)
    tokens = oracle.fetch(sequences, cache, scale, spec)  # (T, K, D)
    stored = {"cache": to_bits(cache, spec.cache_dtype)} | ({} if scale is None else {"scale": scale})
    if not attends:
        lead = (-1,) if packed else (shape[0], -1)
        both = (repeated(x, attributes["num_repeat"]) for x in tokens)
        both = (to_bits(x.reshape(*lead, *x.shape[1:]), spec.dtype) for x in both)
        return dict(zip(("key", "value"), both, strict=True)) | stored
    query = arrays["query"].reshape(-1, *arrays["query"].shape[-2:])
    output, mask = np.zeros(query.shape), arrays.get("attn_mask")
    for b in range(len(seq) - 1):
        own, every, part = slice(seq[b], seq[b + 1]), slice(kv[b], kv[b + 1]), mask
        if mask is not None and mask.size:
            part = mask[..., own, every] if packed else mask[b % len(mask)] if mask.ndim == 4 else mask
        if seq[b] < seq[b + 1]:
            q, k, v = (x[None] for x in (query[own], *(x[every] for x in tokens)))
            causal, alibi = attributes["is_causal"] and b >= decoding, attributes["is_alibi"]
            output[own] = oracle.attend(q, k, v, is_causal=causal, is_alibi=alibi, attn_mask=part)[0]
    return {
        "output": to_bits(oracle.cast(output, spec.dtype), spec.dtype).reshape(inputs["query"].shape)
    } | stored


def rows_of(cachestarts: Array, tokens: list[int], attributes: dict[str, Any]) -> list[list[int]]:
    """The row of every token of every sequence."""
    page = attributes["page_size"] if attributes["cache_mode"] else 10**9
    tables = cachestarts.reshape(len(tokens), -1)
    return [
        [int(table[t // page]) + t % page for t in range(n)] for table, n in zip(tables, tokens, strict=True)
    ]


def repeated(x: Array, num_repeat: int) -> Array:
    return np.repeat(x, num_repeat, axis=1)


def dtype_of(x: Array) -> str:
    return "bfloat16" if x.dtype == np.uint16 else x.dtype.name


def from_bits(x: Array) -> Array:
    return x if x.dtype != np.uint16 else (x.astype(np.uint32) << 16).view(np.float32)


def to_bits(x: Array, dtype: str) -> Array:
    return x if dtype != "bfloat16" else (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
