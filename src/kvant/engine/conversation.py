"""A conversation whose history stays in the cache: every turn feeds only what is new.

Where a window or a state of the cache cannot go back to where a turn differs from what is held, the turn feeds all.
"""

import time
from collections.abc import Generator, Iterator, Sequence

from kvant.cache import KVCache
from kvant.engine.draw import Sampler
from kvant.engine.generate import GenerationResponse, check_stops, responses
from kvant.engine.limits import go_back
from kvant.engine.processors import LogitsProcessor
from kvant.engine.run import PREFILL_STEP_SIZE, PromptProgress, Run
from kvant.errors import ContextError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit
from kvant.text.prompt import Message, encode_rendered, render_chat
from kvant.text.tokenizer import Tokenizer


class Conversation:
    """Messages, and the tokens of them that the cache holds.

    Attributes:
        messages: the turns so far, as the chat template takes them.
        reused_tokens: tokens of the last turn's prompt that were in the cache already.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        cache: Sequence[KVCache],
        *,
        system_prompt: str | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache = model.check_cache(cache)
        self._system: list[Message] = []
        if system_prompt is not None:
            self._system.append({"role": "system", "content": system_prompt})
        self._turn: Generator[GenerationResponse, None, None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget every turn but the system prompt."""
        self._end_turn()
        self.messages: list[Message] = list(self._system)
        self.reused_tokens = 0
        self._ids: list[int] = []  # of the tokens in the cache
        self._text = ""  # theirs
        self._cache.reset()

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache."""
        return self._cache.offset

    def send(
        self,
        text: str,
        *,
        max_tokens: int = 256,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = None,
        stop: Sequence[str] = (),
        prefill_step_size: int = PREFILL_STEP_SIZE,
        prompt_progress_callback: PromptProgress | None = None,
    ) -> Iterator[GenerationResponse]:
        """Say something and iterate over the answer; arguments as in :func:`kvant.stream_generate`.

        Iteration may stop anywhere, or be interrupted: what was answered until then is the turn. A turn without any
        answer is forgotten.

        Raises:
            ContextError: the conversation no longer fits the reserved context; it is as it was before.
        """
        started = time.perf_counter()
        self._end_turn()
        stops = check_stops(stop)
        question: Message = {"role": "user", "content": text}
        rendered = render_chat(self._tokenizer, [*self.messages, question])
        ids = self._encode(rendered)
        limit = context_limit(self._model, self._cache.max_seq_len)
        if limit is not None and len(ids) > limit:
            raise ContextError(f"the conversation would have {len(ids)} tokens; {limit} are reserved")
        # At least one token has to be fed for there to be logits.
        reused = min(_common_prefix(ids, self._cache.ids[0]), len(ids) - 1)
        if not go_back(self._cache, reused):  # the whole conversation is fed again: slower, and right
            reused = 0
        self.reused_tokens, self._text = reused, ""
        run = Run(
            self._model,
            ids[reused:],
            self._cache,
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=logits_processors or (),
            stop_tokens=self._tokenizer.eos_token_ids,
            prefill_step_size=prefill_step_size,
            progress=prompt_progress_callback,
        )
        answer = responses(run, self._tokenizer, stops, started)
        self._turn = self._record(question, rendered, len(ids), answer)
        return self._turn

    def _record(
        self, question: Message, rendered: str, prompt_tokens: int, answer: Iterator[GenerationResponse]
    ) -> Generator[GenerationResponse, None, None]:
        pieces: list[str] = []
        last = None
        try:
            for response in answer:
                pieces.append(response.text)
                if response.finish_reason:  # the turn is recorded before it is handed out: nobody may ask for more
                    last = response
                    break
                yield response
        finally:
            ids = self._ids = self._cache.ids[0]
            self._text = rendered + self._decode(ids[prompt_tokens:]) if len(ids) >= prompt_tokens else ""
            if pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
        if last is not None:
            yield last

    def _end_turn(self) -> None:
        """Record the turn that was left suspended, if any."""
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def _encode(self, rendered: str) -> list[int]:
        """Token ids of the conversation; what the cache holds is not encoded again where the text continues it."""
        if self._text and rendered.startswith(self._text) and self._cache.ids[0] == self._ids:
            return self._ids + encode_rendered(self._tokenizer, rendered[len(self._text) :])
        return encode_rendered(self._tokenizer, rendered)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
