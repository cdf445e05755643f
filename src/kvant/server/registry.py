"""Load and unload the models that a server offers, so that the loaded ones fit in memory.

Everything runs in the event loop's thread, except loading and unloading themselves.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any
from weakref import ref

import mlx.core as mx

from kvant.cache.disk import DiskCache
from kvant.engine.drafts import DraftCounts
from kvant.engine.scheduler import Counts
from kvant.errors import GrammarError, one_line
from kvant.machine import bound_memory, free_memory
from kvant.server.errors import ApiError, described, logger
from kvant.server.metrics import Metrics
from kvant.server.served_model import ServedModel
from kvant.server.service import Service
from kvant.server.settings import Settings
from kvant.server.snapshot import Snapshot, add_drafts
from kvant.server.turn_queue import TurnQueue
from kvant.sizes import format_bytes

RETRY_S = 5  # Retry-After if there is no room for a model
models_logger = logging.getLogger("kvant.server.models")  # a line each time a model is loaded or unloaded
FLUSH_S = 5.0  # how long unloading waits until the disk cache is written
STOP_S = 5.0  # how long `kvant stop` waits for a model to unload, less than its own timeout


def ending() -> ApiError:
    """Return the error for requests while the server shuts down."""
    message = "the server is shutting down and accepts no further requests"
    return ApiError(message, status=503, headers={"retry-after": "5", "connection": "close"})


class Registry:
    """The models of a server, and the state that they share."""

    def __init__(
        self, settings: Settings, models: Sequence[ServedModel], memory_bytes: float = math.inf
    ) -> None:
        """Offer models, none of which is loaded yet.

        Args:
            settings: the server's; each service has settings of its model.
            models: the first one answers requests that name no model.
            memory_bytes: the maximum total of the loaded models' planned bytes.
        """
        self.settings = settings
        self.models = tuple(models)
        self.memory_bytes = memory_bytes
        self.reading = TurnQueue("kvant-body")  # decodes large bodies, one at a time
        self.draining = False  # whether new requests are refused
        self.active = 0  # requests being answered, after their bodies were read
        self.started = time.time()
        self.metrics = Metrics(self.snapshot)
        self._drafts = DraftCounts()  # of unloaded models
        self._disk: DiskCache | None = None  # of all models; its counters stay while none is loaded
        self._lock = asyncio.Lock()  # must be held to load or unload a model
        self._tasks: set[asyncio.Task[None]] = set()  # that unload; asyncio keeps only weak references

    @property
    def loaded(self) -> list[Service]:
        """Return the services of the loaded models."""
        return [model.service for model in self.models if model.service is not None]

    @property
    def alive(self) -> bool:
        """Return whether every loaded model answers requests."""
        return all(service.alive for service in self.loaded)

    @property
    def context(self) -> int:
        """Return the longest context of all models, a limit before a body's model is known."""
        return max(model.context for model in self.models)

    def snapshot(self) -> Snapshot:
        """Return the current state of all loaded models; safe in any thread."""
        services = self.loaded
        counts = [Counts(0, 0, 0, 0), *(each.counts for each in services)]
        return Snapshot(
            counts=Counts(*map(sum, zip(*counts, strict=True))),
            is_alive=all(each.engine.alive for each in services),
            age_s=max((each.engine.age for each in services), default=0.0),
            drafts=add_drafts(self._drafts, *(each.engine.drafts for each in services)),
            pages=sum(each.pool.num_pages for each in services),
            pool_bytes=sum(each.pool.nbytes for each in services),
            disk=None if self._disk is None else self._disk.counts,
            active_bytes=mx.get_active_memory(),
            cached_bytes=mx.get_cache_memory(),
            peak_bytes=mx.get_peak_memory(),
            models={model.name: model.service is not None for model in self.models},
        )

    def find(self, name: str | None) -> ServedModel:
        """Return the model with this name; None: the first one.

        Raises:
            ApiError: 404, no model has the name.
        """
        if name is None:
            return self.models[0]
        # Names of all models have priority over patterns.
        for model in self.models:
            if name in model.names or name in model.aliases:
                return model
        for model in self.models:
            if model.matches(name):
                return model
        names = [known for model in self.models for known in (*model.names, *model.aliases, *model.patterns)]
        message = f"the model {name[:200]!r} is not served; expected {' or '.join(map(repr, names))}"
        advice = "start kvant serve with --alias NAME to accept another name"
        raise ApiError(f"{message}; {advice}", status=404, param="model", code="model_not_found")

    def load_now(self, model: ServedModel) -> None:
        """Load a model before the event loop runs; raise the loader's errors."""
        self._bound_memory(model)
        service = model.load(self.metrics)
        # This stops all threads, half a second for a large vocabulary. So a model that is loaded while others
        # answer is only prepared for the first request that asks for a format.
        with suppress(GrammarError):  # reported when a request has a format
            service.grammars.prepare()
        self._has_loaded(model, service)

    def start(self) -> None:
        """Start the keep-alive timers of models from :meth:`load_now`; call this in the event loop."""
        for model in self.models:
            self._schedule(model)

    async def acquire(self, model: ServedModel, leases: ExitStack) -> Service:
        """Return a model's service, loading it if needed. It stays loaded until ``leases`` is closed.

        Requests for a loaded model never wait here.

        Raises:
            ApiError: 503, there is no room for the model now, or loading fails; 429, too many requests are
                waiting for models.
        """
        if model.service is None:
            self._check_can_load(model)
        model.users += 1
        leases.callback(self._release, model)
        model.cancel_timer()
        while (service := model.service) is None:
            if model.loading is None:
                model.loading = asyncio.get_running_loop().create_task(self._load(model))
                model.loading.add_done_callback(_retrieve)
            try:
                await asyncio.shield(model.loading)
            except asyncio.CancelledError:
                if self.draining:
                    raise ending() from None
                raise
        return service

    async def unload(self, model: ServedModel) -> bool:
        """Unload a loaded or loading model as soon as its requests and other loads have ended.

        Return whether it is unloaded now, after ``STOP_S`` seconds at most.
        """
        model.is_stopping = model.service is not None or model.loading is not None
        await asyncio.wait([self._begin_unloading(model)], timeout=STOP_S)
        return not model.is_stopping

    def drain(self) -> None:
        """Refuse new requests and those waiting for a model, because loading may take minutes."""
        self.draining = True
        for model in self.models:
            if model.loading is not None:
                model.loading.cancel()  # the thread finishes loading, and the result is dropped

    def close(self, timeout: float | None = 10.0) -> None:
        """End all services and their requests."""
        self.draining = True
        for service in self.loaded:
            service.close(timeout)
        if self._disk is not None:
            self._disk.close()

    def describe(self, model: ServedModel) -> dict[str, Any]:
        """Return a model's state as JSON."""
        service = model.service
        state = "loaded" if service is not None else "not loaded"
        if service is not None and not service.alive:
            state = "failed"
        elif model.loading is not None:
            state = "loading"
        is_idle = service is not None and not model.users
        return {
            "name": model.name,
            "names": [*model.names, *model.aliases, *model.patterns],
            "state": state,
            "context": model.context,
            "planned_bytes": model.planned_bytes,
            "requests": model.users,
            "idle_s": round(time.monotonic() - model.idle_since, 1) if is_idle else None,
        }

    def _check_can_load(self, model: ServedModel) -> None:
        waiting = sum(each.users for each in self.models if each.service is None)
        if waiting >= self.settings.max_queue:
            headers = {"Retry-After": str(RETRY_S)}
            raise ApiError(
                f"{waiting} requests are waiting for models to load, the maximum; try again later",
                status=429,
                code="rate_limit_exceeded",
                headers=headers,
            )
        if model.failure is not None:
            failed_at, message = model.failure
            if time.monotonic() - failed_at < self.settings.limits.stay_s:
                raise self._unavailable(message)

    async def _load(self, model: ServedModel) -> None:
        """Load a model after earlier loads, when there is room."""
        try:
            async with self._lock:
                await self._make_room(model)
                if not model.users:  # all clients have disconnected
                    return
                self._bound_memory(model)
                models_logger.info("loading %s", model.name)
                service = await self._try_loading(model)
                if service is None:
                    await asyncio.to_thread(free_memory)
                    self._bound_memory()
                    message = f"the model {model.name!r} could not be loaded; see the server's log"
                    model.failure = time.monotonic(), message
                    raise self._unavailable(message)
                self._has_loaded(model, service)
                self._schedule(model)
                models_logger.info("loaded %s, %s", model.name, format_bytes(model.planned_bytes))
        finally:
            model.loading = None
            if model.service is None:
                model.is_stopping = False

    async def _try_loading(self, model: ServedModel) -> Service | None:
        """Load a model in a thread; None if it fails, with the error, which references data, released."""
        try:
            return await asyncio.to_thread(model.load, self.metrics)
        except Exception as error:
            logger.error("%s could not be loaded: %s: %s", model.name, described(error), one_line(error))
            return None

    def _has_loaded(self, model: ServedModel, service: Service) -> None:
        model.service = service
        model.context = service.max_seq_len
        model.planned = service.planned or model.planned
        if service.pool.disk is not None:
            self._disk = service.pool.disk.disk
        self._bound_memory()
        model.loaded_at = time.monotonic()
        model.failure = None
        self.metrics.loaded(model.name)

    async def _make_room(self, new: ServedModel) -> None:
        """Unload idle models, the least recently used first, until the new one fits.

        This stops if no request waits for the new model any more. Models stay loaded for at least
        ``limits.stay_s`` seconds, so that clients that alternate between models cannot keep the server
        loading.
        """
        while new.users and (missing := self._planned_bytes(new) - self.memory_bytes) > 0:
            idle = [model for model in self.models if model.service is not None and not model.users]
            if sum(model.planned_bytes for model in idle) < missing:
                raise self._unavailable(self._no_room(new))
            oldest = min(idle, key=lambda model: model.idle_since)
            stays_s = oldest.loaded_at + self.settings.limits.stay_s - time.monotonic()
            if stays_s > 0:
                await asyncio.sleep(stays_s)
            else:
                await self._unload(oldest)

    def _planned_bytes(self, new: ServedModel | None = None) -> int:
        """Return the planned bytes of the loaded models and of a new one."""
        return sum(model.planned_bytes for model in self._in_memory(new))

    def _in_memory(self, new: ServedModel | None) -> list[ServedModel]:
        """Return the loaded models and a new one."""
        return [model for model in self.models if model.service is not None or model is new]

    def _no_room(self, new: ServedModel) -> str:
        busy = [model for model in self.models if model.service is not None and model.users]
        free = max(0, self.memory_bytes - self._planned_bytes())
        users = " and ".join(f"{model.name!r} has requests ({model.users})" for model in busy)
        return (
            f"the model {new.name!r} needs {format_bytes(new.planned_bytes)} and "
            f"{format_bytes(int(free))} are free; {users} and cannot be unloaded; try again later"
        )

    def _unavailable(self, message: str) -> ApiError:
        headers = {"Retry-After": str(RETRY_S)}
        return ApiError(message, status=503, code="model_not_loaded", headers=headers)

    def _release(self, model: ServedModel) -> None:
        model.users -= 1
        model.used_at = time.monotonic()
        self._schedule(model)

    def _schedule(self, model: ServedModel) -> None:
        """Unload an idle model after ``keep_alive`` seconds without a request."""
        if model.service is None or model.users:
            return
        delay = 0.0 if model.is_stopping else self.settings.keep_alive_s
        if delay < math.inf:
            model.cancel_timer()
            model.timer = asyncio.get_running_loop().call_later(delay, self._expire, model)

    def _expire(self, model: ServedModel) -> None:
        model.timer = None
        self._begin_unloading(model)

    def _begin_unloading(self, model: ServedModel) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(self._unload_idle(model))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _unload_idle(self, model: ServedModel) -> None:
        """Unload a model unless a request arrived for it meanwhile."""
        async with self._lock:
            idle_s = time.monotonic() - model.idle_since
            if model.service is None or model.users:
                return
            if model.is_stopping or idle_s >= self.settings.keep_alive_s:
                await self._unload(model)

    async def _unload(self, model: ServedModel) -> None:
        """End a model's service and free its memory. The caller must hold the lock."""
        assert model.service is not None
        self._drafts = add_drafts(self._drafts, model.service.engine.drafts)
        services = [model.service]
        model.service = None  # from now on, requests load it again
        model.is_stopping = False
        model.cancel_timer()
        await asyncio.to_thread(_end, services)
        self._bound_memory()
        models_logger.info("unloaded %s", model.name)

    def _bound_memory(self, new: ServedModel | None = None) -> None:
        """Limit MLX's memory to the plans of the loaded models and of a new one."""
        models = self._in_memory(new)
        if arrays := sum(model.planned.get("arrays", 0) for model in models):
            bound_memory(arrays, sum(model.planned["scratch"] for model in models if model.planned))


def _end(services: list[Service]) -> None:
    """End the service in a list, which holds the only reference to it, and free its memory."""
    service = services.pop()
    model = ref(service.model)
    service.close()
    service.tokenizer.close()
    if service.pool.disk is not None:
        service.pool.disk.disk.flush(FLUSH_S)
    del service
    free_memory(collect=model() is not None)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Retrieve a task's error, so that asyncio does not log it if all clients have disconnected."""
    if not task.cancelled():
        task.exception()
