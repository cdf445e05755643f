"""A process of its own that plans, loads a model folder, fills its context and says what MLX counted. Run with JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.engine.run import Run
from kvant.models import load_decoder
from kvant.tools.plan import Checkpoint, Settings, plan, split_pairs
from kvant.tools.plan.plan import as_record

DECODED = 4  # tokens
CORES = 2  # dequantized parts are made side by side, one on each core: their number is a part of the case


def main() -> None:
    """Read the settings, plan, run, print both."""
    run = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        if run["streams"] > CORES:
            os.sched_getaffinity = lambda pid: set(range(run["streams"]))
    checkpoint = Checkpoint.from_folder(Path(run["folder"]))

    def planned(**known: Any) -> dict[str, int]:
        settings = Settings(kv_bits=run["bits"], kv_group_size=run["group"], prefill_step_size=run["step"])
        return as_record(plan(checkpoint, max_kv_size=run["tokens"], settings=settings, device="cpu", **known))

    record = {"plan": planned()}
    mx.reset_peak_memory()
    model = load_decoder(Path(run["folder"]))
    cache = model.make_cache(run["tokens"], quant_bit=run["bits"], quant_group=run["group"])
    prompt = [7 * i % model.config.vocab_size for i in range(run["tokens"] - DECODED + 1)]
    generated = list(Run(model, prompt, cache, prefill_step_size=run["step"], max_tokens=DECODED))
    mx.synchronize()
    assert len(generated) == DECODED
    assert cache[0].offset == run["tokens"]
    record["measured"] = {
        "peak": mx.get_peak_memory(),
        "weights": model.nbytes,
        "cache": sum(layer.nbytes for layer in cache),
    }
    record["plan_when_loaded"] = planned(split_pairs=split_pairs(model))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
