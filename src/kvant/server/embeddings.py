"""OpenAI's /v1/embeddings (platform.openai.com), which runs alongside other requests.

All texts of a body are one request to the engine. It alternates between them and other prompts, and running
answers get a token after every chunk.
"""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import mlx.core as mx
import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvant.engine.embedding import EmbeddingRequest, encode_text, longest_text
from kvant.engine.request import Token
from kvant.errors import ArgumentError, KvantError, ModelError
from kvant.server.answering import failure
from kvant.server.body import Fields, check_range
from kvant.server.endpoint import BodyReader, unless_gone
from kvant.server.errors import ApiError
from kvant.server.left_out import LeftOut
from kvant.server.openai import prompts_of
from kvant.server.request_log import Usage
from kvant.server.security import FORGET
from kvant.server.service import Service
from kvant.text.pooling import Pooling, choose_pooling

MAX_TEXTS = 2048  # OpenAI's
MAX_DIMENSIONS = 1 << 20  # more than any model has, for models whose width is unknown
# Other values are refused, because the client could not read the vectors.
EncodingField = Annotated[Literal["float", "base64"], msgspec.Meta(title="encoding_format")] | None


class EmbeddingsBody(Fields, frozen=True, kw_only=True):
    """The body of a request."""

    model: str
    input: str | list[str | int | list[int]]  # a list of integers is one text
    encoding_format: EncodingField = None
    dimensions: int | None = None
    user: Any = None  # a label for the client's use


async def embeddings(request: Request) -> Response:
    """Return a vector for each text."""
    left_out: LeftOut = request.state.left_out
    usage: Usage = request.state.usage
    async with await BodyReader.of(request) as reader:
        body = await reader.decode(EmbeddingsBody, left_out)
        texts = await reader.call(lambda: prompts_of(body.input, "input"))
        if not 1 <= len(texts) <= MAX_TEXTS:
            raise ApiError(f"input has {len(texts)} texts; expected 1 to {MAX_TEXTS}", param="input")
        service, name = await reader.use_model(body.model)
    usage.model = body.model
    if body.dimensions is not None:
        check_range("dimensions", body.dimensions, 1, service.model.embedding_size or MAX_DIMENSIONS)

    async def compute() -> tuple[EmbeddingRequest, list[mx.array]]:
        asked = await asyncio.to_thread(_prepare, service, texts, body.dimensions)
        usage.fed(len(asked.prompt))
        getattr(request.state, FORGET)()  # waiting for other texts may take minutes
        return asked, await _vectors(service, asked)

    asked, vectors = await unless_gone(request.receive, compute())
    tokens = len(asked.prompt)
    end = {"model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    pieces = _written(vectors, end, as_text=body.encoding_format == "base64")
    return StreamingResponse(pieces, media_type="application/json")


def _prepare(service: Service, texts: list[str | list[int]], dimensions: int | None) -> EmbeddingRequest:
    """Return the engine's request. This blocks while the tokenizer's process encodes."""
    pooling = _pooling(service)
    most = longest_text(service.model, service.max_seq_len, pooling)
    encoded = []
    for number, text in enumerate(texts):
        try:
            if isinstance(text, str):
                service.check_length(text)
            encoded.append(
                encode_text(service.tokenizer, text, pooling, service.model.config.vocab_size, most)
            )
        except (KvantError, ValueError) as error:
            failed = failure(error, "input")
            if len(texts) > 1:
                failed.message = f"input[{number}]: {failed.message}"
            raise failed from error
    return EmbeddingRequest.of(encoded, pooling, dimensions)


def _pooling(service: Service) -> Pooling:
    """Return how the model pools; raise an ApiError if this is unknown or not supported."""
    folder = service.tokenizer.folder
    try:
        return choose_pooling(folder, service.settings.pooling)
    except ArgumentError as error:
        problem = "no sentence-transformers files define how the model pools embeddings"
        raise ApiError(f"{problem}; start kvant serve with --pooling last or mean", param="model") from error
    except ModelError as error:  # without the path, which would reveal details of the machine
        problem = str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")
        raise ApiError(f"kvant cannot compute this model's embeddings: {problem}", param="model") from error


async def _vectors(service: Service, asked: EmbeddingRequest) -> list[mx.array]:
    """Return the vectors in the order of the texts. Cancelling this cancels the request."""
    loop = asyncio.get_running_loop()
    tokens = asyncio.Queue[Token]()
    vectors: dict[int, mx.array] = {}
    try:
        service.submit(asked, lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token))
        while len(vectors) < asked.answers:
            token = await tokens.get()
            if token.error is not None:
                raise token.error
            if token.embedding is None:
                raise ApiError("the server is shutting down", status=503)
            vectors[token.answer] = token.embedding
    except (KvantError, ArgumentError) as error:
        raise failure(error, "input") from error
    finally:
        service.engine.cancel(asked)
    return [vectors[number] for number in range(asked.answers)]


async def _written(vectors: list[mx.array], end: dict[str, Any], *, as_text: bool) -> AsyncIterator[bytes]:
    """Yield the answer vector by vector, because all vectors as JSON would take five times their memory.

    ``as_text``: encode each vector's bytes in base64.
    """
    yield b'{"object":"list","data":['
    for number, vector in enumerate(vectors):
        numbers: Any = vector.tolist()
        if as_text:
            numbers = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
        entry = {"object": "embedding", "index": number, "embedding": numbers}
        yield (b"," if number else b"") + msgspec.json.encode(entry)
    yield b"]," + msgspec.json.encode(end)[1:]
