"""The plan of several machines: its sums against one process, its parts against what is loaded, all deals
tried.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from support.adapters import adapter_config, save_adapter
from support.bridged import write_mlx_lm
from support.checkpoints import (
    CONFIGS,
    llama_config,
    quantize_reference,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    reference_model,
    save_checkpoint,
)
from support.counts import count
from support.ranks import run_script
from support.tiny_models import shape

from kvant.cache import CacheOptions
from kvant.errors import ModelError
from kvant.machine import Machine
from kvant.models import Decoder, load_decoder
from kvant.models.checkpoint import load_shard
from kvant.models.decoder import DecoderParts
from kvant.plan import Checkpoint, RankPlanner, Settings, plan, read_folder, split_pairs
from kvant.plan.ranks import deal
from kvant.ranks.bridged_stage import load_bridged_stage
from kvant.ranks.group import Ranks
from kvant.ranks.shares import shares
from kvant.tools.bench.shapes import Shape, write_random

WIDEST = 2.5  # of the measured peak: a rank that waits holds less of what MLX has queued


def machines(*limits: int) -> list[Machine]:
    """CPUs with so many bytes."""
    return [Machine("cpu", limit, limit, "a test") for limit in limits]


def nbytes(parts: DecoderParts) -> int:
    """Of all that a rank has loaded."""
    matrices = [matrix for matrix in (parts.embed_tokens, parts.lm_head) if matrix is not None]
    arrays = [array for holder in (*matrices, *parts.layers) for array in holder.arrays]
    return sum(array.nbytes for array in [*arrays, *([] if parts.norm is None else [parts.norm])])


MODELS = {name: config | {"num_hidden_layers": 3} for name, config in CONFIGS.items()}
MODELS["smollm3"]["no_rope_layers"] = [1, 0, 1]
FORMATS = [None, (3, 32, "affine"), (4, 32, "mxfp4")]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weight_format", count(FORMATS[1:2], FORMATS))
def test_weights_are_what_a_rank_loads(
    name: str, weight_format: tuple[int, int, str] | None, tmp_path: Path
) -> None:
    config = MODELS[name]
    model = reference_model(config)
    if weight_format is not None:
        config = quantize_reference(config, model, *weight_format)
        # One matrix of another format, so that layers are not alike.
        config["quantization"]["model.layers.2.self_attn.o_proj"] = {
            "bits": 8,
            "group_size": 32,
            "mode": "affine",
        }
        attention = model.layers[2].self_attn
        attention.o_proj = reference_model(MODELS[name]).layers[2].self_attn.o_proj.to_quantized(32, 8)
    save_checkpoint(tmp_path, config, model)
    checkpoint = Checkpoint.from_folder(tmp_path)
    whole = plan(checkpoint, max_kv_size=50, device="cpu")
    pipeline, tensor = (
        RankPlanner(checkpoint, machines(10**9, 2 * 10**9), kind).plan(50) for kind in ("pipeline", "tensor")
    )
    for rank, layers in enumerate(pipeline.layers):
        loaded = load_shard(tmp_path, layers=layers, embedding=rank == 0, head=rank == 0)
        assert pipeline.plans[rank].weights == nbytes(loaded)
    assert sum(made.weights for made in pipeline.plans) == whole.weights == load_decoder(tmp_path).nbytes
    assert sum(made.weights_read for made in pipeline.plans) == whole.weights_read
    assert sum(made.cache for made in pipeline.plans) == whole.cache
    for rank, share in enumerate(shares(checkpoint.config, 2)):
        assert tensor.plans[rank].weights == nbytes(load_shard(tmp_path, share=share))


def test_an_adapter_is_whole_on_every_rank(tmp_path: Path) -> None:
    config = qwen3_config(num_hidden_layers=3)
    model = reference_model(config)
    adapter = save_adapter(tmp_path / "adapter", adapter_config(num_layers=1), model)
    without = Checkpoint.from_folder(save_checkpoint(tmp_path / "model", config, model))
    made = without.adapted(adapter)
    before, after = (
        RankPlanner(each, machines(10**9, 10**9), "pipeline").plan(9).plans for each in (without, made)
    )
    size = (adapter / "adapters.safetensors").stat().st_size
    assert [b.weights - a.weights for a, b in zip(before, after, strict=True)] == [3 * size] * 2
    assert RankPlanner(made, machines(*(own.total for own in after)), "pipeline").longest().tokens >= 9


WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}


@pytest.mark.parametrize("bits", count([4], [0, 8, 4]))
@pytest.mark.parametrize("settings", [{}, WINDOWS])
def test_caches_are_those_that_are_made(bits: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Large key biases in some layers only: the pairs that are split off differ by layer."""
    config = qwen2_config(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, **settings)
    model = reference_model(config)
    for layer in (1, 2):
        model.layers[layer].self_attn.k_proj.bias = 100 * model.layers[layer].self_attn.k_proj.bias
    save_checkpoint(tmp_path, config, model)
    loaded, checkpoint = load_decoder(tmp_path), Checkpoint.from_folder(tmp_path)
    pairs = split_pairs(loaded)
    assert len({*pairs}) > 1
    chosen = Settings(CacheOptions(bits, 16))
    options = chosen.cache
    each = [layer.nbytes for layer in loaded.reserve_cache(90, options)]
    layers = RankPlanner(checkpoint, machines(10**9, 10**9, 10**9), "pipeline", chosen).plan(90).layers

    def cache(rank: int, own: range, settings: Settings) -> int:
        stage, its_pairs = checkpoint.stage(rank, own), pairs[own.start : own.stop]
        return plan(stage, max_kv_size=90, settings=settings, split_pairs=its_pairs).cache

    found = [cache(rank, own, chosen) for rank, own in enumerate(layers)]
    assert found == [sum(each[own.start : own.stop]) for own in layers]
    pool = loaded.make_pool(3 * 128, sequences=3, max_seq_len=90, options=options)
    pooled = [
        cache(rank, own, replace(chosen, sequences=3)) for rank, own in enumerate((range(2), range(2, 4)))
    ]
    assert sum(pooled) == pool.nbytes
    # Every rank splits off the pairs that any of them would: none fewer here than one rank alone.
    tensor = RankPlanner(checkpoint, machines(10**9, 10**9), "tensor", chosen).plan(90).plans
    for share, made in zip(shares(checkpoint.config, 2), tensor, strict=True):
        part = Decoder(load_shard(tmp_path, share=share))
        known = plan(checkpoint.share(share), max_kv_size=90, settings=chosen, split_pairs=split_pairs(part))
        assert known.cache == part.reserve_cache(90, options).nbytes
        assert made.weights == known.weights


