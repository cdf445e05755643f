"""Mutated GGUF files: each is imported or refused in one line, in time and memory like the file's, and leaves
nothing.

The mutations are those of scripts/fuzz.py, where each file has a process of its own.
"""

import random
import shutil
import time
import tracemalloc
from pathlib import Path

import fuzz
import mlx.core as mx
import pytest
from support.checkpoints import llama_config
from support.counts import count
from support.gguf_files import export, random_weights

from kvant.errors import KvantError

FILES = count(200, 2000)
BATCH = 50
SECONDS = 10.0  # of the processor, for a file of 130 kB; the slowest takes 0.3
BYTES = 90_000_000  # at once; to ask the tokenizer's process takes 67 million
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 704, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
CONFIG = llama_config(**SIZES, **HEADS, attention_bias=False, mlp_bias=False)
KINDS = ("Q4_1", "Q8_0", "MXFP4", "F16")


@pytest.fixture(scope="module", params=["smollm2", "llama2-legacy"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("good")
    config = {**CONFIG, "vocab_size": 1024}
    content = export(config, random_weights(config), lambda name, values: KINDS[len(name) % 4], request.param)
    return content.write(place / "file.gguf").read_bytes()


@pytest.mark.parametrize("batch", range(FILES // BATCH // 2))
def test_mutated_files(tmp_path: Path, data: bytes, batch: int) -> None:
    outcomes = [_outcome(tmp_path / "model", data, batch * BATCH + number) for number in range(BATCH)]
    assert outcomes.count("refused") > BATCH // 4


def _outcome(folder: Path, data: bytes, seed: int) -> str:
    mutated, how = fuzz.mutate_gguf(data, random.Random(seed))
    folder.mkdir()
    (folder / "model.gguf").write_bytes(mutated)
    mx.clear_cache()
    mx.reset_peak_memory()
    resting, started = mx.get_active_memory(), time.process_time()
    tracemalloc.start()
    said = None
    try:
        fuzz.use_gguf(folder)
    except KvantError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {how}") from error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        shutil.rmtree(folder)
    assert time.process_time() - started < SECONDS, f"seed {seed}: {how}"
    assert peak + mx.get_peak_memory() - resting < BYTES, f"seed {seed}: {how}: {peak}"
    assert said is None or said.isprintable()
    return "imported" if said is None else "refused"
