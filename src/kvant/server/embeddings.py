"""OpenAI's /v1/embeddings (platform.openai.com): vectors of texts, beside the answers of other requests.

All texts of a body are one request of the engine. It feeds them by turns with the prompts of others, and the
answers that run get a token after every chunk.
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
MAX_DIMENSIONS = 1 << 20  # more than any model has; its own number is known when it computes
# A value that is not named is refused: the client could not read the vectors.
EncodingField = Annotated[Literal["float", "base64"], msgspec.Meta(title="encoding_format")] | None


class EmbeddingsBody(Fields, frozen=True, kw_only=True):
    """The body."""

    model: str
    input: str | list[str | int | list[int]]  # a list of numbers is one text
    encoding_format: EncodingField = None
    dimensions: int | None = None
    user: Any = None  # a label of the client's


async def embeddings(request: Request) -> Response:
    """Answer with a vector of each text."""
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
        getattr(request.state, FORGET)()  # the texts of others may take minutes
        return asked, await _vectors(service, asked)

    asked, vectors = await unless_gone(request.receive, compute())
    tokens = len(asked.prompt)
    end = {"model": name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    pieces = _written(vectors, end, as_text=body.encoding_format == "base64")
    return StreamingResponse(pieces, media_type="application/json")


def _prepare(service: Service, texts: list[str | list[int]], dimensions: int | None) -> EmbeddingRequest:
    """Return the engine's request. This waits for the tokenizer's process."""
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
    """Return how the model pools; an ApiError if nothing says so, or kvant does not compute it."""
    folder = service.tokenizer.folder
    try:
        return choose_pooling(folder, service.settings.pooling)
    except ArgumentError as error:
        said = "the model makes no embeddings: it has no sentence-transformers files, which say how it pools"
        raise ApiError(f"{said}; start kvant serve with --pooling last or mean", param="model") from error
    except ModelError as error:  # without the path, which says more of the machine than a client needs
        said = str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")
        raise ApiError(f"the model makes no embeddings here: {said}", param="model") from error


async def _vectors(service: Service, asked: EmbeddingRequest) -> list[mx.array]:
    """Return the vectors in the order of the texts. Whoever is cancelled while waiting ends the request."""
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
    """Write an answer vector by vector: as JSON, all of them would take five times their memory.

    ``as_text``: vectors as their bytes in base64.
    """
    yield b'{"object":"list","data":['
    for number, vector in enumerate(vectors):
        numbers: Any = vector.tolist()
        if as_text:
            numbers = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
        entry = {"object": "embedding", "index": number, "embedding": numbers}
        yield (b"," if number else b"") + msgspec.json.encode(entry)
    yield b"]," + msgspec.json.encode(end)[1:]
