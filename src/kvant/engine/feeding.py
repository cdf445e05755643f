"""Prompts of requests: their pages are reserved, they are fed in chunks, and their answers begin."""

import mlx.core as mx

from kvant.cache.pool import Pool, PoolSequence
from kvant.cache.single import SinglePool
from kvant.engine.drafting.choice import AnswerDrafts
from kvant.engine.draw import for_answer
from kvant.engine.request import own_tokens
from kvant.engine.work import Answer, Work
from kvant.models import LanguageModel

CHUNK = 128  # prompt tokens between two tokens of others: a quarter of a prefill's speed is lost at 64 (measured)


class PromptFeeder:
    """Feeds prompts into the sequences of a pool."""

    def __init__(self, model: LanguageModel, pool: Pool | SinglePool, *, deterministic: bool) -> None:
        """``deterministic``: chunks end at multiples of 128, and only pages that such chunks computed are shared."""
        self._model, self._pool = model, pool
        self._deterministic = deterministic

    def reserve(self, work: Work) -> None:
        """Open the sequences of a request, with the beginning that others have fed."""
        checked, pool, sequences = work.checked, self._pool, work.sequences
        known = () if checked.cache is not None else checked.ids
        try:
            whole_pages = self._deterministic  # chunks begin at their ends then
            sequences.append(pool.sequence(checked.reserved, known, salt=checked.request.salt, whole_pages=whole_pages))
            for _ in range(len(work.open) - 1):  # places that are kept for forks
                sequences.append(pool.sequence(own_tokens(len(checked.ids), checked.reserved, pool)))
            if checked.cache is None:
                work.start = work.cached = work.exact = sequences[0].length
                return
            first = sequences[0]
            assert isinstance(first, PoolSequence)
            first.load(checked.cache.sequence)
            work.start = checked.held
            if first.ids != checked.ids[: checked.held]:
                raise ValueError("the request's cache was changed after it was submitted")
        except BaseException:
            work.release()
            raise

    def feed_chunk(self, work: Work, room: int) -> mx.array | None:
        """The logits (1, vocab) of the prompt's end, or None before."""
        ids, sequence = work.checked.ids, work.sequences[0]
        start = sequence.length
        chunk_end = start + min(room, self._pool.prefill_step_size)
        end = min((start // CHUNK + 1) * CHUNK if self._deterministic else chunk_end, len(ids))
        if end == len(ids) and self._model.last_token_alone:
            end = max(end - 1, start + 1)
        chunk, logits = ids[start:end], None
        tell = work.checked.request.progress
        if tell is not None and start == work.start:
            tell(0, len(ids) - start)
        batch = self._pool.batch([sequence])
        if end == len(ids):
            logits = self._model.next_logits(mx.array([chunk]), batch)
            mx.eval(logits)
        else:
            mx.eval(self._model.feed(mx.array([chunk]), batch))
            mx.clear_cache()  # a chunk's activations; without it MLX kept four times as much (measured)
        batch.commit(ids=[chunk])
        if work.exact == start and len(chunk) == CHUNK:
            work.exact = end
        if tell is not None:
            tell(end - work.start, len(ids) - work.start)
        if self._pool.has_windows:  # its pages are given back as it moves on
            self._share(work)
        return logits

    def begin_answers(self, work: Work) -> list[Answer]:
        """Fork the sequence that was fed, for every answer."""
        checked, sequences = work.checked, work.sequences
        first = sequences[0]
        self._share(work)
        answers = []
        for place, number in enumerate(sorted(work.open)):
            if place:
                assert isinstance(first, PoolSequence)
                sequences[place].release()
                sequences[place] = first.fork(checked.reserved)
            sampler = for_answer(checked.sampler, number)
            matcher = None if checked.grammar is None else checked.grammar.matcher()
            if matcher is not None:
                for token in checked.request.begun:
                    matcher.take(token)
            drafts = None
            if (own := checked.request.drafts) is not None:
                drafts = AnswerDrafts(own.for_answer(checked.request.salt, checked.reserved), own.most)
            answers.append(Answer(work, number, sampler, sequences[place], list(checked.ids), matcher, drafts))
        for sequence in sequences[len(answers) :]:  # of answers that were cancelled since
            sequence.release()
        return answers

    def _share(self, work: Work) -> None:
        """Let later requests begin with what was fed of a prompt."""
        work.sequences[0].share_prefix(work.exact if self._deterministic else None)
