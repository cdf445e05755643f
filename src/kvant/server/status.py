"""What a server says of itself: its health, its models, what is in force, and its counters."""

import time
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvant.cache.layer_format import describe_formats
from kvant.machine import environment
from kvant.server.metrics import CONTENT_TYPE
from kvant.server.service import Service


async def health(request: Request) -> Response:
    """200 while requests are answered; 503 where the engine has failed or the server is ending."""
    service: Service = request.app.state.service
    status = "failed" if not service.alive else "ending" if service.draining else "ok"
    counts = service.snapshot().counts
    said = {"status": status, "waiting": counts.waiting, "running": counts.running + counts.prefilling}
    return JSONResponse(said, 200 if status == "ok" else 503)


async def metrics(request: Request) -> Response:
    """Prometheus's text."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    """The served model by its name and its aliases, with the fields that OpenAI's and Anthropic's clients
    read.

    An alias that is a pattern is no name that a client could choose, so patterns have a list of their own.
    """
    service: Service = request.app.state.service
    aliases = service.settings.aliases
    patterns = [alias for alias in aliases if {"*", "?", "["} & {*alias}]
    names = dict.fromkeys([service.names[0], *(alias for alias in aliases if alias not in patterns)])
    found = [_model(service, name) for name in names]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
    listed = {"object": "list", "data": found, "has_more": False, **ends, "alias_patterns": patterns}
    return JSONResponse(listed)


async def model(request: Request) -> Response:
    """The same by any of its names."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    created = int(service.started)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvant",
        "max_model_len": service.max_seq_len,
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
    }


async def props(request: Request) -> Response:
    """What is in force."""
    service: Service = request.app.state.service
    settings = service.settings
    pool = service.pool
    now = service.snapshot()
    groups = sorted({layer.format.kv_group_size for layer in pool.layers} - {0})
    return JSONResponse(
        {
            "model": {
                "names": service.names,
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
                "drafted_tokens": now.drafts.drafted,
                "accepted_tokens": now.drafts.accepted,
            },
            "sampling": service.sampling,
            "memory": {
                "planned": service.planned,
                "active": now.active_bytes,
                "kept_for_reuse": now.cached_bytes,
                "peak": now.peak_bytes,
            },
            "limits": asdict(settings.limits),
            "key_required": bool(settings.api_keys),
            "environment": asdict(environment()),
        }
    )
