"""Drafts of a server: a default, and a field of every body. The text is the same."""

from dataclasses import replace
from typing import Any

import pytest
from support.drafts import draft_by_chance
from support.interfaces import COMPLETIONS, INTERFACES, Interface, text_of
from support.server import Running, running

from kvant.engine.model_drafts import ModelDrafts
from kvant.errors import ArgumentError
from kvant.server.service import Service, make_pool

TEXT = " ".join(str(1 + i % 5) for i in range(23))
ASKED: Any = (TEXT, 40)


def _counts(server: Running) -> tuple[int, int]:
    engine = server.client.get("/props").json()["engine"]
    return engine["drafted_tokens"], engine["accepted_tokens"]


@pytest.mark.parametrize("to", INTERFACES, ids=str)
def test_a_field_of_every_body(server: Running, to: Interface) -> None:
    before = _counts(server)
    plain = text_of(to.ask(server, *ASKED))
    to.ask(server, *ASKED, draft="none")
    assert _counts(server) == before
    assert text_of(to.ask(server, *ASKED, draft="prompt")) == plain


def test_the_default_of_a_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.service
    settings = replace(service.settings, draft="prompt", max_kv_size=256, sequences=1)
    draft_by_chance(monkeypatch, 1)  # whatever steps cost on this machine
    drafting = Service(settings, service.model, service.tokenizer, make_pool(settings, service.model))
    with running(drafting) as found:
        answer = COMPLETIONS.ask(found, *ASKED, ignore_eos=True)
        drafted, accepted = _counts(found)
        assert 0 < accepted <= drafted
        assert found.client.get("/props").json()["engine"]["draft"] == "prompt"
        metrics = found.client.get("/metrics").text
        assert f"\nkvant_drafted_tokens_total {float(drafted)}\n" in metrics
        assert f"\nkvant_accepted_tokens_total {float(accepted)}\n" in metrics
        COMPLETIONS.ask(found, *ASKED, draft="none")
        assert _counts(found) == (drafted, accepted)
    expected = COMPLETIONS.ask(server, *ASKED, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 40
    assert answer["choices"] == expected["choices"]


def test_a_deterministic_server_refuses_them(server: Running) -> None:
    service = server.service
    settings = replace(service.settings, deterministic=True, max_kv_size=256, sequences=1)
    with running(Service(settings, service.model, service.tokenizer, make_pool(settings, service.model))) as found:
        for to in INTERFACES:
            refused = to.post(found, *ASKED, draft="prompt")
            assert refused.status_code == 400
            assert "refused with deterministic" in refused.json()["error"]["message"]
            to.ask(found, TEXT, 1)


def test_a_draft_model(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.service
    refused = COMPLETIONS.post(server, *ASKED, draft="model")
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
        expected = COMPLETIONS.ask(server, *ASKED)
        answer = COMPLETIONS.ask(found, *ASKED)
        assert answer["choices"] == expected["choices"]
        drafted, accepted = _counts(found)
        assert 0.5 * drafted < accepted <= drafted
        assert found.client.get("/props").json()["engine"]["draft"] == "model"
        for source in ("none", "prompt"):
            other = COMPLETIONS.ask(found, *ASKED, draft=source)
            assert other["choices"] == expected["choices"]
            assert (_counts(found) == (drafted, accepted)) == (source == "none")
    assert not drafts.drafters