def test_a_machine_without_memory_gets_one_layer() -> None:
    assert deal(3, [1, 0, 10**12], lambda rank, first, last: last - first) == [
        range(1),
        range(1, 2),
        range(2, 3),
    ]


CONTEXT = 40_000


def mixed() -> dict[str, Checkpoint]:
    """Models whose layers are not alike."""
    experts = qwen3_moe_config(num_hidden_layers=5, mlp_only_layers=[0, 3])
    formats = {f"model.layers.{layer}.mlp.down_proj": {"bits": 8, "group_size": 64} for layer in (1, 4)}
    raw = {
        "windows": qwen2_config(num_hidden_layers=6, **WINDOWS | {"max_window_layers": 3}),
        "experts": experts,
        "formats": llama_config(num_hidden_layers=6, quantization={"bits": 4, "group_size": 64, **formats}),
    }
    return {
        name: Checkpoint.from_facts(each | {"max_position_embeddings": CONTEXT}) for name, each in raw.items()
    }


@pytest.mark.parametrize("name", mixed())
@pytest.mark.parametrize("sequences", [None, 3])
def test_no_other_deal_is_better(name: str, sequences: int | None) -> None:
    """Of every deal each rank is planned by itself, from its part of the model."""
    checkpoint, settings = mixed()[name], Settings(sequences=sequences)
    for limits in ([300, 230], [230, 230, 230], [10**6, 240, 10**5]):
        given = machines(*(limit * 10**6 for limit in limits))
        made = RankPlanner(checkpoint, given, "pipeline", settings).plan(500)

        def fullest(plans: Sequence[int]) -> float:
            return max(total / machine.limit_bytes for total, machine in zip(plans, given, strict=True))  # noqa: B023

        def totals(dealt: Sequence[range]) -> list[int]:
            parts = [checkpoint.stage(rank, own) for rank, own in enumerate(dealt)]
            return [plan(part, max_kv_size=500, settings=settings, device="cpu").total for part in parts]

        layers, cuts = checkpoint.num_layers, combinations(range(1, checkpoint.num_layers), len(given) - 1)
        deals = ([range(*bounds) for bounds in pairwise((0, *cut, layers))] for cut in cuts)
        least = min(fullest(totals(dealt)) for dealt in deals)
        assert totals(made.layers) == [own.total for own in made.plans]
        assert fullest(totals(made.layers)) == least
        assert made.fits == (least <= 1)


