"""The statistics that `kvant generate` and `kvant chat` print, from latencies that are known."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvant.cli.statistics import RunStatistics


def test_the_percentiles_are_numpys_without_the_first_token() -> None:
    latencies = [900.0, *np.random.default_rng(0).lognormal(size=37).tolist()]
    run = RunStatistics()
    for latency_ms in latencies:
        response: Any = SimpleNamespace(
            latency_ms=latency_ms, prompt_tokens=5, prompt_tps=1.0, generation_tokens=38, generation_tps=1.0,
            finish_reason="length", peak_memory=0.001, drafts=None,
        )  # fmt: skip
        run.add(response)
    session: Any = SimpleNamespace(load_s=1.0, arranged=None, describe_cache=lambda: "small")
    median, p95 = np.percentile(latencies[1:], [50, 95])
    assert f"latency: median {median:.2f} ms, p95 {p95:.2f} ms a token" in run.lines(session)
