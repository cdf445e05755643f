"""/v1/embeddings: vectors that are kvant.embed's, beside running answers, with the guards of other routes."""

import base64
import json
import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.command import refusal
from support.numbers import relative_error
from support.server import Running, served, wait

import kvant
from kvant.cache import CacheOptions
from kvant.engine.embedding import EmbeddingState

GOLDEN = Path(__file__).parents[1] / "data" / "embeddings"
PATH = "/v1/embeddings"
TEXTS = ["Once upon a time", "The bear and the fox went to the river. " * 9, "a", "A little fox"]
TOLERANCE = 1e-5  # of the largest number: rounding in another batch
QUANTIZED = 0.1  # with keys and values of 8 bits


@pytest.fixture(scope="module")
def pooling(pocket: Any) -> Iterator[Running]:
    """A server that was told how to pool, whose cache is not quantized."""
    cache = CacheOptions(kv_bits=0)
    with served(*pocket, sequences=4, max_kv_size=512, max_queue=8, pooling="mean", cache=cache) as found:
        yield found


def _ask(server: Running, given: Any, **fields: Any) -> Any:
    answer = server.client.post(PATH, json={"model": "pocket", "input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _vectors(answer: Any) -> mx.array:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return mx.array([entry["embedding"] for entry in answer["data"]])


def test_vectors_are_those_of_the_function(pooling: Running, pocket: Any) -> None:
    answer = _ask(pooling, TEXTS, user="me")
    assert relative_error(_vectors(answer), kvant.embed(*pocket, TEXTS, pooling="mean")) < TOLERANCE
    assert (answer["object"], answer["model"]) == ("list", "pocket")
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    tokens = sum(len(pocket[1].encode(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_every_kind_of_input(pooling: Running, pocket: Any) -> None:
    rows = [pocket[1].encode(text) for text in TEXTS]
    texts = _vectors(_ask(pooling, TEXTS))
    assert relative_error(_vectors(_ask(pooling, rows)), texts) < TOLERANCE
    for number, (text, row) in enumerate(zip(TEXTS, rows, strict=True)):
        for given in (text, [text], row, [row]):
            assert relative_error(_vectors(_ask(pooling, given)), texts[number : number + 1]) < TOLERANCE


def test_base64(pooling: Running) -> None:
    """Little-endian float32."""
    floats = _vectors(_ask(pooling, TEXTS, encoding_format="float"))
    answer = _ask(pooling, TEXTS, encoding_format="base64")
    data = [base64.b64decode(entry["embedding"]) for entry in answer["data"]]
    assert {len(each) for each in data} == {4 * 256}
    assert relative_error(mx.array([struct.unpack("<256f", each) for each in data]), floats) < TOLERANCE


def test_dimensions(pooling: Running) -> None:
    whole = _vectors(_ask(pooling, TEXTS))[:, :7]
    short = _vectors(_ask(pooling, TEXTS, dimensions=7))
    assert relative_error(short, whole / mx.linalg.norm(whole, axis=-1, keepdims=True)) < TOLERANCE


def test_a_quantized_cache(pocket: Any) -> None:
    """As the server's is by default, and of quantized weights the same."""
    with served(*pocket, sequences=2, max_kv_size=512, pooling="last") as server:
        given = _vectors(_ask(server, TEXTS))
    assert TOLERANCE < relative_error(given, kvant.embed(*pocket, TEXTS, pooling="last")) < QUANTIZED


def test_a_model_with_files() -> None:
    """It says itself how it pools."""
    with pytest.warns(UserWarning, match="no output head"):
        model, tokenizer = kvant.load(GOLDEN / "qwen3")
    folder = str(GOLDEN / "qwen3")
    with served(model, tokenizer, model=folder, sequences=2, cache=CacheOptions(kv_bits=0)) as server:
        answer = server.client.post(PATH, json={"model": "qwen3", "input": TEXTS[:1]}).json()
        too_long = server.client.post(PATH, json={"model": "qwen3", "input": TEXTS[1] * 9}).json()
    assert relative_error(_vectors(answer), kvant.embed(model, tokenizer, TEXTS[:1])) < TOLERANCE
    assert "tokens; expected at most 128" in too_long["error"]["message"]


def test_a_model_without_files(server: Running) -> None:
    """The fixture's server was not told how to pool."""
    answer = server.client.post(PATH, json={"model": "pocket", "input": "a"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "start kvant serve with --pooling last or mean" in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "model")


def test_files_that_ask_for_something_else(pocket: Any, tmp_path: Path) -> None:
    """The error gives the client the reason, without a path on this machine."""
    (tmp_path / "modules.json").write_text(
        '[{"type": "x.Transformer", "path": ""}, {"type": "x.Dense", "path": ""}]'
    )
    model, tokenizer = kvant.load("pocket")
    tokenizer.folder = tmp_path
    with served(model, tokenizer) as server:
        answer = server.client.post(PATH, json={"model": "pocket", "input": "a"})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "modules.json: the modules are Transformer, Dense" in message
    assert str(tmp_path) not in message


REFUSED: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({}, 400, "input", "missing required field `input`"),
    ({"input": None}, 400, "input", "got `null`"),
    ({"input": 5}, 400, "input", "got `int`"),
    ({"input": []}, 400, "input", "input has 0 texts; expected 1 to 2048"),
    ({"input": ["a"] * 2049}, 400, "input", "input has 2049 texts"),
    ({"input": ""}, 400, "input", "empty"),
    ({"input": ["a", ""]}, 400, "input", "input[1]: the prompt is empty"),
    ({"input": [5, "a"]}, 400, "input", "numbers beside"),
    ({"input": [[5, 99_999]]}, 400, "input", "token id 99999"),
    ({"input": [-1]}, 400, "input", "token id -1"),
    ({"input": [[1.5]]}, 400, None, "got `float`"),
    ({"input": "x " * 300}, 400, "input", "the text has 600 tokens; expected at most 512"),
    ({"input": ["a", [5] * 600]}, 400, "input", "input[1]: the text has 600 tokens; expected at most 512"),
    ({"input": "x" * 70_000}, 400, "input", "70000 characters"),
    ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format", 'expected "base64" or "float"'),
    ({"input": "a", "dimensions": 0}, 400, "dimensions", "dimensions is 0; expected 1 to 256"),
    ({"input": "a", "dimensions": 257}, 400, "dimensions", "dimensions is 257; expected 1 to 256"),
    ({"input": "a", "model": "other"}, 404, "model", "'other' is not served"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "param", "words"), REFUSED)
def test_what_is_refused(
    pooling: Running, fields: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    answer = pooling.client.post(PATH, json={"model": "pocket"} | fields)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    if "tokens; expected" in words:
        assert error["code"] == "context_length_exceeded"


def test_fields_that_are_not_known(pooling: Running, pocket: Any) -> None:
    body = {"model": "pocket", "input": "a", "input_type": "query"}
    answer = pooling.client.post(PATH, json=body)
    assert (answer.status_code, answer.headers["x-kvant-ignored"]) == (200, "input_type")
    with served(*pocket, pooling="last", strict=True) as strict:
        answer = strict.client.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_type")


def test_keys(pocket: Any) -> None:
    with served(*pocket, pooling="last", api_keys=("secret",)) as server:
        body = {"model": "pocket", "input": "a"}
        assert server.client.post(PATH, json=body).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert server.client.post(PATH, json=body, headers=headers).status_code == 200


def test_the_log_and_the_metrics(pooling: Running, pocket: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvant.server.requests")
    before = _prompt_tokens(pooling)
    _ask(pooling, TEXTS)
    tokens = sum(len(pocket[1].encode(text)) for text in TEXTS)
    start = f"POST {PATH} 200, pocket, {tokens} tokens in, 0 out, "
    wait(lambda: any(line.startswith(start) for line in caplog.messages))
    assert not any("fox" in line for line in caplog.messages)
    assert _prompt_tokens(pooling) - before == tokens


def _prompt_tokens(server: Running) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("kvant_prompt_tokens_total "))


def test_nothing_of_a_text_is_kept(pooling: Running) -> None:
    """A prompt that begins alike is fed whole, and all pages are free."""
    text = "The owl sat in the tall tree and looked at the moon. " * 9
    _ask(pooling, [text, text])
    wait(lambda: pooling.service.pool.num_free == pooling.service.pool.num_pages)
    body = {"model": "pocket", "prompt": text, "max_tokens": 1}
    usage = pooling.client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_beside_running_answers(pooling: Running) -> None:
    """Both are what they are alone, and a stream goes on while texts are fed."""
    ask = {
        "model": "pocket",
        "prompt": "Once upon a time",
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
    }
    texts = [TEXTS[1] + str(number) for number in range(24)]
    answer = pooling.client.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    vectors = _vectors(_ask(pooling, texts))
    found: list[mx.array] = []
    with pooling.client.stream("POST", "/v1/completions", json=ask | {"stream": True}) as stream:
        lines = stream.iter_lines()
        received = [next(lines)]
        thread = threading.Thread(target=lambda: found.append(_vectors(_ask(pooling, texts))))
        thread.start()
        received += list(lines)
        thread.join()
    streamed = "".join(_text(line) for line in received if line.startswith("data: {"))
    assert streamed == answer
    assert relative_error(found[0], vectors) < TOLERANCE


def _text(line: str) -> str:
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return choices[0]["text"] if choices else ""


def test_a_client_that_leaves(pooling: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun for it ends, and its pages are free."""
    fed = threading.Event()
    feed = EmbeddingState.feed

    def told(self: EmbeddingState, *given: Any) -> None:
        fed.set()
        feed(self, *given)

    monkeypatch.setattr(EmbeddingState, "feed", told)
    body = b'{"model": "pocket", "input": [%s]}' % b", ".join([b'"%b"' % (b"the fox " * 150)] * 500)
    with pooling.connect() as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (PATH.encode(), len(body), body)
        )
        assert fed.wait(60)
    wait(lambda: sum(pooling.service.engine.counts[:3]) == 0)
    wait(lambda: pooling.service.pool.num_free == pooling.service.pool.num_pages)


def test_a_client_that_leaves_its_answer(pooling: Running, caplog: pytest.LogCaptureFixture) -> None:
    """It is ten megabytes long, and written vector by vector."""
    body = b'{"model": "pocket", "input": [%b]}' % b", ".join([b'"a"'] * 2048)
    head = (
        b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    with pooling.connect() as connection:
        connection.sendall(head % (PATH.encode(), len(body)) + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
    assert _ask(pooling, "a")["usage"]["total_tokens"] == 1
    wait(lambda: pooling.registry.active == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_engine_that_ends(pocket: Any) -> None:
    with served(*pocket, pooling="last") as server:
        server.service.engine.close(drain=False)
        answer = server.client.post(PATH, json={"model": "pocket", "input": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"


def test_a_full_queue(pocket: Any) -> None:
    """It is refused with 429, as other requests are."""
    with served(*pocket, pooling="last", max_queue=1, max_kv_size=2048) as server:
        ask = {"model": "pocket", "prompt": "a", "ignore_eos": True}
        with server.client.stream(
            "POST", "/v1/completions", json={**ask, "max_tokens": 2000, "stream": True}
        ) as running:
            lines = running.iter_lines()
            next(lines)
            thread = threading.Thread(
                target=server.client.post,
                args=("/v1/completions",),
                kwargs={"json": {**ask, "max_tokens": 2}},
            )
            thread.start()
            wait(lambda: server.service.engine.counts.waiting == 1)
            answer = server.client.post(PATH, json={"model": "pocket", "input": "a"})
        thread.join()
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1


def test_the_flag() -> None:
    assert "pooling" in refusal(2, "serve", "--pooling", "max")
