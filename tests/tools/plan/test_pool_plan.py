"""The plan of a pool: the bytes that make_pool reserves, of every kind of layer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command import call
from support.counts import count
from support.kinds import KINDS, load_kind

from kvant.cache import CacheOptions
from kvant.cli.fitting import plan_that_fits
from kvant.errors import ContextError, ModelError
from kvant.machine import this_machine
from kvant.models import Decoder
from kvant.tools.plan import Checkpoint, Settings, plan, read_folder, split_pairs

POOLED = [kind for kind in KINDS if kind != "llama4"]


@pytest.mark.parametrize("kind", POOLED)
def test_it_is_what_a_pool_reserves(kind: str, tmp_path: Path) -> None:
    model, _ = load_kind(kind, tmp_path / "model")
    checkpoint, known = read_folder(tmp_path / "model"), split_pairs(model) or None
    cases = [(8, 3, 8, 512), (200, 2, 0, 32), (1000, 8, 4, 64)]
    for tokens, n, bits, step in count(cases[1:], cases):
        options = {"kv_bits": bits, "max_seq_len": tokens, "prefill_step_size": step}
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


def test_of_a_model_that_has_none(tmp_path: Path) -> None:
    load_kind("llama4", tmp_path / "model")
    checkpoint = read_folder(tmp_path / "model")
    with pytest.raises(ModelError, match="attends in chunks, which a pool has no pages for; one sequence at a time"):
        plan(checkpoint, max_kv_size=64, settings=Settings(sequences=2), device="cpu")
    done = call("generate", "w10", "--model", str(tmp_path / "model"), "--n", "2", "--temp", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "attends in chunks" in done.stderr


def test_the_caches_beside_a_pool_are_counted(pocket: tuple[Decoder, Any], pocket_folder: Path) -> None:
    checkpoint = Checkpoint.from_folder(pocket_folder)
    settings = Settings(sequences=2, cache=CacheOptions(bias_split=False))
    alone, more = (
        plan(checkpoint, max_kv_size=300, settings=replace(settings, caches=caches), device="cpu") for caches in (0, 2)
    )
    assert more.arrays - alone.arrays == more.caches == 2 * pocket[0].make_cache(300, bias_split=False).nbytes
    machine = replace(this_machine(), device="cpu", limit_bytes=alone.total)
    assert plan_that_fits(checkpoint, settings, 300, machine).total == alone.total
    with pytest.raises(ContextError, match=r"2 sequences of 300 tokens need .*caches for --prompt-cache-file"):
        plan_that_fits(checkpoint, replace(settings, caches=2), 300, machine)


def test_the_command(pocket: tuple[Decoder, Any]) -> None:
    flags = ["plan", "--device", "cpu", "--max-kv-size", "1000", "--sequences", "8", "--no-kv-bias-split"]
    record = json.loads(call(*flags, "--json").stdout)
    pool, more = (pocket[0].make_pool(n * 1024, sequences=n, max_seq_len=1000, bias_split=False).nbytes for n in (8, 9))
    assert (record["sequences"], record["bytes"]["cache"]) == (8, pool)
    assert record["bytes"]["sequence"] == more - pool
    words = " ".join(call(*flags).stdout.split())
    assert f"cache {pool:,} " in words
    assert "8 sequences of 1000 tokens at 8 bits; one more would add 1.11 MB" in words
    assert "longest context that fits, each of 8 sequences:" in words
    assert call(*flags, "--sequences", "0").returncode == 2
