"""What a server says of itself, against what it did."""

import re
import time
from typing import Any

import mlx.core as mx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.server import Running, start

from kvant.server.settings import Settings

ASK = {"model": "pocket", "prompt": "The bear " * 80, "max_tokens": 20, "ignore_eos": True, "temperature": 0}


def _samples(server: Running) -> dict[str, float]:
    """All samples of /metrics by name and labels."""
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name.startswith("kvant_")
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_metrics_count_what_happened(server: Running) -> None:
    while server.client.get("/health").json()["running"]:  # an answer whose client has gone
        time.sleep(0.01)
    before = _samples(server)
    usages = [server.client.post("/v1/completions", json=ASK).json()["usage"] for _ in range(2)]
    after = _samples(server)

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert more("kvant_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert more("kvant_cached_tokens_total") == cached
    assert more("kvant_generated_tokens_total") == 40
    assert more("kvant_time_to_first_token_seconds_count") == 2
    assert more("kvant_time_between_tokens_seconds_count") == 38
    assert 0 < more("kvant_time_between_tokens_seconds_sum") < 10
    assert more("kvant_answers_total{reason=length}") == 2
    assert more("kvant_http_requests_total{route=/v1/completions,status=200}") == 2
    assert after["kvant_pool_bytes"] == server.service.pool.nbytes
    assert after["kvant_pages"] == 16
    assert after["kvant_engine_alive"] == 1
    assert after["kvant_requests_waiting"] == after["kvant_answers_running"] == 0


def test_paths_that_are_none_have_one_counter(server: Running) -> None:
    """A stranger's paths would fill the memory."""
    before = len(_samples(server))
    for number in range(50):
        assert server.client.get(f"/nothing/{number}").status_code == 404
        assert server.client.get(f"/v1/models/{number}").status_code == 404
    assert len(_samples(server)) <= before + 2


def test_health_and_models(server: Running) -> None:
    found = server.client.get("/v1/models").json()
    assert (found["object"], found["has_more"], found["first_id"]) == ("list", False, "pocket")
    (only,) = found["data"]
    assert (only["id"], only["object"], only["type"], only["max_model_len"]) == ("pocket", "model", "model", 512)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", only["created_at"])
    assert server.client.get("/v1/models/pocket").json() == only
    assert server.client.get("/health").json() == {"status": "ok", "waiting": 0, "running": 0}
    missing = server.client.get("/v1/models/owner/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_props_say_what_is_in_force(server: Running) -> None:
    service, found = server.service, server.client.get("/props").json()
    sizes = {"sequences": 4, "tokens_of_a_sequence": 512, "pages": 16, "page_tokens": 128, "bytes": service.pool.nbytes}
    cache = {"kv_bits": 8, "kv_group_sizes": [32], "kv_bias_split": True, "kernels": "unfused"}
    assert found["pool"] == sizes | cache
    engine = {"prefill_step_size": 512, "deterministic": False, "max_queue": 16, "draft": "none"}
    drafts = service.engine.drafts
    assert found["engine"] == engine | {"drafted_tokens": drafts.drafted, "accepted_tokens": drafts.accepted}
    assert found["environment"]["versions"]["mlx"] == mx.__version__
    assert found["memory"]["active"] > service.pool.nbytes + service.model.nbytes
    assert found["key_required"] is False


def test_tokenize(server: Running, pocket: Any) -> None:
    tokenizer = pocket[1]
    text = "The fox named Pip."
    found = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    messages = [{"role": "user", "content": text}]
    found = server.client.post("/tokenize", json={"model": "pocket", "messages": messages}).json()
    assert found["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def test_what_cannot_be_tokenized(server: Running) -> None:
    for body, status, said in (
        ({}, 400, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, 400, "either prompt or messages"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": "a", "model": "other"}, 404, "'other' is not served"),
    ):
        answer = server.client.post("/tokenize", json=body)
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]


def test_wrong_methods_and_paths(server: Running) -> None:
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/nothing", 404)):
        answer = server.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"] == answer.headers["request-id"]
    assert server.client.get("/v1/messages").json()["type"] == "error"


def test_names_of_a_model(pocket: Any, pocket_folder: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.symlink_to(pocket_folder)
    monkeypatch.chdir(tmp_path)
    for given in (str(folder), "./my-model", "my-model"):
        service = start(Settings(model=given, sequences=1, max_kv_size=128, aliases=("gpt-4o",)), *pocket)
        try:
            assert service.names == tuple(dict.fromkeys(["my-model", given, "gpt-4o"]))
            assert service.check_model(given) == service.check_model("gpt-4o") == "my-model"
        finally:
            service.close()
