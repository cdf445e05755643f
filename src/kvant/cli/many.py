"""What --prompts-file and --n have in common: a pool that is planned, reserved and printed before it answers."""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from kvant.cache.pool import Pool
from kvant.cli import options
from kvant.cli.fitting import describe, named_format
from kvant.cli.options import AUTO, RunOptions
from kvant.cli.session import Session, asked_drafts
from kvant.engine.drafting.drafts import Drafts
from kvant.engine.feeding import CHUNK
from kvant.engine.limits import pool_reservation
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import check_drafts
from kvant.engine.scheduler import Scheduler
from kvant.errors import ContextError
from kvant.machine import Machine
from kvant.sizes import format_bytes
from kvant.tools.plan import MemoryPlan


def most_tokens(session: Session, run: RunOptions) -> int | None:
    """The tokens that a sequence may have by --max-kv-size; None: as many as the context. Beside a pool, auto is none.

    Raises:
        ContextError: more than the model's context.
    """
    wanted, context = options.kv_size(run.max_kv_size), session.model.config.max_position_embeddings
    if wanted is None or wanted == AUTO:
        return None
    if context is not None and wanted > context:
        raise ContextError(f"--max-kv-size is {wanted}; the model's context is {context} tokens")
    return wanted


def reserve_pool(
    session: Session,
    run: RunOptions,
    needs: Sequence[int],
    at_once: int,
    *,
    deterministic: bool,
    caches: int = 0,
    cached: int = 0,
) -> Pool:
    """Plan and reserve a pool, and print the reservation.

    Args:
        session: of :func:`kvant.cli.session.load_session`.
        run: the command's flags.
        needs: the tokens of each answer's sequence, without those that it shares with another answer's.
        at_once: answers that run together, at most.
        deterministic: an answer does not depend on those beside it: a step has as many rows, whoever runs.
        caches: of conversations that are held beside the pool.
        cached: tokens that one of them has.

    Raises:
        ArgumentError: drafts, which this pool cannot verify.
        ContextError: the pool does not fit into this machine; the error says with how many at once it would.
        BadValueError: a format that the model's layers cannot have, or a kernel forced that does not take it.
        ModelError: a model that answers one prompt at a time.
    """
    rows = at_once if deterministic else min(at_once, len(needs))
    step_size = CHUNK if deterministic else run.prefill_step_size
    chosen = replace(session.settings, prefill_step_size=step_size, caches=caches)

    def planned(count: int) -> tuple[MemoryPlan, Machine]:
        settings = replace(chosen, sequences=count, pool_tokens=pool_reservation(needs, count))
        return session.plan_with(settings, max(*needs, cached))

    def missing(count: int) -> int:
        made, machine = planned(count)
        return made.total - machine.limit_bytes

    if missing(rows) > 0:
        fitting = bisect_right(range(1, rows), 0, key=missing)
        way = f"--sequences {fitting} would fit" if fitting else "a smaller --max-tokens or --kv-bits takes less"
        raise ContextError(f"{describe(*planned(rows))}; {way}")
    with named_format(session.settings):
        pool = session.model.make_pool(
            pool_reservation(needs, rows),
            sequences=rows,
            quant_bit=chosen.kv_bits,
            quant_group=chosen.kv_group_size,
            bias_split=chosen.kv_bias_split,
            kernels=run.kernels,
            max_seq_len=max(needs),
            prefill_step_size=step_size,
        )
    check_drafts(asked_drafts(session, run), pool, deterministic=deterministic)
    if deterministic:
        with options.named("--deterministic"):
            Scheduler(session.model, pool, max_batch=rows, deterministic=True)
    session.reserved = most_tokens(session, run) or session.model.config.max_position_embeddings
    if not run.quiet:
        print(f"cache: {_describe(session, pool)}", file=sys.stderr)
    return pool


def drafts_beside(session: Session, run: RunOptions, pool: Pool) -> Drafts | None:
    """Where the answers of a pool draft from; a draft model's own pool is reserved, and that is printed.

    Raises:
        ArgumentError: a draft model that cannot take back a rejected draft.
    """
    drafts = asked_drafts(session, run)
    if not isinstance(drafts, ModelDrafts):
        return drafts
    made = drafts.beside_pool(pool)
    if not run.quiet:
        print(f"draft model: {run.draft_model}, {made.describe()}", file=sys.stderr)
    return made


def _describe(session: Session, pool: Pool) -> str:
    """The reservation in a line."""
    tokens, count = pool.num_pages * pool.page_size, pool.max_sequences
    kind = session.describe_format(sorted({layer.format.quant_group for layer in pool.layers} - {0}))
    at_once = f"{count} sequence{'s' if count > 1 else ''} at once"
    return f"{tokens} tokens reserved for {at_once}, {kind}, {format_bytes(pool.nbytes)}"
