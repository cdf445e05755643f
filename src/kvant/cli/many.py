"""What the flags share that answer many prompts, or one several times: a pool that is planned, reserved and printed."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvant.cache.pool import Pool
from kvant.cli.fitting import describe, plan_for
from kvant.cli.session import RunOptions, Session, named_format
from kvant.engine.batch_stream import Piece, Wanted, stream_pieces
from kvant.engine.limits import pool_reservation
from kvant.engine.scheduler import Scheduler
from kvant.errors import ContextError
from kvant.operators.dispatch import VARIABLE
from kvant.sizes import format_bytes
from kvant.tools.plan import MemoryPlan, Settings, split_pairs

SEQUENCES = 8  # at once, where nobody says how many


def answer_all(
    session: Session,
    run: RunOptions,
    wanted: Sequence[Wanted],
    needs: Sequence[Sequence[int]],
    sequences: int,
    *,
    deterministic: bool,
) -> Iterator[Piece]:
    """Reserve a pool for requests, and answer them; the reservation is printed before the first token.

    Args:
        wanted: the requests.
        needs: for each of them the tokens that its answers' sequences have of their own.
        sequences: answers at once, at most. Where it is deterministic, every step has so many rows.

    Raises:
        ContextError: the pool does not fit into this machine; the error says with how many at once it would.
        BadValueError: a format that the model's layers cannot have, or kernels that cannot read a pool.
    """
    single = [tokens for each in needs for tokens in each]
    rows = sequences if deterministic else min(sequences, len(single))
    longest = max(first for first, *_ in needs)

    def settings(at_once: int) -> Settings:
        tokens = pool_reservation(single, at_once)
        return replace(session.settings, sequences=min(rows, at_once), pool_tokens=tokens)

    def planned(at_once: int) -> MemoryPlan:
        return plan_for(session.checkpoint, settings(at_once), longest, session.machine, split_pairs(session.model))

    made, limit = planned(sequences), session.machine.limit_bytes
    if made.total > limit:
        fitting = next((count for count in range(rows - 1, 0, -1) if planned(count).total <= limit), 0)
        way = f"--sequences {fitting} would fit" if fitting else "--max-tokens or --kv-bits 4 would make it smaller"
        raise ContextError(f"{describe(made, session.machine)}; {way}")
    with named_format(session.settings):
        pool = session.model.make_pool(
            pool_reservation(single, sequences),
            sequences=rows,
            quant_bit=session.settings.kv_bits,
            quant_group=session.settings.kv_group_size,
            bias_split=session.settings.kv_bias_split,
            kernels=run.kernels or os.environ.get(VARIABLE) or None,
            max_seq_len=longest,
            prefill_step_size=session.settings.prefill_step_size,
        )
    if not run.quiet:
        print(f"cache: {describe_pool(session, pool)}", file=sys.stderr)
    scheduler = Scheduler(session.model, pool, max_batch=rows, deterministic=deterministic)
    return stream_pieces(scheduler, wanted, session.tokenizer)


def describe_pool(session: Session, pool: Pool) -> str:
    """The reservation in a line."""
    tokens = pool.num_pages * pool.page_size
    at_once = f"{pool.max_sequences} sequence{'s' if pool.max_sequences > 1 else ''} at once"
    return (
        f"{tokens} tokens reserved for {at_once}, {session.describe_format(pool.groups)}, {format_bytes(pool.nbytes)}"
    )
