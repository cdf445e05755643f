"""A pool with the fused kernel, whose text runs on the host, against the unfused pool; and which layers
have it.
"""

from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.batches import asked
from support.key_transforms import drawn_format
from support.metal_host import host_pytest_skip
from support.pools import TEXT, close, prefill, tiny_model

from kvant.cache import CacheOptions
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.request import Request
from kvant.models import Decoder
from kvant.operators.exact_rows import SLACK

pytestmark = host_pytest_skip

WIDE = 4 * 64  # of four heads that the kernel takes


PROMPTS = [[(7 + 31 * i + 5 * b) % 290 for i in range(length)] for b, length in enumerate((3, 127, 256))]


@pytest.mark.parametrize(
    ("bits", "split"), [(8, None), (4, None), (0, None), *product((0, 84, 48), (False, True))]
)
def test_an_engine_on_the_kernels_text(
    tmp_path: Path, launches: list[Any], bits: int, split: bool | None
) -> None:
    """Plain, and with every part of a front: rotated, too, where no key bias is split off."""
    model, found = tiny_model(tmp_path, (None, 40), hidden_size=WIDE), []
    stored: dict[str, Any] = {"kv_bits": bits, "kv_group_size": 16}
    if split is not None:
        stored = {
            "kv_format": drawn_format(model, bits, rotates=not split, paired=split),
            "bias_split": split,
        }
    for kernels in ("unfused", None):
        assert not launches
        pool = model.make_pool(
            1024, sequences=3, options=CacheOptions.from_keywords(**stored, kernels=kernels)
        )
        engine = BatchEngine(model, pool, max_batch=3)
        answers = [asked(engine, Request(ids, 3)) for ids in PROMPTS]
        found.append([[token.token for token in answer] for answer in answers])
        assert engine.close(drain=True, timeout=60)
    assert found[0] == found[1]
    assert launches


@pytest.mark.parametrize("windows", [(None, None), (None, 40)])
def test_sequences_that_lack_some_of_their_exact_rows(
    tmp_path: Path, launches: list[Any], windows: tuple[int | None, ...]
) -> None:
    """One that went back as far as it can, its fork, and without windows one that began with pages of the
    first.
    """
    model = tiny_model(tmp_path, windows, hidden_size=WIDE)
    found = []
    for kernels in ("unfused", "fused"):
        options = CacheOptions(kv_bits=4, kv_group_size=16, kernels=kernels)
        pool = model.make_pool(2048, sequences=3, options=options)
        first = pool.sequence(300, TEXT[:200])
        prefill(model, pool, first, TEXT[:128])
        first.share_prefix()
        prefill(model, pool, first, TEXT[128:200])
        third = pool.sequence(300, TEXT[:150], whole_pages=False)
        sequences = [first, first.fork(), third]
        first.trim(SLACK)
        prefill(model, pool, sequences[2], TEXT[sequences[2].length : 150])
        launches.clear()
        outputs = []
        for new_tokens in (1, 3, 8, 1):
            batch = pool.batch(sequences)
            ids = mx.array([TEXT[b : b + new_tokens] for b in range(3)])
            outputs.append(model.hidden_states(ids, None, batch))
            mx.eval(outputs)
            batch.commit()
        found.append(mx.concatenate(outputs, axis=1))
        assert (len(launches) > 0) == (kernels == "fused")
        tails = [sequence.tail for sequence in sequences]
        last = 4 if any(windows) else 0
        assert [None if tail is None else tail.sinks for tail in tails] == [4, 4, last]
    assert close(found[1], found[0], 1e-3)


def test_which_layers_are_fused(
    tmp_path: Path, fused_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backends(model: Decoder, **options: Any) -> set[str | None]:
        pool = model.make_pool(512, sequences=1, options=CacheOptions(kv_group_size=16, **options))
        return {pool.backend, *(layer.backend for layer in pool.layers)}

    wide, narrow = (
        tiny_model(tmp_path / "wide", (None, 40), hidden_size=WIDE),
        tiny_model(tmp_path / "narrow"),
    )
    assert backends(wide) == backends(wide, kernels="fused") == {"metal"}
    assert backends(wide, kernels="unfused") == backends(narrow) == {None}
    with pytest.raises(ValueError, match="does not take head_dim 16; it takes 64"):
        backends(narrow, kernels="fused")
    monkeypatch.setenv("KVANT_KERNELS", "unfused")
    assert backends(wide) == {None}
    assert backends(wide, kernels="fused") == {"metal"}
