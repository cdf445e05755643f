"""A model's view of a pool in one step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from kvant.cache.deferred_writes import DeferredWrites
from kvant.cache.layer_group import LayerGroup, PageTable, PoolLayer
from kvant.cache.pages import pages_for, runs
from kvant.cache.pool_sequence import PoolSequence
from kvant.operators.cpu_paged_attention import computes_at_once
from kvant.operators.kernels.attend import MAX_NEW_TOKENS
from kvant.operators.key_transform import KeyTransform
from kvant.operators.paged_attention import multi_head_cache_attention
from kvant.operators.paged_kernel import step_pages
from kvant.operators.paged_rows import PagedRows

if TYPE_CHECKING:
    from kvant.cache.pool import Pool


class AttentionCache(Protocol):
    """A model layer's view of its cache. B batch, S new tokens, H query and K kv heads, D head_dim."""

    @property
    def transform(self) -> KeyTransform:
        """Return the transform that the caller applies to queries and keys, with the biases they lack."""

    def multi_head_cache_attention(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append keys and values (B, K, S, D), then attend queries (B, H, S, D) causally to all tokens.

        With a window, a query sees only the last tokens.

        Args:
            mask: for one sequence, added to the scores (boolean: True keeps): (S, T), (H, S, T) or
                (B, H, S, T) with T = offset + S, where H and B may be 1.
            sinks: (H,) learned scores, which take a share of the softmax and contribute no value.

        Returns:
            (B, H, S, D).
        """


class PoolBatch:
    """The cache for steps of sequences of different lengths. ``pool.batch`` makes it.

    A step has three phases: :meth:`begin`, the computation, in which every layer attends through
    ``batch[i].multi_head_cache_attention``, and :meth:`commit`. Only committed tokens count. The next step
    overwrites the rows of one that failed or was interrupted. A batch serves any number of steps.

    Evaluate a step before another one of the same pool begins, unless that one depends on its result;
    otherwise MLX copies the layers' arrays to preserve what the first step reads.
    """

    def __init__(self, pool: "Pool", sequences: Sequence[PoolSequence], rows: int | None = None) -> None:
        self.pool = pool
        self.lock = pool.lock
        self.sequences = tuple(sequences)  # B of them
        count = len(self.sequences)
        # Rows of the inputs, B or more. Those past B are padding: not written, and their attention is 0.
        self.rows = count if rows is None else rows
        if not count or len({id(sequence) for sequence in self.sequences}) != count:
            raise ValueError(f"a batch of {count} sequences; expected at least one, none twice")
        if any(sequence.pool is not pool for sequence in self.sequences):
            raise ValueError("a sequence of another pool; expected those of this one")
        if type(self.rows) is not int or self.rows < count:
            raise ValueError(f"rows is {rows!r}; expected an int of at least {count}, one row per sequence")
        self.step: mx.array | None = None  # token ids (rows, S) of the uncommitted step
        # (rows, S, hidden) of the step's tokens; None: look up the ids
        self.embeddings: mx.array | None = None
        self._next_embeddings: mx.array | None = None
        # (rows, S, width) what the model's last layer makes of the step's tokens; None: no head asks for it
        self._hidden: mx.array | None = None
        self._placed: dict[LayerGroup, PagedRows] = {}
        self.deferred = DeferredWrites(self.sequences, is_single=pool.single)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[AttentionCache]:
        return (PoolLayerView(self, group, layer) for group, layer in self.pool.places)

    def __len__(self) -> int:
        return len(self.pool.layers)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the length of each sequence, which is its next token's position; 0 for padding."""
        return (*(sequence.length for sequence in self.sequences), *(0,) * (self.rows - len(self.sequences)))

    @property
    def offset(self) -> int:
        """Return the length of the longest sequence."""
        return max(self.lengths)

    @property
    def computes_at_once(self) -> bool:
        """Return whether attention is computed at the call, as for a long sequence on a CPU."""
        return computes_at_once(self.offset + 1)

    @property
    def ids(self) -> list[list[int]]:
        """Return the token ids of each sequence."""
        return [sequence.ids for sequence in self.sequences]

    def give_embeddings(self, embeddings: mx.array) -> None:
        """Make the next step read these embeddings (rows, S, hidden) instead of those of its ids."""
        self._next_embeddings = embeddings

    def give_hidden(self, hidden: mx.array) -> None:
        """Keep the states (rows, S, width) of a step that was begun: each sequence keeps its last token's."""
        self._hidden = hidden

    def hidden_before(self, width: int, dtype: mx.Dtype) -> mx.array:
        """The states (rows, 1, width) behind the last committed tokens; zeros if they are not known."""
        known = [sequence.hidden for sequence in self.sequences]
        rows = [mx.zeros(width, dtype) if each is None else each[0][each[1]] for each in known]
        rows += [mx.zeros(width, dtype)] * (self.rows - len(known))
        return mx.stack(rows)[:, None]

    def begin(self, inputs: mx.array) -> tuple[int, ...]:
        """Begin a step of token ids (rows, S), discarding uncommitted steps of its sequences.

        Returns the position of each row's first new token, 0 for padding.
        """
        embeddings = self._next_embeddings
        self._next_embeddings = None  # also if the step is rejected
        num_rows, S = inputs.shape
        if num_rows != self.rows:
            raise ValueError(f"inputs has {num_rows} sequences; expected {self.rows}")
        if self.pool.prefill_step_size < S:
            raise ValueError(f"{S} new tokens in one step; the pool takes {self.pool.prefill_step_size}")
        with self.lock, self.pool.handing_out():
            for sequence in self.sequences:
                sequence.check_room(S)
            self.deferred.write()
            every = self.lengths
            lengths = every[: len(self.sequences)]
            placed = {}
            exact = None
            if self.pool.tails is not None:
                spans = [sequence.tail for sequence in self.sequences if sequence.tail is not None]
                is_fused = self.pool.backend is not None
                exact = self.deferred.place_tails(spans, lengths, S, fused=is_fused)
            for number, group in enumerate(self.pool.groups):
                tables = [sequence.tables[number] for sequence in self.sequences]
                rows = self.deferred.place(group, tables[0], S)
                if rows is None:
                    group.make_room(tables, lengths, S)
                    rows = place_rows(group, tables, lengths, S)
                placed[group] = replace(rows, exact=exact)
            self._placed = placed
            self.step = inputs
            self.embeddings = embeddings
            for sequence in self.sequences:
                sequence.step = self.step
            return every

    def commit(
        self, num_tokens: int | Sequence[int] | None = None, *, ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Commit the tokens of the step, except for sequences released since it began.

        Args:
            num_tokens: how many of its first tokens to commit, one int for all or one per sequence; None:
                all.
            ids: the step's token ids, a list per sequence; None: those that the step began with.
        """
        with self.lock, self.pool.handing_out():
            step = self.step
            count = len(self.sequences)
            live = [(b, sequence) for b, sequence in enumerate(self.sequences) if not sequence.released]
            if step is None or any(sequence.step is not step for _, sequence in live):
                raise RuntimeError(
                    "no step to commit: none was begun, or a sequence was trimmed or began another one since"
                )
            S = step.shape[1]
            each = (
                num_tokens
                if isinstance(num_tokens, Sequence)
                else [S if num_tokens is None else num_tokens] * count
            )
            if len(each) != count or any(type(number) is not int or not 0 <= number <= S for number in each):
                raise ValueError(
                    f"num_tokens is {num_tokens}; expected ints up to {S}, one for all or {count}"
                )
            rows: Sequence[Sequence[int]] = step.tolist() if ids is None else ids  # type: ignore[assignment]
            new = [list(rows[b][: each[b]]) for b in range(count)]
            if any(len(row) != number for row, number in zip(new, each, strict=True)):
                raise ValueError(f"ids has {[len(row) for row in rows]} tokens; expected {list(each)}")
            if self.deferred.tails:
                self.deferred.commit(each)
            for b, sequence in live:
                sequence.commit(new[b], None if self._hidden is None else (self._hidden, (b, each[b] - 1)))
            self.end_step()

    def end_step(self) -> None:
        """Drop the uncommitted step."""
        self.deferred.write()
        self.step = None
        self.embeddings = None
        self._next_embeddings = None
        self._hidden = None
        self._placed = {}

    def placed(self, group: LayerGroup) -> PagedRows:
        """Return the rows of the step's tokens in a group of layers."""
        if self.step is None:
            raise RuntimeError("no step was begun; expected begin before attention")
        return self._placed[group]


@dataclass(eq=False, slots=True)
class PoolLayerView:
    """A model's view of a pool's layer in a step."""

    batch: PoolBatch
    group: LayerGroup
    layer: PoolLayer

    @property
    def transform(self) -> KeyTransform:
        return self.layer.transform

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays that what was appended is in."""
        return [*self.layer.arrays, *self.layer.exact_arrays, *self.batch.deferred.arrays]

    def multi_head_cache_attention(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        transform = self.layer.transform
        if sinks is not None and transform.center is not None:
            raise ValueError(
                "keys are stored without a constant, which would change the share of learned sinks"
            )
        layer = self.layer
        output, waiting = multi_head_cache_attention(
            query,
            key,
            value,
            layer.arrays,
            self.batch.placed(self.group),
            **layer.operands,
            mask=mask,
            bias_split=transform.bias_split,
            sinks=sinks,
            backend=layer.backend,
            exact_arrays=layer.exact_arrays,
        )
        if any(waiting):
            exact = self.batch.deferred.add(self.group, layer, waiting)
            if exact:
                (output,) = mx.depends([output], exact)
        return output


def place_rows(
    group: LayerGroup, tables: Sequence[PageTable], lengths: Sequence[int], new_tokens: int
) -> PagedRows:
    """Return where S new tokens of each sequence are written, and the rows that their queries read."""
    first = [group.first_read(length) for length in lengths]
    new = []
    read = []
    counts = []
    for table, length, seen in zip(tables, lengths, first, strict=True):
        end = length + new_tokens - table.start
        new.append(runs(table.pages, length - table.start, end))
        read.append(runs(table.pages, seen - table.start, end))
        counts.append(end)
    pages = None
    if group.is_fused and new_tokens <= MAX_NEW_TOKENS:
        used = [table.pages[: pages_for(count)] for table, count in zip(tables, counts, strict=True)]
        pages = step_pages(used, [table.start for table in tables], lengths, max(counts), group.window)
    if len(new) == 1:
        return PagedRows(new[0], read, first, group.window, pages)
    rows = [row for sequence_runs in new for run in sequence_runs for row in range(*run)]
    return PagedRows(mx.array(rows, mx.int32), read, first, group.window, pages)