@pytest.mark.parametrize("name", mixed())
def test_the_longest_context_is_exact_to_a_token(name: str) -> None:
    """One token more fits with no deal of the layers."""
    checkpoint = mixed()[name]
    settings = Settings(prefill_step_size=16, cache=CacheOptions(kv_bits=0))
    most = RankPlanner(checkpoint, machines(10**9, 10**9), "pipeline", settings).plan(CONTEXT)
    limits = machines(*(made.total - 100_000 for made in most.plans))
    for parallel in ("pipeline", "tensor"):
        planner = RankPlanner(checkpoint, limits, parallel, settings)
        tokens = planner.longest().tokens
        assert tokens > 0
        assert planner.plan(tokens).fits
        assert tokens == CONTEXT or not planner.plan(tokens + 1).fits


class Place:
    """Stands for MLX's group of two, where nothing is sent."""

    def __init__(self, number: int) -> None:
        self.rank, self.size = lambda: number, lambda: 2


BRIDGED = ["gemma3_text", "gpt_oss", "falcon_h1", "qwen3_next"]


@pytest.mark.parametrize("kind", BRIDGED)
def test_a_bridged_model_is_dealt_too(kind: str, tmp_path: Path) -> None:
    checkpoint = read_folder(folder := write_mlx_lm(tmp_path / "model", kind))
    whole = plan(checkpoint, max_kv_size=100, device="cpu")
    made = RankPlanner(checkpoint, machines(10**9, 10**9), "pipeline").plan(100)
    assert made.layers[-1].stop == checkpoint.num_layers > 1
    for name in ("weights", "cache", "state"):
        assert sum(getattr(own, name) for own in made.plans) == getattr(whole, name)
    for rank, layers in enumerate(made.layers):
        loaded = load_bridged_stage(folder, Ranks(cast(Any, Place(rank))), layers)
        assert (made.plans[rank].weights, made.plans[rank].weights_read) == (
            loaded.nbytes,
            loaded.nbytes_read,
        )
        assert made.plans[rank].cache == loaded.make_cache(100).nbytes
    with pytest.raises(ModelError, match=f"{kind} is mlx-lm's model: its tensors are not divided"):
        RankPlanner(checkpoint, machines(10**9, 10**9), "tensor").plan(100)
    with pytest.raises(ModelError, match="on several machines takes one sequence at a time"):
        RankPlanner(checkpoint, machines(10**9, 10**9), "pipeline", Settings(sequences=2)).plan(100)


