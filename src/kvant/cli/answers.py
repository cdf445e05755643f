"""``kvant generate --n``: several answers to one prompt, which is read once. They are computed side by side."""

from collections.abc import Iterator, Sequence

from kvant.cache import ModelCache
from kvant.cache.pages import PAGE_SIZE
from kvant.cli import prompt_cache_file as cache_file
from kvant.cli.many import drafts_beside, most_tokens, reserve_pool
from kvant.cli.options import RunOptions
from kvant.cli.session import Session
from kvant.engine.batch_stream import Piece, Wanted, stream_pieces
from kvant.engine.draw import Sampler, for_answer
from kvant.engine.limits import reservation
from kvant.engine.processors import LogitsProcessor
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.models.config import ModelConfig


def answer_several(
    session: Session,
    run: RunOptions,
    ids: Sequence[int],
    n: int,
    sampler: Sampler,
    processors: Sequence[LogitsProcessor],
    *,
    at_once: int,
    deterministic: bool,
    file: str | None = None,
) -> Iterator[tuple[int, Piece]]:
    """The answers' tokens as they come, each with the number of its answer, from 0. All is reserved when it is called.

    Args:
        session, run, at_once, deterministic: as in :func:`kvant.cli.many.reserve_pool`; errors too.
        ids: of the prompt.
        n: how many answers; each has the next seed.
        file: what it holds of the prompt is not read again. In the end it holds the prompt and the last answer.
    """
    need = reservation(session.model, len(ids), run.max_tokens, most_tokens(session, run))
    shared = len(ids) // PAGE_SIZE * PAGE_SIZE if _shares(session, need) else 0
    groups = [range(first, min(first + at_once, n)) for first in range(0, n, at_once)]
    needs = [need if number == group[0] else max(1, need - shared) for group in groups for number in group]
    held = cache_file.tokens_in(file)
    caches = 0
    if file is not None:  # the last answer's, and before it what was loaded, twice while it is taken over
        caches = 2 if held else 1
    pool = reserve_pool(session, run, needs, at_once, deterministic=deterministic, caches=caches, cached=held)
    drafts = drafts_beside(session, run, pool)
    cache, rest = None, list(ids)
    if held:
        chosen = session.settings
        cache = session.model.make_cache(
            max(need, held), quant_bit=chosen.kv_bits, quant_group=chosen.kv_group_size, bias_split=chosen.kv_bias_split
        )
        rest = cache_file.take(file, cache, ids, quiet=run.quiet)
    wanted = [
        Wanted(
            Request(
                rest,
                run.max_tokens,
                for_answer(sampler, group[0]),
                tuple(processors),
                session.tokenizer.eos_token_ids,
                answers=len(group),
                cache=cache,
                keep_cache=file is not None and group is groups[-1],
                drafts=drafts,
            ),
            run.stop or (),
        )
        for group in groups
    ]
    scheduler = Scheduler(session.model, pool, max_batch=pool.max_sequences, deterministic=deterministic)

    def answers() -> Iterator[tuple[int, Piece]]:
        last: ModelCache | None = None
        for piece in stream_pieces(scheduler, wanted, session.tokenizer):
            number = groups[piece.number][piece.answer]
            if number == n - 1:
                last = piece.cache
            yield number, piece
        if file is not None and last is not None:
            last.save(file)

    return answers()


def _shares(session: Session, need: int) -> bool:
    """Whether the answers' sequences share the prompt's pages. In windows each moves through its own."""
    config = session.checkpoint.config
    return isinstance(config, ModelConfig) and all(window is None or window >= need for window in config.windows)
