"""Plans, loads a model folder, fills its context and says what MLX counted, each run in a process of its own.

A line of JSON in is a run, and a line out what it found, or null. This process imports MLX and gives it no
work: it may fork. With ``sequences`` a run fills a pool: the last steps have all of them at their full
    length.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import kvant  # isort: skip  # noqa: F401, before MLX: it loads a faster BLAS
import mlx.core as mx
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401, of mlx-lm: a second, once for all runs

from kvant.cache import CacheOptions
from kvant.cache.pages import PAGE_SIZE
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.load import Weights, load_model
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder, LanguageModel
from kvant.plan import Checkpoint, Settings, plan, read_folder, split_pairs
from kvant.plan.memory import page_rows
from kvant.sample_utils import make_sampler

DECODED = 4  # tokens
CORES = 2  # dequantized parts are made side by side, one on each core: their number is a part of the case


def _fill_cache(model: LanguageModel, tokens: int, settings: Settings) -> int:
    cache = model.reserve_cache(tokens, settings.cache)
    prompt = [7 * i % model.config.vocab_size for i in range(tokens - DECODED + 1)]
    scheduler = CacheScheduler(model, cache, prefill_step_size=settings.prefill_step_size)
    assert len(list(scheduler.answer([Request(prompt, DECODED, keep_logprobs=True)]))) == DECODED
    assert cache[0].offset == tokens
    return cache.nbytes


def _fill_pool(model: LanguageModel, tokens: int, settings: Settings, count: int) -> int:
    """Bytes of the pool. Sequence i is fed while those before it run, and all are full in the end."""
    step = settings.prefill_step_size
    options = {"sequences": count, "max_seq_len": tokens, "prefill_step_size": step}
    pool = model.make_pool(count * page_rows(tokens), **options, options=settings.cache)
    scheduler = Scheduler(model, pool, max_batch=count)
    waits = -(-tokens // min(step, PAGE_SIZE)) + 1  # steps that a prompt takes, at most
    for i in range(count):
        answer = DECODED + (count - 1 - i) * waits
        prompt = [(7 * j + i) % model.config.vocab_size for j in range(tokens + 1 - answer)]
        scheduler.submit(Request(prompt, answer, make_sampler(temp=1, seed=i)))
    most = 0
    while not scheduler.idle:
        scheduler.step()
        most = max(most, scheduler.counts.running)
    assert most == count
    return pool.nbytes


def measure(
    folder: Path, tokens: int, streams: int, options: dict[str, Any], weights: Weights
) -> dict[str, Any]:
    """The plans from the files and from the loaded model, and what MLX counted: bytes of arrays, weights
    and cache.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        if streams > CORES:
            os.sched_getaffinity = lambda pid: set(range(streams))
    checkpoint = read_folder(folder)
    if weights == "float32":
        assert isinstance(checkpoint, Checkpoint)
        checkpoint = checkpoint.unpack()
    settings = Settings(**options | {"cache": CacheOptions(**options["cache"])})

    def planned(**known: Any) -> list[int]:
        made = plan(checkpoint, max_kv_size=tokens, settings=settings, device="cpu", **known)
        return [made.arrays, made.weights, made.cache]

    guessed = planned()
    mx.reset_peak_memory()
    model = load_model(folder, weights=weights)
    count = settings.sequences
    cache = (
        _fill_cache(model, tokens, settings) if count is None else _fill_pool(model, tokens, settings, count)
    )
    mx.synchronize()
    peak = mx.get_peak_memory()
    known = planned(split_pairs=split_pairs(model)) if isinstance(model, Decoder) else guessed
    return {"guessed": guessed, "known": known, "measured": [peak, model.nbytes, cache]}


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                folder, *run = json.loads(line)
                print(json.dumps(measure(Path(folder), *run)), flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            print("null", flush=True)


if __name__ == "__main__":
    main()
