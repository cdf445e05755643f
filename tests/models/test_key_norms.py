"""Norms of queries and keys whose large channels are moved from keys to queries."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import (
    change_tensors,
    check_three_ways,
    load_reference,
    olmo2_config,
    qwen3_config,
    reference_logits,
    write_reference,
)

from kvant.models import Decoder
from kvant.models.checkpoint import load_decoder
from kvant.models.key_norms import balance_norms
from kvant.tools.report.divergence import Tally, log_probabilities

IDS = [(7 + 31 * i) % 97 for i in range(60)]


def test_only_outliers_are_moved_both_elements_of_a_pair_alike_and_nothing_is_rounded() -> None:
    rng = np.random.default_rng(0)
    key, query = (mx.array(rng.uniform(0.5, 1.5, size).astype(np.float32)) for size in (2 * 16, 4 * 16))
    assert balance_norms(query, key, 16)[2] is False
    key[16 + 3] = -13.0
    changed_query, changed_key, changed = balance_norms(query, key, 16)
    assert changed
    products = mx.repeat(key.reshape(2, 16), 2, axis=0) * query.reshape(4, 16)
    again = mx.repeat(changed_key.reshape(2, 16), 2, axis=0) * changed_query.reshape(4, 16)
    assert mx.array_equal(products, again)
    moved = np.flatnonzero(np.array(key) != np.array(changed_key))
    assert moved.tolist() == [16 + 3, 16 + 11]
    assert mx.abs(changed_key).max().item() < 3  # type: ignore[operator]
    assert not balance_norms(query, mx.zeros(32), 16)[2]


@pytest.mark.parametrize("config", [qwen3_config(), olmo2_config()], ids=["qwen3", "olmo2"])
def test_a_model_with_outliers_is_mlx_lms_and_4_bits_do_not_suffer(
    tmp_path: Path, config: Mapping[str, Any]
) -> None:
    """Three pairs of the second layer's keys 16 times as large, and its queries as much smaller."""
    folder, _ = write_reference(tmp_path, dict(config))
    before = load_decoder(folder)
    names = [f"model.layers.1.self_attn.{name}_norm.weight" for name in "qk"]
    weights = [mx.array(mx.load(str(folder / "model.safetensors"))[name]) for name in names]
    half = before.config.head_dim // 2
    factors = mx.array([16.0 if place in (2, 5, 9) else 1.0 for place in range(half)])
    of_queries, of_keys = (mx.tile(factors, weight.size // half) for weight in weights)
    query, key = weights[0] / of_queries, weights[1] * of_keys
    change_tensors(folder / "model.safetensors", dict(zip(names, (query, key), strict=True)))
    model = load_decoder(folder)
    expected = reference_logits(load_reference(folder), IDS)
    check_three_ways(model, expected, IDS)
    plain = model.make_cache(9, kv_format="pmx")
    assert [own.transform_name for own in plain.formats] == ["", "norms"]

    def kld(model: Decoder, kv_format: str | None = None) -> float:
        tally = Tally()
        cache = model.make_cache(64, kv_bits=4, kv_group_size=32, kv_format=kv_format, kv_tail=False)
        given = model(mx.array([IDS]), cache=cache)[0]
        tally.add(log_probabilities(expected)[:-1], log_probabilities(given)[:-1], IDS[1:])
        return tally.figures().mean_kld_nats

    layer = model.layers[1]
    balanced = kld(model)
    balanced_pmx = kld(model, "pmx")
    attention = layer.self_attn
    if attention.head_norm is None:
        attention = replace(attention, projection_norms=(query, key), is_balanced=False)
    else:
        heads = model.config.num_attention_heads
        rows = [*[query] * heads, *[key] * model.config.num_key_value_heads]
        attention = replace(attention, head_norm=mx.stack(rows)[:, None], is_balanced=False)
    model.layers = (model.layers[0], replace(layer, self_attn=attention))
    check_three_ways(model, expected, IDS)
    assert balanced < 1.2 * kld(before)
    assert kld(model) > 1.3 * balanced
    assert kld(model, "pmx") > 2 * balanced_pmx
