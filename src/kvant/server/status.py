"""The routes that report a server's health, models, properties and metrics."""

import math
import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvant.cache.layer_format import describe_formats
from kvant.machine import environment
from kvant.server.metrics import CONTENT_TYPE
from kvant.server.registry import Registry
from kvant.server.served_model import ServedModel
from kvant.server.service import Service


async def health(request: Request) -> Response:
    """Return 200 while requests are answered; 503 if an engine has failed or the server is shutting down."""
    registry: Registry = request.app.state.registry
    status = "failed" if not registry.alive else "ending" if registry.draining else "ok"
    counts = registry.snapshot().counts
    record = {
        "status": status,
        "waiting": counts.waiting,
        "running": counts.running + counts.prefilling,
        "loaded": [model.name for model in registry.models if model.service is not None],
    }
    return JSONResponse(record, 200 if status == "ok" else 503)


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    registry: Registry = request.app.state.registry
    return Response(registry.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    """Return every model and its aliases, with the fields that OpenAI's and Anthropic's clients read.

    Patterns have a separate list, because clients cannot choose them as names.
    """
    registry: Registry = request.app.state.registry
    entries = [
        _entry(registry, model, name)
        for model in registry.models
        for name in dict.fromkeys([model.name, *model.aliases])
    ]
    return JSONResponse(
        {
            "object": "list",
            "data": entries,
            "has_more": False,
            "first_id": entries[0]["id"],
            "last_id": entries[-1]["id"],
            "alias_patterns": [pattern for model in registry.models for pattern in model.patterns],
        }
    )


async def model(request: Request) -> Response:
    """Return the entry of the model with this name, alias, or matching pattern."""
    registry: Registry = request.app.state.registry
    name = request.path_params["name"]
    return JSONResponse(_entry(registry, registry.find(name), name))


def _entry(registry: Registry, model: ServedModel, name: str) -> dict[str, Any]:
    created = int(registry.started)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvant",
        "max_model_len": model.context,
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        "root": model.name,  # the model behind an alias
        "loaded": model.service is not None,
    }


async def props(request: Request) -> Response:
    """Return the properties of a model, ``?model=NAME``; default: the first one.

    If the model is not loaded, only the properties of the server are returned.
    """
    registry: Registry = request.app.state.registry
    settings = registry.settings
    model = registry.find(request.query_params.get("model"))
    now = registry.snapshot()
    return JSONResponse(
        {
            **({} if model.service is None else _loaded_props(model, model.service)),
            "memory": {
                "planned": {} if model.service is None else model.service.planned,
                "active": now.active_bytes,
                "kept_for_reuse": now.cached_bytes,
                "peak": now.peak_bytes,
            },
            "models": [registry.describe(each) for each in registry.models],
            "keep_alive_s": None if settings.keep_alive_s == math.inf else settings.keep_alive_s,
            "limits": asdict(settings.limits),
            "key_required": bool(settings.api_keys),
            "environment": asdict(environment()),
        }
    )


def _loaded_props(model: ServedModel, service: Service) -> dict[str, Any]:
    settings = service.settings
    pool = service.pool
    drafts = service.engine.drafts
    groups = sorted({layer.format.kv_group_size for layer in pool.layers} - {0})
    return {
        "model": {
            "names": [*model.names, *model.aliases, *model.patterns],
            "type": service.model.config.model_type,
            "vocab_size": service.model.config.vocab_size,
            "context": service.model.config.max_position_embeddings,
            "weight_bytes": service.model.nbytes,
            "dtype": str(service.model.dtype).removeprefix("mlx.core."),
        },
        "pool": {
            "sequences": pool.max_sequences,
            "tokens_of_a_sequence": service.max_seq_len,
            "checkpoints": pool.checkpoints,
            "pages": pool.num_pages,
            "page_tokens": pool.page_size,
            "bytes": pool.nbytes,
            "format": describe_formats(pool.formats),
            "kv_bits": settings.cache.kv_bits,
            "kv_group_sizes": groups,
            "kv_bias_split": any(layer.format.split_pairs is not None for layer in pool.layers),
            "kernels": "unfused" if pool.backend is None else "fused",
        },
        "engine": {
            "prefill_step_size": settings.prefill_step_size,
            "deterministic": settings.deterministic,
            "max_queue": settings.max_queue,
            "draft": settings.draft,
            "drafted_tokens": drafts.drafted,
            "accepted_tokens": drafts.accepted,
        },
        "sampling": service.sampling,
    }
