"""Adapt the engines to one interface: load a model, then generate greedy tokens one by one.

mlx-lm queues the step after each token, including the last one, before it returns the token. kvant is made to
compute that step too, so that all engines do the same amount of work.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.kv_format import PMX
from kvant.cache.options import CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.drafts import DraftCounts, Drafts
from kvant.engine.head_drafts import drafts_of
from kvant.engine.load import load_model
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import Request, Token
from kvant.engine.sampler import greedy
from kvant.engine.scheduler import Scheduler
from kvant.errors import BenchError
from kvant.models.identity import identify
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.mlx_lm_model import load_mlx_lm

Tokens = Generator[int, None, None]
StreamTokens = Generator[tuple[int, int], None, None]


def _token(new: Token) -> int:
    if new.token is None:
        raise BenchError(f"a request ended: {new.finish_reason}")
    return new.token


class Kvant:
    """kvant's decoder, or mlx-lm's model, with kvant's preallocated cache."""

    def __init__(self, spec: EngineSpec, folder: Path, prefill_step_size: int) -> None:
        """Load the model; raise a KvantError if the folder cannot be loaded."""
        identity = None if spec.kv_format in (None, PMX) else identify(folder)
        self._model = load_model(folder, mtp=spec.draft == "mtp")
        self._draft_model = None if spec.draft_model is None else load_model(Path(spec.draft_model))
        drafting = 0 if self._draft_model is None else self._draft_model.nbytes
        self.dtype = str(self._model.dtype).removeprefix("mlx.core.")  # the activations' dtype
        # of all weights, and of those that a step reads
        self.weight_bytes = self._model.nbytes + drafting, self._model.nbytes_read
        self.drafts: DraftCounts | None = None  # of the last run; None without drafts
        self._spec = spec
        self._prefill_step_size = prefill_step_size
        if spec.kv_format in (None, PMX):
            self._cache_options = CacheOptions.from_keywords(
                kv_bits=spec.kv_bits or 0,
                kv_group_size=spec.kv_group_size,
                kernels=spec.kernels,
                kv_format=spec.kv_format,
            )
        else:
            self._model.identity = identity
            self._cache_options = CacheOptions.from_keywords(kv_format=spec.kv_format, kernels=spec.kernels)
        self._cache: ModelCache | None = None

    def tokens(self, prompt: Sequence[int], max_tokens: int, *, lookahead: int = 1) -> Tokens:
        """Generate greedy tokens with a new cache, and queue ``lookahead`` further steps."""
        self._cache = None  # free the last run's cache before the next is reserved
        cache = self._cache = self._model.reserve_cache(len(prompt) + max_tokens, self._cache_options)
        drafts: Drafts | ModelDrafts | None
        if self._draft_model is None:
            drafts = drafts_of(self._spec.draft, self._model, self._spec.num_draft_tokens)
        else:
            drafts = ModelDrafts(model=self._draft_model, num_draft_tokens=self._spec.num_draft_tokens)
        scheduler = CacheScheduler(self._model, cache, prefill_step_size=self._prefill_step_size)
        pool_drafts = None if drafts is None else drafts.for_pool(cache.pool)
        request = Request(prompt, max_tokens + lookahead, drafts=pool_drafts, keep_logprobs=True)
        for new in islice(scheduler.answer([request]), max_tokens):
            self.drafts = None if drafts is None else scheduler.drafts
            yield _token(new)

    def streams(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> StreamTokens:
        """Generate greedy tokens with the numbers of their prompts, in a pool or one prompt after another."""
        if self._spec.one_by_one:
            for number, prompt in enumerate(prompts):
                for token in self.tokens(prompt, max_tokens, lookahead=0):
                    yield number, token
            return
        tokens = sum(pages_for(len(prompt) + max_tokens) for prompt in prompts) * PAGE_SIZE
        sizes: dict[str, Any] = {"sequences": len(prompts), "prefill_step_size": self._prefill_step_size}
        pool = self._model.make_pool(tokens, **sizes, options=self._cache_options)
        scheduler = Scheduler(self._model, pool, max_batch=len(prompts))
        numbers = {Request(prompt, max_tokens): number for number, prompt in enumerate(prompts)}
        for new in scheduler.answer([*numbers]):
            yield numbers[new.request], _token(new)

    def cache_size(self) -> tuple[int, int]:
        """Return the bytes of the last run's cache, and the tokens it has room for."""
        mx.synchronize()  # wait for the device
        assert self._cache is not None  # tokens() was called
        return self._cache.nbytes, self._cache.max_seq_len or 0


class MLXLM:
    """mlx-lm's model, caches and generation step; a dtype casts its weights."""

    drafts = None

    def __init__(self, spec: EngineSpec, folder: Path, prefill_step_size: int) -> None:
        """Load the model; raise a KvantError if the folder cannot be loaded, or mlx-lm's own error."""
        from kvant.bridge.folder import main_dtype
        from kvant.bridge.model import bytes_read, parameters

        dtype = None if spec.dtype is None else getattr(mx, spec.dtype)
        self._model, experts_used = load_mlx_lm(folder, dtype)
        self.dtype = str(main_dtype(self._model)).removeprefix("mlx.core.")  # of most floating-point weights
        nbytes = sum(array.nbytes for array in parameters(self._model).values())
        self.weight_bytes = nbytes, bytes_read(self._model, experts_used)
        self._spec = spec
        self._prefill_step_size = prefill_step_size
        self._cache: list[Any] = []
        self._fed = 0  # tokens fed in the last run

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> Tokens:
        """Run mlx-lm's generation loop, with the memory limit that its stream_generate sets on a Mac."""
        from mlx_lm.generate import generate_step, generation_stream, wired_limit
        from mlx_lm.models.cache import make_prompt_cache

        self._cache = []
        self._fed = len(prompt) + max_tokens
        # generate_step replaces layers with quantized ones in this list
        cache = self._cache = make_prompt_cache(self._model)
        options: dict[str, Any] = {"prefill_step_size": self._prefill_step_size, "quantized_kv_start": 0}
        if self._spec.kv_bits:
            options |= {"kv_bits": self._spec.kv_bits, "kv_group_size": self._spec.kv_group_size}
        ids = mx.array(list(prompt))
        steps = generate_step(
            ids, self._model, max_tokens=max_tokens, sampler=greedy, prompt_cache=cache, **options
        )
        with wired_limit(self._model, [generation_stream]), closing(steps):
            for token, _ in steps:
                yield token

    def streams(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> StreamTokens:
        """Generate greedy tokens with the numbers of their prompts, with mlx-lm's BatchGenerator."""
        from mlx_lm.generate import BatchGenerator

        sizes = {"completion_batch_size": len(prompts), "prefill_step_size": self._prefill_step_size}
        batch = BatchGenerator(self._model, sampler=greedy, **sizes)
        with closing(batch):
            uids = batch.insert([list(prompt) for prompt in prompts], [max_tokens] * len(prompts))
            numbers = {uid: number for number, uid in enumerate(uids)}
            while responses := batch.next_generated():
                for response in responses:
                    yield numbers[response.uid], response.token

    def cache_size(self) -> tuple[int, int]:
        """Return the bytes of the cache, and the tokens it has room for: a buffer grows by 256 tokens."""
        from mlx_lm.generate import generation_stream
        from mlx_lm.models.cache import KVCache, QuantizedKVCache

        mx.synchronize(generation_stream)
        room = self._fed
        if all(isinstance(layer, KVCache | QuantizedKVCache) for layer in self._cache):
            keys = self._cache[0].keys
            # a quantized cache is a tuple of values, scales, biases
            room = (keys if isinstance(keys, mx.array) else keys[0]).shape[2]
        return sum(layer.nbytes for layer in self._cache), room
