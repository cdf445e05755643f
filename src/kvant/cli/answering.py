"""Answer one or many prompts: one through the session's cache, several together in a planned pool."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvant.cache.layer_format import describe_formats
from kvant.cache.pages import PAGE_SIZE
from kvant.cache.pool import Pool
from kvant.cli import options
from kvant.cli import prompt_cache_file as cache_file
from kvant.cli.fitting import describe, named_format, tokens_asked
from kvant.cli.options import RunOptions
from kvant.cli.question import Question, at
from kvant.cli.session import Session, drafts_for_pool
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.request import CHUNK, PromptProgress, Request, pool_reservation, reservation
from kvant.engine.scheduler import Scheduler
from kvant.engine.stream import GenerationResponse, TextRequest, responses
from kvant.errors import ContextError
from kvant.machine import Machine
from kvant.models.config import ModelConfig
from kvant.plan import MemoryPlan
from kvant.plan.fitting import sequences_that_fit
from kvant.sizes import format_bytes


def answer(
    session: Session,
    run: RunOptions,
    questions: Sequence[Question],
    n: int,
    *,
    at_once: int | None,
    deterministic: bool = False,
    file: str | None = None,
    progress: PromptProgress | None = None,
) -> Iterator[tuple[int, GenerationResponse]]:
    """Return an iterator of tokens, each with the number of its answer. Memory is reserved by this call.

    Each question is read once and has ``n`` answers, numbered from 0 in order.

    Args:
        at_once: how many answers to compute at once, in a pool made for them; None: compute the only answer
            through the session's cache.
        file: a prompt cache, for a single question. The last answer of a pool returns the cache to save.
        progress: called while a prompt is read.
    """
    asked = _asked(questions, n, at_once or 1)
    cache = None
    rest = None
    scheduler: Scheduler
    if at_once is None:
        cache_file.take(file, session.cache, questions[0].ids, quiet=run.quiet)
        scheduler = CacheScheduler(session.model, session.cache, prefill_step_size=run.prefill_step_size)
    else:
        needs = _needs(session, run, asked)
        cached = cache_file.tokens_in(file)
        # the last answer's cache; the loaded one counts twice while it is copied
        caches = 0 if file is None else 2 if cached else 1
        pool = _reserve(
            session, run, needs, at_once, deterministic=deterministic, caches=caches, cached=cached
        )
        if cached:
            cache = session.model.reserve_cache(max(*needs, cached), session.settings.cache)
            rest = cache_file.take(file, cache, questions[0].ids, quiet=run.quiet)
        scheduler = Scheduler(session.model, pool, max_batch=pool.max_sequences, deterministic=deterministic)
    requests = [
        TextRequest(
            Request(
                rest or question.ids,
                question.max_tokens,
                question.sampler_of(group[0]),
                question.processors,
                session.tokenizer.eos_token_ids,
                answers=len(group),
                cache=cache,
                keep_cache=at_once is not None and file is not None and group is asked[-1][1],
                drafts=session.drafts,
                progress=progress,
            ),
            question.stop,
        )
        for question, group in asked
    ]
    pieces = responses(scheduler, requests, session.tokenizer)
    return ((asked[piece.number][1][piece.answer], piece) for piece in pieces)


def _asked(questions: Sequence[Question], n: int, at_once: int) -> list[tuple[Question, range]]:
    """Return what to submit: each question, once for at most ``at_once`` of its answers."""
    return [
        (question, range(first, min(first + at_once, (number + 1) * n)))
        for number, question in enumerate(questions)
        for first in range(number * n, (number + 1) * n, at_once)
    ]


def _needs(session: Session, run: RunOptions, asked: Sequence[tuple[Question, range]]) -> list[int]:
    """Return the tokens to reserve for each answer, without prompt pages that it shares with others."""
    most = _most_tokens(session, run)
    config = session.checkpoint.config
    needs: list[int] = []
    for question, group in asked:
        with at(question.line):
            need = reservation(session.model, len(question.ids), question.max_tokens, most)
        # With windows, each answer needs its own pages.
        shares = isinstance(config, ModelConfig) and all(
            window is None or window >= need for window in config.windows
        )
        shared = len(question.ids) // PAGE_SIZE * PAGE_SIZE if shares else 0
        needs += [need, *[max(1, need - shared)] * (len(group) - 1)]
    return needs


def _most_tokens(session: Session, run: RunOptions) -> int | None:
    """Return the limit of --max-kv-size for a sequence. None, also for auto: the model's context."""
    size = options.kv_size(run.max_kv_size)
    return tokens_asked(session.checkpoint, size) if isinstance(size, int) else None


def _reserve(
    session: Session,
    run: RunOptions,
    needs: Sequence[int],
    at_once: int,
    *,
    deterministic: bool,
    caches: int,
    cached: int,
) -> Pool:
    """Plan, reserve and print a pool for ``needs`` unshared tokens, and ``caches`` of ``cached`` tokens."""
    rows = at_once if deterministic else min(at_once, len(needs))
    step_size = CHUNK if deterministic else run.prefill_step_size
    chosen = replace(session.settings, prefill_step_size=step_size, caches=caches)

    def planned(count: int) -> tuple[MemoryPlan, Machine]:
        settings = replace(chosen, sequences=count, pool_tokens=pool_reservation(needs, count))
        return session.plan_with(settings, max(*needs, cached))

    fitting = sequences_that_fit(planned, rows)
    if fitting < rows:
        way = (
            f"--sequences {fitting} would fit"
            if fitting
            else "a smaller --max-tokens or --kv-bits takes less"
        )
        raise ContextError(f"{describe(*planned(rows))}; {way}")
    with named_format(session.settings):
        pool = session.model.make_pool(
            pool_reservation(needs, rows),
            sequences=rows,
            max_seq_len=max(needs),
            prefill_step_size=step_size,
            options=session.settings.cache,
        )
    session.drafts = drafts_for_pool(session, run, pool, deterministic=deterministic)
    if deterministic:
        with options.named("--deterministic"):
            Scheduler(session.model, pool, max_batch=rows, deterministic=True)
    session.reserved = _most_tokens(session, run) or session.model.config.max_position_embeddings
    tokens = pool.num_pages * pool.page_size
    kind = describe_formats(pool.formats)
    together = f"{rows} sequence{'s' if rows > 1 else ''} at once"
    reserved = f"{tokens} tokens reserved for {together}, {kind}, {format_bytes(pool.nbytes)}"
    session.say_cache(reserved, run.quiet)
    return pool
