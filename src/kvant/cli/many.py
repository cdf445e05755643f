"""What flags have in common that ask for many answers: a pool that is planned, reserved and printed."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from kvant.cache.pool import Pool
from kvant.cli import options
from kvant.cli.fitting import describe, plan_for
from kvant.cli.options import AUTO, BadValueError
from kvant.cli.session import RunOptions, Session, named_format
from kvant.engine.batch_stream import Piece, Wanted, stream_pieces
from kvant.engine.limits import pool_reservation
from kvant.engine.scheduler import CHUNK, Scheduler
from kvant.errors import ContextError
from kvant.operators.dispatch import VARIABLE
from kvant.sizes import format_bytes
from kvant.tools.plan import MemoryPlan, split_pairs

SEQUENCES = 8  # at once, where nobody says how many


@dataclass(frozen=True, slots=True)
class ManyOptions:
    """The flags of a command that answers through a pool.

    Raises:
        BadValueError: a number below 1.
    """

    sequences: Annotated[
        int | None,
        typer.Option(help=f"Of --prompts-file and --n: so many answers at once, at most; default: {SEQUENCES}."),
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="An answer does not depend on those beside it; it takes longer."),
    ] = False

    def __post_init__(self) -> None:
        options.check_counts(sequences=self.sequences)

    @property
    def at_once(self) -> int:
        """Answers at once, at most."""
        return self.sequences or SEQUENCES

    def check(self, run: RunOptions) -> None:
        """Refuse what a pool cannot do, before a model is loaded.

        Raises:
            BadValueError: there is something.
        """
        if self.deterministic and run.prefill_step_size < CHUNK:
            raise BadValueError(
                f"--prefill-step-size is {run.prefill_step_size}; --deterministic reads prompts in chunks of {CHUNK}"
            )


def longest_wanted(session: Session, run: RunOptions) -> int | None:
    """The tokens that a sequence may have by --max-kv-size; None: as many as the context. Of a pool auto says no more.

    Raises:
        ContextError: more than the model's context.
    """
    wanted, context = options.kv_size(run.max_kv_size), session.model.config.max_position_embeddings
    if wanted is None or wanted == AUTO:
        return None
    if context is not None and wanted > context:
        raise ContextError(f"--max-kv-size is {wanted}; the model's context is {context} tokens")
    return wanted


def answer_all(
    session: Session, run: RunOptions, many: ManyOptions, wanted: Sequence[Wanted], needs: Sequence[Sequence[int]]
) -> Iterator[Piece]:
    """Reserve a pool for requests, and answer them; the reservation is printed before the first token.

    Args:
        session: of :func:`kvant.cli.session.load_session`.
        run, many: the command's flags.
        wanted: the requests.
        needs: for each of them the tokens of its answers' sequences, of the first answer all, of others what they do
            not share with it.

    Raises:
        ContextError: the pool does not fit into this machine; the error says with how many at once it would.
        BadValueError: a format that the model's layers cannot have, or kernels that cannot read a pool.
    """
    single, longest = [tokens for each in needs for tokens in each], max(first for first, *_ in needs)
    rows = many.at_once if many.deterministic else min(many.at_once, len(single))
    step_size = CHUNK if many.deterministic else run.prefill_step_size

    def planned(at_once: int) -> MemoryPlan:
        tokens = pool_reservation(single, at_once)
        settings = replace(session.settings, sequences=at_once, pool_tokens=tokens, prefill_step_size=step_size)
        return plan_for(session.checkpoint, settings, longest, session.machine, split_pairs(session.model))

    made, limit = planned(rows), session.machine.limit_bytes
    if made.total > limit:
        fitting = next((count for count in range(rows - 1, 0, -1) if planned(count).total <= limit), 0)
        way = f"--sequences {fitting} would fit" if fitting else "a smaller --max-tokens or --kv-bits takes less"
        raise ContextError(f"{describe(made, session.machine)}; {way}")
    with named_format(session.settings):
        pool = session.model.make_pool(
            pool_reservation(single, rows),
            sequences=rows,
            quant_bit=session.settings.kv_bits,
            quant_group=session.settings.kv_group_size,
            bias_split=session.settings.kv_bias_split,
            kernels=run.kernels or os.environ.get(VARIABLE) or None,
            max_seq_len=longest,
            prefill_step_size=step_size,
        )
    if not run.quiet:
        print(f"cache: {_describe(session, pool)}", file=sys.stderr)
    scheduler = Scheduler(session.model, pool, max_batch=rows, deterministic=many.deterministic)
    return stream_pieces(scheduler, wanted, session.tokenizer)


def _describe(session: Session, pool: Pool) -> str:
    """The reservation in a line."""
    tokens, count = pool.num_pages * pool.page_size, pool.max_sequences
    kind = session.describe_format(sorted({layer.format.quant_group for layer in pool.layers} - {0}))
    at_once = f"{count} sequence{'s' if count > 1 else ''} at once"
    return f"{tokens} tokens reserved for {at_once}, {kind}, {format_bytes(pool.nbytes)}"
