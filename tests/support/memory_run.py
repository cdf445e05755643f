"""Plans, loads a model folder, fills its context and says what MLX counted, each run in a process of its own.

A line of JSON in is a run, and a line out what it found, or null. This process imports MLX and gives it no work: it may
fork. With ``sequences`` a run fills a pool: the last steps have all of them at their full length.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import kvant  # isort: skip  # noqa: F401, before MLX: it loads a faster BLAS
import mlx.core as mx

from kvant.cache.pages import PAGE_SIZE
from kvant.engine.request import Request
from kvant.engine.run import Run
from kvant.engine.sampling import make_sampler
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder, load_decoder
from kvant.tools.plan import Checkpoint, Settings, plan, split_pairs
from kvant.tools.plan.plan import as_record, page_rows

DECODED = 4  # tokens
CORES = 2  # dequantized parts are made side by side, one on each core: their number is a part of the case


def _fill_cache(model: Decoder, run: dict[str, Any]) -> int:
    """Bytes of the cache."""
    cache = model.make_cache(run["tokens"], quant_bit=run["bits"], quant_group=run["group"])
    prompt = [7 * i % model.config.vocab_size for i in range(run["tokens"] - DECODED + 1)]
    generated = list(Run(model, prompt, cache, prefill_step_size=run["step"], max_tokens=DECODED))
    assert len(generated) == DECODED
    assert cache[0].offset == run["tokens"]
    return cache.nbytes


def _fill_pool(model: Decoder, run: dict[str, Any]) -> int:
    """Bytes of the pool. Sequence i is fed while those before it run, and all are full in the end."""
    count, tokens = run["sequences"], run["tokens"]
    options = {"quant_bit": run["bits"], "quant_group": run["group"], "prefill_step_size": run["step"]}
    pool = model.make_pool(count * page_rows(tokens), sequences=count, max_seq_len=tokens, **options)
    scheduler = Scheduler(model, pool, max_batch=count)
    waits = -(-tokens // min(run["step"], PAGE_SIZE)) + 1  # steps that a prompt takes, at most
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


def measure(run: dict[str, Any]) -> None:
    """Plan, run, print both."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        if run["streams"] > CORES:
            os.sched_getaffinity = lambda pid: set(range(run["streams"]))
    checkpoint = Checkpoint.from_folder(Path(run["folder"]))

    def planned(**known: Any) -> dict[str, int]:
        formats = {"kv_bits": run["bits"], "kv_group_size": run["group"], "prefill_step_size": run["step"]}
        settings = Settings(**formats, sequences=run["sequences"])
        return as_record(plan(checkpoint, max_kv_size=run["tokens"], settings=settings, device="cpu", **known))

    record = {"plan": planned()}
    mx.reset_peak_memory()
    model = load_decoder(Path(run["folder"]))
    cache_bytes = _fill_cache(model, run) if run["sequences"] is None else _fill_pool(model, run)
    mx.synchronize()
    record["measured"] = {"peak": mx.get_peak_memory(), "weights": model.nbytes, "cache": cache_bytes}
    record["plan_when_loaded"] = planned(split_pairs=split_pairs(model))
    print(json.dumps(record), flush=True)


def main() -> None:
    """A child for each run."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                measure(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            print("null", flush=True)


if __name__ == "__main__":
    main()
