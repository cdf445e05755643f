"""Models whose heads 32 does not divide: without flags the groups fit; a group that does not is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.checkpoints import llama_config, reference_logits, write_reference
from support.command import call, refusal
from support.numbers import relative_error
from support.server import served

from kvant.cache import CacheOptions, QuantizedKVCache
from kvant.engine.load import POCKET, find_model
from kvant.models import load_decoder
from kvant.plan import plan, read_folder

GROUPS = {36: 4, 80: 16, 100: 4, 120: 8}  # the greatest common divisors with 32
LIMITS = {8: 0.01, 4: 0.1}  # of logits, by bits
IDS = [1 + 37 * place % 1200 for place in range(60)]


def _write(folder: Path, width: int) -> Any:
    _, reference = write_reference(
        folder,
        llama_config(vocab_size=1280, head_dim=width, attention_bias=False, max_position_embeddings=256),
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model(POCKET) / name, folder)
    return reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 80."""
    path = tmp_path_factory.mktemp("heads")
    _write(path, 80)
    return path


@pytest.mark.parametrize("width", GROUPS)
def test_the_default_computes_what_mlx_lm_does(tmp_path: Path, width: int) -> None:
    expected = reference_logits(_write(tmp_path, width), IDS)
    model = load_decoder(tmp_path)
    for bits, limit in LIMITS.items():
        caches = [model.make_cache(64, kv_bits=bits), kvant.make_prompt_cache(model, 64, kv_bits=bits)]
        for cache in caches:
            assert {own.kv_group_size for own in cache.pool.formats} == {GROUPS[width]}
            parts = [
                model(mx.array([part]), cache=cache)[0]
                for part in (IDS[:50], *([token] for token in IDS[50:]))
            ]
            assert relative_error(mx.concatenate(parts), expected) < limit
        pool = model.make_pool(1024, sequences=2, options=CacheOptions(kv_bits=bits))
        assert {own.kv_group_size for own in pool.formats} == {GROUPS[width]}
    made = plan(read_folder(tmp_path), max_kv_size=64)
    assert made.settings.cache.kv_group_size == GROUPS[width]


def test_a_layer_alone_and_mlx_lms_own_loop(tmp_path: Path) -> None:
    assert QuantizedKVCache(8, 2, 80).nbytes == QuantizedKVCache(8, 2, 80, kv_group_size=16).nbytes
    reference = _write(tmp_path, 80)
    cache = kvant.make_prompt_cache(reference, 64)
    expected = reference_logits(reference, IDS)
    assert relative_error(reference(mx.array([IDS]), cache=cache)[0], expected) < LIMITS[8]


def test_every_command_starts_without_a_flag_and_says_the_group(folder: Path, tmp_path: Path) -> None:
    model = ["--model", str(folder)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    for done in (
        call("generate", "Hello", *model, "-m", "2"),
        call("generate", "Hello", *model, "-m", "2", "--kv-bits", "4"),
        call("generate", "--prompts-file", str(prompts), *model, "-m", "2"),
        call("chat", *model, "-m", "2", stdin="Hello\n"),
    ):
        assert done.returncode == 0, done.stderr
        assert "groups of 16" in done.stderr
    assert "groups of 16" in call("plan", *model).stdout
    planned = call("plan", *model, "--json")
    assert json.loads(planned.stdout)["kv_group_size"] == 16
    drafted = call("generate", "Hello", *model, "-m", "2", "--draft-model", str(folder))
    assert "draft model" in drafted.stderr, drafted.stderr
    with served(model=str(folder), sequences=2, max_kv_size=128) as server:
        body = {"model": str(folder), "prompt": "Hello", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=body).is_success
        assert server.client.get("/props").json()["pool"]["kv_group_sizes"] == [16]


def test_reports_and_benchmarks_of_it(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One day a fox went out. " * 20)
    done = call("report", "--model", str(folder), "--text", str(text), "--json", "-q")
    assert done.returncode == 0, done.stderr
    assert {own["group"] for own in json.loads(done.stdout)["formats"]} == {16}
    small = ["--prompt-tokens", "8", "-m", "2", "--repeats", "1", "--json"]
    done = call("bench", "--model", str(folder), *small)
    assert done.returncode == 0, done.stderr
    assert "groups of 16" in done.stderr
    assert {own["engine"] for own in json.loads(done.stdout)} >= {
        "kvant full",
        "kvant 8-bit",
        "kvant 4-bit",
        "mlx-lm",
    }


@pytest.mark.parametrize(
    "command",
    ["generate Hello", "chat", "plan", "serve --port 0", "bench --engine kvant", "report --formats 8g32"],
)
def test_a_group_that_does_not_fit_names_those_that_do(folder: Path, command: str) -> None:
    group = [] if "report" in command else ["--kv-group-size", "32"]
    error = refusal(2, *command.split(), *group, "--model", str(folder))
    assert "32 does not divide the head dimension 80" in error
    assert "1, 2, 4, 5, 8, 10, 16, 20, 40, 80" in error


def test_a_benchmark_that_mlx_lm_has_no_groups_for_says_what_would_run(folder: Path) -> None:
    error = refusal(2, "bench", "--model", str(folder), "--kv-bits", "8")
    assert "32" in error
    assert "--kv-bits 0" in error
