"""Prompts that are in the pool before the first request: those of snapshots on disk."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.pool import Pool
from kvant.cache.snapshot import read_header
from kvant.errors import SnapshotError
from kvant.models import LanguageModel
from kvant.server.settings import Settings


def warm_start(settings: Settings, model: LanguageModel, pool: Pool, paths: Sequence[str]) -> None:
    """Let prompts begin with what prompt caches hold, as if a client had sent it; with keys, one of each.

    The pages are given up like any other where they are needed, least recently used first.

    Args:
        paths: files of ``kvant generate`` or ``kvant chat --prompt-cache-file``, or of ``ModelCache.save``.

    Raises:
        SnapshotError: a file that cannot be used, see :meth:`kvant.cache.ModelCache.load`; one of no tokens, or more
            than a sequence can have; more than fit into the pool together; or nothing that prompts of this model can
            share.
    """
    salts = settings.key_digests or (b"",)
    pages = 0
    for path in paths:
        length = read_header(Path(path)).length
        if not 0 < length <= pool.max_seq_len:
            raise SnapshotError(f"{path}: it holds {length} tokens; expected 1 to {pool.max_seq_len}, a sequence's")
        pages += pool.pages_needed(length) * len(salts)
        if pages > pool.num_pages:
            raise SnapshotError(f"{path}: with it {pages} pages are needed; the pool has {pool.num_pages}")
        cache = model.make_cache(
            length,
            quant_bit=settings.kv_bits,
            quant_group=settings.kv_group_size,
            bias_split=settings.kv_bias_split,
        )
        cache.load(path)
        for salt in salts:
            _share(pool, cache, salt, path)
    mx.eval([layer.arrays for layer in pool.layers])  # the engine's thread cannot compute what this one left undone


def _share(pool: Pool, cache: ModelCache, salt: bytes, path: str) -> None:
    """Put a cache's tokens into pages that prompts of a salt may begin with."""
    sequence = pool.sequence(cache.offset, salt=salt)
    sequence.load(cache)
    sequence.share_prefix(last_page=True)
    sequence.release()
    found = pool.sequence(cache.offset, cache.ids[0], salt=salt, whole_pages=False)
    held = found.length
    found.release()
    if not held:
        raise SnapshotError(f"{path}: nothing of its {cache.offset} tokens can be shared between prompts of this model")
