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
    """A deterministic server below shows that each is read."""
    before = _counts(server)
    plain = text_of(to.ask(server, *ASKED))
    to.ask(server, *ASKED, draft="none")
    assert _counts(server) == before
    assert text_of(to.ask(server, *ASKED, draft="prompt")) == plain


@pytest.mark.parametrize("draft", ["prompt", "model"])
def test_the_default_of_a_server(server: Running, monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    service = server.service
    settings = replace(service.settings, draft=draft, max_kv_size=256, sequences=2)
    pool = make_pool(settings, service.model)
    drafts = ModelDrafts(model=service.model, vocab_size=service.model.config.vocab_size).beside(pool)
    given = drafts if draft == "model" else None
    draft_by_chance(monkeypatch, 1)
    with running(Service(settings, service.model, service.tokenizer, pool, drafts=given)) as found:
        expected = COMPLETIONS.ask(server, *ASKED, ignore_eos=True)
        answer = COMPLETIONS.ask(found, *ASKED, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 40
        assert answer["choices"] == expected["choices"]
        drafted, accepted = _counts(found)
        assert 0 < accepted <= drafted
        assert found.client.get("/props").json()["engine"]["draft"] == draft
        metrics = found.client.get("/metrics").text
        assert f"\nkvant_drafted_tokens_total {float(drafted)}\n" in metrics
        assert f"\nkvant_accepted_tokens_total {float(accepted)}\n" in metrics
        for other in ("none", "prompt"):
            assert COMPLETIONS.ask(found, *ASKED, ignore_eos=True, draft=other)["choices"] == expected["choices"]
            assert (_counts(found) == (drafted, accepted)) == (other == "none")
    assert not drafts.drafters


def test_without_a_draft_model(server: Running) -> None:
    service = server.service
    refused = COMPLETIONS.post(server, *ASKED, draft="model")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "draft"
    assert "started without --draft-model" in refused.json()["error"]["message"]
    settings = replace(service.settings, draft="model", max_kv_size=256, sequences=2)
    with pytest.raises(ArgumentError, match="draft is 'model'; expected it with"):
        Service(settings, service.model, service.tokenizer, make_pool(settings, service.model))


def test_a_deterministic_server_refuses_them(server: Running) -> None:
    service = server.service
    settings = replace(service.settings, deterministic=True, max_kv_size=256, sequences=1)
    with running(Service(settings, service.model, service.tokenizer, make_pool(settings, service.model))) as found:
        for to in INTERFACES:
            refused = to.post(found, *ASKED, draft="prompt")
            assert refused.status_code == 400
            assert "refused with deterministic" in refused.json()["error"]["message"]
            to.ask(found, TEXT, 1)
