"""Drafts of a server: a default, and a field of every body. The text is the same."""

from dataclasses import replace
from typing import Any

import pytest
from support.drafts import draft_by_chance
from support.server import Running, running

from kvant.engine.model_drafts import ModelDrafts
from kvant.errors import ArgumentError
from kvant.server.service import Service, make_pool

TEXT = " ".join(str(1 + i % 5) for i in range(23))
LIMITS = {"model": "pocket", "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 40, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 40},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40},
}


def _text(path: str, answer: dict[str, Any]) -> Any:
    key = {"/v1/responses": "output", "/v1/messages": "content"}.get(path, "choices")
    found = answer[key]
    for each in found:
        each.pop("id", None)
    return found


def _counts(server: Running) -> tuple[int, int]:
    engine = server.client.get("/props").json()["engine"]
    return engine["drafted_tokens"], engine["accepted_tokens"]


def test_a_field_of_every_body(server: Running) -> None:
    before = _counts(server)
    plain = {path: server.client.post(path, json=LIMITS | body).json() for path, body in BODIES.items()}
    for path, body in BODIES.items():
        server.client.post(path, json=LIMITS | body | {"draft": "none"}).raise_for_status()
    assert _counts(server) == before
    for path, body in BODIES.items():
        answer = server.client.post(path, json=LIMITS | body | {"draft": "prompt"}).json()
        assert _text(path, answer) == _text(path, plain[path])
        refused = server.client.post(path, json=LIMITS | body | {"draft": "suffix"})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert "`$.draft`" in error["message"]
        assert '"model" or "none" or "prompt"' in error["message"]


def test_the_default_of_a_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.service
    settings = replace(service.settings, draft="prompt", max_kv_size=256, sequences=1)
    draft_by_chance(monkeypatch, 1)  # whatever steps cost on this machine
    drafting = Service(settings, service.model, service.tokenizer, make_pool(settings, service.model))
    body = LIMITS | BODIES["/v1/completions"]
    with running(drafting) as found:
        answer = found.client.post("/v1/completions", json=body).json()
        drafted, accepted = _counts(found)
        assert 0 < accepted <= drafted
        assert found.client.get("/props").json()["engine"]["draft"] == "prompt"
        metrics = found.client.get("/metrics").text
        assert f"\nkvant_drafted_tokens_total {float(drafted)}\n" in metrics
        assert f"\nkvant_accepted_tokens_total {float(accepted)}\n" in metrics
        found.client.post("/v1/completions", json=body | {"draft": "none"}).raise_for_status()
        assert _counts(found) == (drafted, accepted)
    expected = server.client.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 40
    assert answer["choices"] == expected["choices"]


def test_a_deterministic_server_refuses_them(server: Running) -> None:
    service = server.service
    settings = replace(service.settings, deterministic=True, max_kv_size=256, sequences=1)
    with running(Service(settings, service.model, service.tokenizer, make_pool(settings, service.model))) as found:
        for path, body in BODIES.items():
            refused = found.client.post(path, json=LIMITS | body | {"draft": "prompt"})
            assert refused.status_code == 400
            assert "refused with deterministic" in refused.json()["error"]["message"]
            found.client.post(path, json=LIMITS | body).raise_for_status()


def test_a_draft_model(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.service
    body = LIMITS | BODIES["/v1/completions"]
    refused = server.client.post("/v1/completions", json=body | {"draft": "model"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "draft"
    assert "started without --draft-model" in refused.json()["error"]["message"]
    settings = replace(service.settings, draft="model", max_kv_size=256, sequences=2)
    pool = make_pool(settings, service.model)
    with pytest.raises(ArgumentError, match="draft is 'model'; expected it with"):
        Service(settings, service.model, service.tokenizer, pool)
    drafts = ModelDrafts(model=service.model, vocab_size=service.model.config.vocab_size).beside_pool(pool)
    draft_by_chance(monkeypatch, 1)
    with running(Service(settings, service.model, service.tokenizer, pool, drafts=drafts)) as found:
        expected = server.client.post("/v1/completions", json=body).json()
        answer = found.client.post("/v1/completions", json=body).json()
        assert answer["choices"] == expected["choices"]
        drafted, accepted = _counts(found)
        assert 0.5 * drafted < accepted <= drafted
        assert found.client.get("/props").json()["engine"]["draft"] == "model"
        for source in ("none", "prompt"):
            other = found.client.post("/v1/completions", json=body | {"draft": source}).json()
            assert other["choices"] == expected["choices"]
            assert (_counts(found) == (drafted, accepted)) == (source == "none")
    assert not drafts.drafters