# Every rank loads its part, fills a cache or a pool with it, and says what was planned and what MLX counted.
RUN = """
import json, os, sys
from pathlib import Path
if hasattr(os, "sched_setaffinity"):  # dequantized parts are made side by side, one on each core
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import kvant
import mlx.core as mx
from kvant.cache import CacheOptions
from kvant.ranks.group import connect
from kvant.ranks.stage import load_stage
from kvant.ranks.tensor import load_tensor
from kvant.machine import Machine
from kvant.plan import Checkpoint, RankPlanner, Settings, plan, split_pairs

ranks = connect("ring")
for folder, parallel, tokens, options in json.loads(sys.argv[1]):
    settings = Settings(CacheOptions(kv_bits=options.pop("kv_bits", 8)), **options)
    step, count, stored = settings.prefill_step_size, settings.sequences, settings.cache
    machines = [Machine("cpu", 10**10, 10**10, "a test")] * ranks.size
    made = RankPlanner(Checkpoint.from_folder(Path(folder)), machines, parallel, settings).plan(tokens)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    layers = made.layers and made.layers[ranks.rank]
    model = load_stage(Path(folder), ranks, layers) if layers else load_tensor(Path(folder), ranks)
    ids = [7 * i % 90 for i in range(tokens)]
    if count is None:
        held = model.reserve_cache(tokens, stored)
        prompts, together = [lambda: held], lambda: held
    else:
        rows = -(-tokens // 128) * 128
        held = model.make_pool(count * rows, sequences=count, max_seq_len=tokens, prefill_step_size=step, options=stored)
        opened = [held.sequence(tokens) for _ in range(count)]
        prompts, together = [lambda one=one: held.batch([one]) for one in opened], lambda: held.batch(opened)
    for cache in prompts:
        for first in range(0, tokens - 4, step):
            own = cache()
            mx.eval(model.feed(mx.array([ids[first : min(first + step, tokens - 4)]]), own))
            own.commit()
            mx.clear_cache()
    own = together()
    for token in ids[-4:]:
        mx.eval(model.next_logits(mx.array([[token]] * (count or 1)), own))
        own.commit()
    mx.synchronize()
    peak = mx.get_peak_memory() - before
    # With the rotary pairs that only the weights say.
    part = made.parts[ranks.rank]
    known = plan(part, max_kv_size=tokens, settings=settings, device="cpu", split_pairs=split_pairs(model))
    least, most = sorted([made.plans[ranks.rank].arrays, known.arrays])
    print(json.dumps([least, most, peak, known.weights, model.nbytes, known.cache, held.nbytes]))
    del model, held, own, cache, prompts, together
    opened = None
"""


STEP = {"prefill_step_size": 64}
CASES: dict[str, tuple[Shape, int, int, dict[str, int]]] = {  # tokens, bits of weights, settings
    "4-bit weights": (shape("qwen3", 1024, 2, 16, 4, 64, 4096, 2000, True), 130, 4, {}),
    "an 8-bit cache": (shape("qwen2", 32, 4, 32, 32, 64, 32, 500, True), 200, 0, STEP),
    "a pool": (shape("qwen3", 32, 4, 32, 32, 64, 32, 500, False), 200, 0, STEP | {"sequences": 4}),
}
LONG = {
    "a large vocabulary, untied": (shape("qwen3", 256, 4, 4, 2, 64, 512, 30000, False), 100, 0, {}),
    "a 4-bit cache": (shape("qwen3", 32, 8, 32, 32, 64, 32, 500, True), 448, 0, STEP | {"kv_bits": 4}),
    "norms of whole projections": (shape("olmo2", 256, 2, 4, 2, 64, 2048, 1000, True), 770, 0, STEP),
}
CASES |= count({}, LONG)


def test_the_plan_bounds_what_mlx_counts_on_each_rank(tmp_path: Path) -> None:
    """From load to a full cache, two ranks on the loopback. The group's processes run one case after the
    other.
    """
    ways = ("pipeline", "tensor")
    runs = [(name, way) for i, name in enumerate(CASES) for way in count(ways[i % 2 :][:1], ways)]
    cases = []
    for number, (name, parallel) in enumerate(runs):
        made, tokens, bits, options = CASES[name]
        (folder := tmp_path / str(number)).mkdir()
        write_random(made, folder, bits=bits)
        cases.append([str(folder), parallel, tokens, options])
    outs = [out.splitlines() for out in run_script(2, RUN, json.dumps(cases))]
    for rank, lines in enumerate(outs):
        for (name, parallel), line in zip(runs, lines, strict=True):
            least, most, peak, weights, loaded, cache, reserved = json.loads(line)
            print(f"{name}, {parallel}, rank {rank}: planned {most / peak:.3f} of {peak / 1e6:.1f} MB")
            assert (weights, cache) == (loaded, reserved)
            assert peak <= least <= most <= WIDEST * peak, (
                f"{name}, {parallel}, rank {rank}: {least} to {most}"
            )
