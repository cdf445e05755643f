"""The server's metrics, in Prometheus's text format."""

import time
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvant import __version__
from kvant.engine.batch_engine import Deliver
from kvant.engine.request import Request, Token
from kvant.server.errors import logger
from kvant.server.left_out import LeftOut
from kvant.server.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_IGNORED = 64  # distinct field names: clients choose them
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics(Collector):
    """The counters of one server and a snapshot of its state, in a registry of their own."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        """``snapshot`` returns the current state."""
        # Without this, each has a second line: when it was first counted.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry, buckets=SECONDS)
        self._requests = counter(
            "kvant_http_requests", "Requests answered, by route and status.", ["route", "status"]
        )
        self._ignored = counter(
            "kvant_ignored_fields", "Fields of requests that were left out, by name.", ["name"]
        )
        self._names: set[str] = set()  # of ignored fields
        self._answers = counter("kvant_answers", "Answers that ended, by reason.", ["reason"])
        self._prompt = counter("kvant_prompt_tokens", "Tokens of prompts.")
        self._cached = counter("kvant_cached_tokens", "Of them those that a shared prefix had.")
        self._generated = counter("kvant_generated_tokens", "Tokens generated.")
        self._loads = counter("kvant_model_loads", "Times that a model was loaded, by name.", ["model"])
        arrived = "From a request's arrival at the engine to its first token."
        self._first = histogram("kvant_time_to_first_token_seconds", arrived)
        self._between = histogram("kvant_time_between_tokens_seconds", "Between two tokens of an answer.")
        self._snapshot = snapshot
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the text of /metrics."""
        return generate_latest(self._registry)

    def loaded(self, model: str) -> None:
        """Count that a model was loaded."""
        self._loads.labels(model).inc()

    def answered(self, route: str, status: int, left_out: LeftOut) -> None:
        """Count a response and its request's ignored fields. Each name is logged once."""
        self._requests.labels(route, str(status)).inc()
        # A copy: if the client has left, a thread may still be reading its body and adding names.
        for name, said in list(left_out.names.items()):
            if name not in self._names and len(self._names) < MAX_IGNORED:
                self._names.add(name)
                logger.warning("left out of requests to %s, and said in x-kvant-ignored: %s", route, said)
            self._ignored.labels(name if name in self._names else "other").inc()

    def counting(self, request: Request, deliver: Deliver) -> Callable[[Token], object]:
        """Wrap ``deliver``, which the engine's thread calls, to count every token."""
        submitted = time.monotonic()
        last: dict[int, float] = {}

        def count(token: Token) -> object:
            now = time.monotonic()
            if token.token is not None:
                self._generated.inc()
                if not last:
                    self._prompt.inc(len(request.prompt))
                    self._cached.inc(token.cached_tokens)
                    self._first.observe(now - submitted)
                if (before := last.get(token.answer)) is not None:
                    self._between.observe(now - before)
                last[token.answer] = now
            elif token.embedding is not None and not last:
                self._prompt.inc(len(request.prompt))
                last[token.answer] = now
            if token.finish_reason is not None:
                self._answers.labels(token.finish_reason).inc()
            return deliver(token)

        return count

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the current snapshot. The registry calls this."""
        now = self._snapshot()
        version = GaugeMetricFamily("kvant_info", "1, with the version.", labels=["version"])
        version.add_metric([__version__], 1)
        yield version
        models = GaugeMetricFamily("kvant_model_loaded", "1 while the model is loaded.", labels=["model"])
        for name, is_loaded in now.models.items():
            models.add_metric([name], is_loaded)
        yield models
        gauges = [
            ("kvant_requests_waiting", "Requests that no page is reserved for yet.", now.counts.waiting),
            ("kvant_answers_prefilling", "Answers whose prompt is being fed.", now.counts.prefilling),
            ("kvant_answers_running", "Answers that get a token every step.", now.counts.running),
            ("kvant_pages", "Pages of the pool.", now.pages),
            ("kvant_pages_free", "Pages that new requests could have.", now.counts.free_pages),
            ("kvant_pool_bytes", "Bytes reserved for keys and values.", now.pool_bytes),
            ("kvant_engine_alive", "1 while the engine's thread computes or waits for work.", now.is_alive),
            ("kvant_engine_age_seconds", "Since the engine's last sign of life, 0 without work.", now.age_s),
            ("kvant_memory_active_bytes", "Bytes of MLX's arrays.", now.active_bytes),
            ("kvant_memory_cached_bytes", "Bytes that MLX keeps for reuse.", now.cached_bytes),
            ("kvant_memory_peak_bytes", "Most bytes of MLX's arrays so far.", now.peak_bytes),
        ]
        counters = [
            ("kvant_drafted_tokens", "Tokens drafted and verified.", now.drafts.drafted),
            ("kvant_accepted_tokens", "Of them those that answers have.", now.drafts.accepted),
        ]
        if (disk := now.disk) is not None:
            gauges.append(("kvant_disk_cache_bytes", "Bytes of the disk cache's files.", disk.bytes))
            counters += [
                ("kvant_disk_cache_hits", "Files of the disk cache that were read.", disk.hits),
                ("kvant_disk_cache_written", "Files of the disk cache that were written.", disk.written),
                ("kvant_disk_cache_dropped", "Times that a file was not written.", disk.dropped),
            ]
        for name, help_text, value in gauges:
            yield GaugeMetricFamily(name, help_text, value=value)
        for name, help_text, count in counters:
            yield CounterMetricFamily(name, help_text, value=count)
