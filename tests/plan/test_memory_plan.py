"""The memory plan against what MLX counts through a run, each in a process of its own, and against what is
reserved.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.bridged import write_config, write_mlx_lm
from support.checkpoints import qwen2_config, qwen3_config
from support.command import call
from support.counts import count
from support.kinds import KINDS, load_kind
from support.tiny_models import shape

from kvant.cache import CacheOptions
from kvant.cli.fitting import plan_that_fits
from kvant.engine.load import Weights
from kvant.errors import ContextError, ModelError
from kvant.machine import machine_with, this_machine
from kvant.models import Decoder, ModelConfig
from kvant.operators.score_blocks import GPU_BLOCK_SCORES
from kvant.plan import (
    Checkpoint,
    LongestContext,
    Settings,
    longest_context,
    plan,
    read_facts,
    read_folder,
    split_pairs,
)
from kvant.tools.bench.shapes import Shape, write_random

RUN = Path(__file__).parents[1] / "support" / "memory_run.py"
WIDEST = 2.5  # of the measured peak; on a busy machine MLX's threads keep up with the queue, and hold less
WIDEST_BRIDGED = 3.3  # chunks of tiny models are small beside the blocks of scores that may be held


@dataclass(frozen=True)
class Case:
    """A model, its stored weights, and a run that fills ``tokens``."""

    shape: Shape | None  # None: the folder is there
    tokens: int
    settings: Settings = field(default_factory=Settings)
    weight_bits: int = 0
    streams: int = 2
    window: int | None = None
    weights: Weights = "packed"


def experts(count: int, per_token: int, inner: int, *sizes: Any) -> Shape:
    facts = {"num_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": inner}
    return replace(shape("qwen3_moe", *sizes), **facts)


def steps(size: int, bits: int = 8, group: int = 32, sequences: int | None = None) -> Settings:
    """Of a run that reads so many tokens at a time."""
    return Settings(CacheOptions(bits, group), size, sequences)


LAYERS, TOKENS = count(4, 16), count(200, 448)
MANY_KEYS = (32, LAYERS, 32, 32, 64, 32, 500, True)  # keys and values outweigh everything else
FEW_LAYERS = (32, 4, 32, 32, 64, 32, 500, True)
FOUR_BITS = Case(shape("qwen2", 1024, 3, 16, 4, 64, 4096, 2000, True), 130, weight_bits=4)
CASES = {
    "a large vocabulary, untied": Case(shape("qwen3", 256, 2, 4, 2, 64, 512, 30000, False), 100),
    "4-bit weights": FOUR_BITS,
    # Dequantized parts wait for their input: without that, four threads hold 1.3 times as much.
    "4-bit weights, more threads than cores": replace(FOUR_BITS, streams=4),
    "4-bit weights, unpacked": replace(FOUR_BITS, weights="float32"),
    "a 4-bit cache": Case(shape("qwen3", *MANY_KEYS), TOKENS, steps(64, bits=4, group=64)),
    "a long step": Case(
        shape("qwen2", 256, 2, 4, 2, 64, 2048, 1000, True), count(770, 1540), steps(count(768, 1536))
    ),
    "windows": Case(shape("qwen2", *MANY_KEYS), 3 * TOKENS, steps(32), window=TOKENS),
    "4-bit experts in turn": Case(
        experts(16, 2, 1024, 1024, 2, 8, 2, 64, 512, 1000, False), 300, steps(256), weight_bits=4
    ),
    "few queries, whose scores take the keys' bias": Case(
        shape("qwen2", 64, 1, 16, 2, 64, 64, 100, True), 1000, steps(8)
    ),
    "a pool": Case(shape("qwen2", *FEW_LAYERS), 200, steps(64, sequences=4)),
    # A token that is decoded reads more floats at once than a chunk does.
    "a short step": Case(shape("qwen2", *FEW_LAYERS), 1000, steps(16)),
}
LONG = {
    "bfloat16 weights, tied": Case(shape("qwen2", 512, 4, 8, 2, 64, 2048, 4000, True), 130),
    "8-bit weights, untied": Case(
        shape("qwen3", 1024, 3, 8, 4, 128, 3072, 20000, False), 70, steps(64), weight_bits=8
    ),
    "a long step through 4-bit weights": Case(
        shape("qwen3", 512, 2, 8, 2, 64, 2048, 1000, True), 1030, steps(1024), weight_bits=4
    ),
    "a few rows of 4-bit weights, a large vocabulary": Case(
        shape("qwen3", 256, 2, 4, 2, 64, 1024, 20000, True), 17, steps(8), weight_bits=4
    ),
    "norms of whole projections": Case(shape("olmo2", 256, 2, 4, 2, 64, 2048, 1000, True), 770, steps(768)),
    "experts in turn": Case(experts(16, 4, 256, 512, 2, 8, 2, 64, 512, 1000, True), 770, steps(768)),
    "a pool, windows": Case(shape("qwen2", *FEW_LAYERS), 400, steps(64, sequences=3), window=200),
    "a pool that is not quantized": Case(shape("qwen3", *FEW_LAYERS), 200, steps(64, bits=0, sequences=4)),
    "a pool, many rows of logits": Case(
        shape("qwen3", 256, 2, 4, 2, 64, 512, 10_000, True), 100, steps(128, sequences=32)
    ),
    "a pool through 4-bit weights": replace(FOUR_BITS, tokens=70, settings=steps(64, sequences=8)),
}
CASES |= count({}, LONG)
Measure = Callable[[Path, Case], dict[str, list[int]]]


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    """A function (folder, case) -> the plans, and what MLX counted in a process that did nothing else."""
    with subprocess.Popen([sys.executable, "-P", RUN], stdin=-1, stdout=-1, text=True) as process:

        def run(folder: Path, case: Case) -> dict[str, list[int]]:
            options = {name: value for name, value in asdict(case.settings).items() if value is not None}
            print(
                json.dumps([str(folder), case.tokens, case.streams, options, case.weights]),
                file=process.stdin,
                flush=True,
            )
            found = json.loads(process.stdout.readline())
            assert isinstance(found, dict), "it failed: see standard error"
            return found

        yield run


@pytest.mark.parametrize("name", CASES)
def test_the_plan_bounds_what_mlx_counts(measure: Measure, name: str, tmp_path: Path) -> None:
    """No run takes more than the plan; weights and cache are exact."""
    case = CASES[name]
    assert case.shape is not None
    write_random(case.shape, tmp_path, bits=case.weight_bits)
    if case.window is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        settings = {"use_sliding_window": True, "sliding_window": case.window, "max_window_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(config | settings))
    found = measure(tmp_path, case)
    peak, *exact = found["measured"]
    print(f"{name}: planned {found['guessed'][0] / peak:.3f} of {peak / 1e6:.1f} MB")
    assert peak <= min(found["guessed"][0], found["known"][0])
    assert max(found["guessed"][0], found["known"][0]) <= WIDEST * peak
    assert found["known"][1:] == exact
    assert found["guessed"][1] == exact[0]


# Causal blocks, windows, sinks, attention of a model's own, and states: of a rule, of scans, of all tokens of
# a chunk.
BRIDGED = ["qwen3", "deepseek_v3", "jamba"]
BRIDGED += count([], ["gemma3_text", "gpt_oss", "qwen3_5", "mamba2", "gemma2", "llama4"])


@pytest.mark.parametrize("kind", BRIDGED)
def test_the_plan_bounds_what_a_bridged_model_takes(measure: Measure, kind: str, tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path / "model", kind)
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config)["max_position_embeddings"] = 4096
    write_config(folder, config)
    # A prompt of one chunk, in blocks of scores: one that is a little longer is attended to in tiles.
    for case in (Case(None, 1400, steps(256)), Case(None, 500, steps(512, bits=4))):
        found = measure(folder, case)
        peak, weights, _ = found["measured"]
        print(f"{kind}: planned {found['guessed'][0] / peak:.3f} of {peak / 1e6:.1f} MB")
        assert found["guessed"][1] == weights
        assert peak <= found["guessed"][0] <= WIDEST_BRIDGED * peak


@pytest.mark.parametrize(("kind", "most"), [("qwen3", 3), ("gemma", 1)])  # native and bridged
def test_scores_that_mlx_does_not_make_are_not_planned(kind: str, most: int) -> None:
    """On a Mac, of a long context. Three float32 score matrices were counted once: six of bfloat16."""
    tokens, heads = 131_072, 16
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "vocab_size": 1000,
    }
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
    }
    config |= {"max_position_embeddings": tokens, "torch_dtype": "bfloat16", "rope_theta": 1e6}
    narrow, wide = (
        plan(read_facts(config | {"head_dim": width}), max_kv_size=tokens, device="gpu").scratch
        for width in (128, 256)
    )
    matrix = 2 * heads * 512 * tokens
    assert narrow < matrix / 2
    assert narrow + 2 * GPU_BLOCK_SCORES < wide < most * matrix


def test_float_matrices_among_quantized_ones_count_as_floats() -> None:
    config = qwen2_config(tie_word_embeddings=False, torch_dtype="bfloat16")
    formats = {"bits": 4, "group_size": 32}
    floats = {"model.layers.1.mlp.down_proj": False, "lm_head": False}
    some, every = (Checkpoint.from_facts(config | {"quantization": formats | left}) for left in (floats, {}))
    elements = 128 * 256 + 300 * 128
    assert some.stored_bytes - every.stored_bytes == elements * 2 - (elements // 2 + elements // 32 * 4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("float_bytes", [2, 4])
def test_the_files_say_what_config_json_leaves_out(tied: bool, float_bytes: int) -> None:
    config = qwen2_config()
    del config["tie_word_embeddings"]
    expected = Checkpoint(ModelConfig.from_dict(config), float_bytes, tied)
    assert Checkpoint.from_facts(config, expected.stored_bytes + 5000) == expected
    without_files = Checkpoint.from_facts(config)
    assert (without_files.float_bytes, without_files.tied) == (2, False)


@pytest.mark.parametrize("sequences", [None, 3])
@pytest.mark.parametrize("bits", [0, 4, 8])
def test_the_longest_context_is_exact_to_a_token(bits: int, sequences: int | None) -> None:
    """And no longer one fits: a plan never falls with more tokens."""
    windows = {"use_sliding_window": True, "sliding_window": 700, "max_window_layers": 1}
    raw = qwen2_config(max_position_embeddings=100_000, torch_dtype="float16", **windows)
    checkpoint, settings = (
        Checkpoint.from_facts(raw),
        Settings(sequences=sequences, cache=CacheOptions(kv_bits=bits)),
    )

    def total(tokens: int) -> int:
        return plan(checkpoint, max_kv_size=tokens, settings=settings, device="cpu").total

    for limit in (190_000_000, 205_000_000, 225_000_000):
        found = longest_context(checkpoint, machine_with(limit, "cpu"), settings)
        assert found.ended_by == "memory"
        assert 0 < found.tokens < 100_000
        assert total(found.tokens) <= limit < total(found.tokens + 1)
    totals = [total(tokens) for tokens in range(1, 20_000, count(97, 1))]
    assert totals == sorted(totals)


def test_the_longest_context_ends_with_the_models_or_is_none() -> None:
    checkpoint = Checkpoint.from_facts(qwen2_config())
    assert longest_context(checkpoint, machine_with(10**12, "cpu")) == LongestContext(
        1024, "the model's context"
    )
    assert longest_context(checkpoint, machine_with(10**6, "cpu")) == LongestContext(0, "memory")
    absurd = dict.fromkeys(
        ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim"), 2**24
    )
    absurd |= {"num_key_value_heads": 2**24, "num_hidden_layers": 4096, "max_position_embeddings": 2**24}
    checkpoint = Checkpoint.from_facts(qwen2_config(**absurd, quantization={"bits": 4, "group_size": 64}))
    # and nothing is made of these sizes
    assert longest_context(checkpoint, machine_with(10**12, "cpu")).tokens == 0


def test_a_gpu_holds_the_checkpoints_dtype() -> None:
    checkpoint = Checkpoint.from_facts(qwen3_config(torch_dtype="bfloat16"))
    cpu, gpu = (plan(checkpoint, max_kv_size=64, device=device) for device in ("cpu", "gpu"))
    assert (gpu.weights * 2, gpu.cache) == (cpu.weights, cpu.cache)  # 8 bits on both
    assert gpu.process == 0 < cpu.process


def test_as_if_converted() -> None:
    raw = qwen2_config(tie_word_embeddings=False, torch_dtype="bfloat16")
    converted = Checkpoint.from_facts(raw).quantized(4, 64)
    assert converted == Checkpoint.from_facts(raw | {"quantization": {"bits": 4, "group_size": 64}})
    with pytest.raises(ModelError, match="quantized already"):
        converted.quantized(8, 64)
    with pytest.raises(ModelError, match="bits is 7"):
        Checkpoint.from_facts(raw).quantized(7, 64)
    odd = Checkpoint.from_facts(raw | {"intermediate_size": 96}).quantized(4, 64)
    assert odd.config.quantization_of("model.layers.0.mlp.down_proj") is None
    assert odd.config.quantization_of("model.layers.0.mlp.up_proj") == converted.config.quantization


@pytest.mark.parametrize(
    ("settings", "tokens", "message"),
    [
        (Settings(cache=CacheOptions(kv_group_size=48)), 10, "48 does not divide"),
        (Settings(prefill_step_size=0), 10, "prefill_step_size is 0"),
        (Settings(), 0, "max_kv_size is 0"),
    ],
)
def test_what_cannot_be_planned(settings: Settings, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(Checkpoint.from_facts(qwen2_config()), max_kv_size=tokens, settings=settings)


POOLED = [kind for kind in KINDS if kind != "llama4"]


@pytest.mark.parametrize("kind", POOLED)
def test_it_is_what_a_pool_reserves(kind: str, tmp_path: Path) -> None:
    model, _ = load_kind(kind, tmp_path / "model")
    checkpoint, known = read_folder(tmp_path / "model"), split_pairs(model) or None
    cases = [(8, 3, 8, 512), (200, 2, 0, 32), (1000, 8, 4, 64)]
    for tokens, n, bits, step in count(cases[1:], cases):
        options = {"options": CacheOptions(bits), "max_seq_len": tokens, "prefill_step_size": step}
        rows = -(-tokens // 128) * 128
        whole, more, half = (
            model.make_pool(size, sequences=sequences, **options).nbytes
            for size, sequences in ((n * rows, n), ((n + 1) * rows, n + 1), (n * rows // 2, n))
        )
        settings = Settings(CacheOptions(bits), step, n)
        for given, reserved in ((settings, whole), (replace(settings, pool_tokens=n * rows // 2), half)):
            made = plan(checkpoint, max_kv_size=tokens, settings=given, device="cpu", split_pairs=known)
            assert made.cache + made.state == reserved
            assert made.sequence == more - whole or given is not settings


def test_the_caches_beside_a_pool_are_counted(pocket: tuple[Decoder, Any], pocket_folder: Path) -> None:
    checkpoint = Checkpoint.from_folder(pocket_folder)
    settings = Settings(sequences=2, cache=CacheOptions(bias_split=False))
    alone, more = (
        plan(checkpoint, max_kv_size=300, settings=replace(settings, caches=caches), device="cpu")
        for caches in (0, 2)
    )
    assert more.arrays - alone.arrays == more.caches == 2 * pocket[0].make_cache(300, bias_split=False).nbytes
    machine = replace(this_machine(), device="cpu", limit_bytes=alone.total)
    assert plan_that_fits(checkpoint, settings, 300, machine).total == alone.total
    with pytest.raises(
        ContextError, match=r"2 sequences of 300 tokens need .*caches for --prompt-cache-file"
    ):
        plan_that_fits(checkpoint, replace(settings, caches=2), 300, machine)


def test_the_command(pocket: tuple[Decoder, Any]) -> None:
    flags = ["plan", "--device", "cpu", "--max-kv-size", "1000", "--sequences", "8", "--no-kv-bias-split"]
    record = json.loads(call(*flags, "--json").stdout)
    pool, more = (
        pocket[0]
        .make_pool(n * 1024, sequences=n, max_seq_len=1000, options=CacheOptions(bias_split=False))
        .nbytes
        for n in (8, 9)
    )
    assert (record["sequences"], record["bytes"]["cache"]) == (8, pool)
    assert record["bytes"]["sequence"] == more - pool
    words = " ".join(call(*flags).stdout.split())
    assert f"cache {pool:,} " in words
    assert "8 sequences of 1000 tokens at 8 bits in groups of 32; one more would add 1.11 MB" in words
    assert "longest context that fits, each of 8 sequences:" in words
    assert call(*flags, "--sequences", "0").returncode == 2
