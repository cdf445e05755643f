"""What a server is started with: drafts, as a default and as a field of every body; prompt caches on disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command import call
from support.drafts import draft_by_chance
from support.interfaces import CHAT, COMPLETIONS, INTERFACES, Interface, counts_of, text_of
from support.prefill import prefill
from support.server import Running, running, start

from kvant.cache import CacheOptions
from kvant.engine.model_drafts import ModelDrafts
from kvant.errors import ArgumentError, SnapshotError
from kvant.server.service import Service, make_pool, warm_start
from kvant.server.settings import Settings

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
    drafts = ModelDrafts(model=service.model).beside(pool)
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


SYSTEM = {"role": "system", "content": "You tell stories of a fox named Pip who lives by the sea. " * 6}
MESSAGES = [SYSTEM, {"role": "user", "content": "Who is Pip?"}]


def saved(folder: Path, pocket: Any, tokens: int | None = None, *, bits: int = 8) -> tuple[str, int]:
    """A prompt cache of the system prompt, or of its first tokens, and how many they are."""
    model, tokenizer = pocket
    ids = tokenizer.apply_chat_template([SYSTEM])[:tokens]
    cache = model.make_cache(len(ids), kv_bits=bits)
    prefill(model, ids, cache)
    cache.save(folder / "prompt.kv")
    return str(folder / "prompt.kv"), len(ids)


@pytest.mark.parametrize(("bits", "keys"), [(8, ()), (4, ("first", "second")), (0, ())])
def test_the_first_request_reads_only_what_is_new(
    bits: int, keys: tuple[str, ...], pocket: Any, tmp_path: Path
) -> None:
    path, count = saved(tmp_path, pocket, bits=bits)
    settings = Settings(port=0, sequences=2, max_kv_size=512, api_keys=keys, cache=CacheOptions(kv_bits=bits))
    pool = make_pool(settings, pocket[0])
    warm_start(settings, pool, [path])
    assert pool.num_free == pool.num_pages
    body = CHAT.body(MESSAGES, 12)
    with running(Service(settings, *pocket, pool)) as warm, running(start(settings, *pocket)) as cold:
        for key in keys or ("any",):
            headers = {"authorization": f"Bearer {key}"}
            both = [each.client.post(CHAT.path, json=body, headers=headers).json() for each in (warm, cold)]
            assert [counts_of(answer["usage"])[1] for answer in both] == [count, 0]
            assert both[0]["choices"] == both[1]["choices"]


def test_what_cannot_be_begun_with(pocket: Any, tmp_path: Path) -> None:
    model, _ = pocket
    path, count = saved(tmp_path, pocket)

    def fails(message: str, **changes: Any) -> None:
        settings = Settings(**{"sequences": 1, "max_kv_size": 512, **changes})
        with pytest.raises(SnapshotError, match=message):
            warm_start(settings, make_pool(settings, model), [path])

    fails(f"holds {count} tokens; expected 1 to 64, a sequence's", max_kv_size=64)
    fails("3 pages are needed; the pool has 2", max_kv_size=256, api_keys=("a", "b", "c"))
    fails("of another format: kv_bits is 8; expected 4", cache=CacheOptions(kv_bits=4))
    saved(tmp_path, pocket, 9)
    fails("nothing of its 9 tokens can be shared")


def test_the_command_refuses_it_in_a_line(pocket: Any, tmp_path: Path) -> None:
    path, _ = saved(tmp_path, pocket)
    for options, code, said in (
        (["--deterministic"], 2, "not with --deterministic"),
        (["--kv-bits", "4"], 1, "prompt.kv"),
    ):
        done = call("serve", "--port", "0", "--prompt-cache-file", path, *options)
        assert (done.returncode, done.stdout) == (code, "")
        assert said in done.stderr
