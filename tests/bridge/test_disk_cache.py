"""What a disk cache has of a text is read after a restart, and tokens are those of a server without one."""

import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import architectures as table
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bridged import REFUSED, bridged
from support.counts import at_widths, count
from support.pools import check_pages
from support.tiny_models import CONFIGS
from support.turns import SIZES, TWO, ask, fresh_answers, run, server, turn

from kvant.bridge.model import BridgedModel
from kvant.cache import Identity
from kvant.cache.disk import DiskCache
from kvant.cache.layer_group import LayerGroup
from kvant.cache.pool_disk import PageGoneError, PoolDisk, packed, unpacked
from kvant.cache.prefix import digests
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.scheduler import Scheduler

# keys alone; gated delta rule and keys; Mamba alone, and beside keys; convolutions; latent attention; windows
WINDOWS = {
    "gpt_oss": {"sliding_window": 128},
    "gemma3_text": {"sliding_window": 128},
    "llama4": {"text_config": CONFIGS["llama4"]["text_config"] | {"attention_chunk_size": 128}},
}
NAMES = ["qwen3", "qwen3_next", "mamba2", "falcon_h1", "lfm2", "kimi_linear", "gpt_oss", "gemma3_text"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskCache]:
    made = DiskCache(tmp_path / "cache", 10**9)
    yield made
    made.close()


def _model(name: str, weights: str = "a", **changes: Any) -> BridgedModel:
    model = bridged(name, **changes)
    model.identity = Identity(weights * 64, "b" * 64)
    return model


def _run(scheduler: Scheduler, *prompts: list[int], **options: Any) -> list[tuple[list[int], int]]:
    """The tokens of each prompt's answer, and how many of the prompt's were read from elsewhere."""
    return [(answer, first.cached_tokens) for answer, first in run(scheduler, *prompts, **options)]


@pytest.mark.parametrize(
    ("name", "bits"),
    count(
        [
            *at_widths(NAMES),
            *((f"{name} of pages", bits) for name in ("gpt_oss", "gemma3_text") for bits in (0, 8)),
        ],
        [*product(sorted(set(table.measured()) - REFUSED.keys() - {"gpt2"}), [0, 8]), *product(NAMES, [4])]
        + [(f"{name} of pages", bits) for name in WINDOWS for bits in (0, 8, 4)],
    ),
)
def test_a_turn_reads_only_what_is_new(name: str, bits: int, disk: DiskCache) -> None:
    """Two conversations with the same system prompt, at once: of a server that goes on, and of restarted
    ones.

    Where there is no state, whole pages are read from the disk, and fewer than 16 tokens of a page are fed
    and not copied. Tokens are a fresh server's. Quantized, a restarted one's can be those of the one that
    goes on: a chunk that begins elsewhere can round a value that lies on an edge to another number, as
    without a disk.
    """
    name, _, of_pages = name.partition(" ")
    model, rng = _model(name, **(WINDOWS[name] if of_pages else {})), random.Random(0)
    going_on, pool = server(model, kv_bits=bits)
    # Of a window that is no number of pages its first page may be gone by the end of a page.
    whole = all(part.window is None or part.window % 128 == 0 for part in pool.groups)
    system = turn(rng, 150)
    texts = [[*system, *turn(rng, length)] for length in (61, 200)]
    known, stored = [0, len(system)], list[int]()
    for _ in range(3):
        answers, fresh = _run(going_on, *texts), fresh_answers(model, *texts, kv_bits=bits)
        copied = [each if pool.states or each % 128 >= 16 else each // 128 * 128 for each in known]
        assert [cached for _, cached in answers] == copied
        assert bits == 4 or [answer for answer, _ in answers] == fresh
        restarted, own = server(model, disk, kv_bits=bits)  # everything it knows is on disk
        again = _run(restarted, *texts)
        if whole:
            read = [each if pool.states else each // 128 * 128 for each in stored]
            assert [cached for _, cached in again][: len(read)] == read
        assert [answer for answer, _ in again] in (fresh, [answer for answer, _ in answers])
        check_pages(own, [])
        # but the last
        stored = [len(text) + len(answer) - 1 for text, (answer, _) in zip(texts, again, strict=True)]
        known = [len(text) + len(answer) - 1 for text, (answer, _) in zip(texts, answers, strict=True)]
        for text, (answer, _) in zip(texts, answers, strict=True):
            text += [*answer, *turn(rng, 40)]
        assert disk.flush(30)
    check_pages(pool, [])
    if whole:
        other = [*system, *turn(rng, 50)]
        assert _run(server(model, disk, kv_bits=bits)[0], other)[0][1] == (150 if pool.states else 128)
    assert disk.counts.dropped == 0


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_the_logits_are_those_without_a_break(name: str, disk: DiskCache) -> None:
    """Bit for bit, after the same chunks; the bytes of pages and states too."""
    model, rng = _model(name), random.Random(1)
    text = turn(rng, 300)
    logits = []
    for place in (0, 256):
        pool = model.make_pool(**SIZES)
        pool.use_disk(disk)
        while pool.prefixes.fetch(text[: place + 1], most=1):
            assert place
        sequence = pool.sequence(400, text[: place + 1])
        assert sequence.length == place
        for start in range(place, 256, 64):
            mx.eval(model.feed(mx.array([text[start : start + 64]]), batch := pool.batch([sequence])))
            batch.commit()
        sequence.share_prefix()
        assert disk.flush(30)
        logits.append(model.next_logits(mx.array([text[256:]]), pool.batch([sequence])))
        mx.eval(logits)
    assert mx.array_equal(*logits)


def test_nothing_is_read_that_is_of_others(disk: DiskCache) -> None:
    """Of another model, format or client, or of chunks that a deterministic server does not feed."""
    model, text = _model("qwen3_next", **TWO["qwen3_next"]), turn(random.Random(2), 300)
    ((answer, _),) = _run(server(model, disk)[0], text, salt=b"one")
    prompt = [*text, *answer, 5]
    disk.flush(30)
    for other, changes, options in (
        (model, {"kv_bits": 4}, {}),
        (model, {"kv_bits": 0}, {}),
        (model, {"kv_group_size": 8}, {}),
        (model, {}, {"salt": b"two"}),
        (model, {}, {"salt": b""}),
        (model, {"deterministic": True, "prefill_step_size": 128}, {}),
        (_model("qwen3_next", "c", **TWO["qwen3_next"]), {}, {}),
    ):
        assert _run(server(other, disk, **changes)[0], prompt, **{"salt": b"one"} | options)[0][1] == 0
    assert _run(server(model, disk)[0], prompt, salt=b"one")[0][1] == len(prompt) - 2
    nameless = bridged("qwen3_next")
    nameless.identity = None
    with pytest.raises(ValueError, match="was not loaded from a folder"):
        nameless.make_pool(**SIZES).use_disk(disk)


def test_a_deterministic_server_reads_its_own(disk: DiskCache) -> None:
    model, text = _model("qwen3"), turn(random.Random(2), 300)
    for known in (0, 256):
        scheduler, _ = server(model, disk, deterministic=True, prefill_step_size=128)
        assert _run(scheduler, [*text, 5])[0][1] == known
        disk.flush(30)


def _any_turns(
    model: BridgedModel, data: st.DataObject, disk: DiskCache | None = None, kv_bits: int = 8
) -> None:
    """Whatever was given up meanwhile, tokens are a fresh server's, and nothing is lost or held twice."""
    rng, deterministic = (
        random.Random(data.draw(st.integers(0, 9))),
        disk is None and data.draw(st.booleans()),
    )
    drawn = {
        "tokens": data.draw(st.sampled_from([768, 1152])),
        "checkpoints": data.draw(st.sampled_from([1, 2, 4])),
    }
    drawn |= {
        "prefill_step_size": 128,
        "max_seq_len": 512,
        "kv_bits": kv_bits,
        "deterministic": deterministic,
    }
    scheduler, pool = server(model, disk, **drawn)
    systems = [turn(rng, length) for length in (20, 128, 150)]
    texts = [[*system, *turn(rng, 30)] for system in systems] + [[*systems[2], *turn(rng, 50)]]
    for _ in range(data.draw(st.integers(2, 5 if disk is None else 4))):
        if disk is not None and data.draw(st.booleans()):
            _harm(disk, data, rng)
            scheduler, pool = server(model, disk, **drawn)
        chosen = [list(text) for text in data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=3))]
        answers = [answer for answer, _ in run(scheduler, *chosen, max_tokens=5)]
        assert answers == fresh_answers(model, *chosen, max_tokens=5, **drawn)
        check_pages(pool, [])
        for text in texts:
            if text in chosen and len(text) < 400:
                text += [*answers[chosen.index(text)], *turn(rng, data.draw(st.integers(1, 60)))]


def _harm(disk: DiskCache, data: st.DataObject, rng: random.Random) -> None:
    """Some files go, or are cut."""
    disk.flush(30)
    files = sorted(disk.folder.glob("*.kv"))
    for path in data.draw(st.lists(st.sampled_from(files), max_size=4, unique=True)) if files else ():
        if data.draw(st.booleans()):
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: rng.randrange(200)])


@settings(max_examples=count(12, 300))
@given(data=st.data())
@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_any_turns_under_eviction(name: str, data: st.DataObject) -> None:
    _any_turns(bridged(name, **TWO[name]), data)


@settings(max_examples=count(6, 300))
@given(data=st.data())
@pytest.mark.parametrize("name", TWO)
def test_any_files_that_go_or_are_wrong(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """And however small the disk is."""
    disk = DiskCache(tmp_path_factory.mktemp("disk") / "cache", data.draw(st.sampled_from([60_000, 10**8])))
    # of gpt-oss's values some lie on an edge, and a fresh server's chunks differ
    _any_turns(_model(name, **TWO[name]), data, disk, kv_bits=0 if name == "gpt_oss" else 8)
    disk.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "gpt_oss", "llama4"])
def test_a_conversation_is_gone_on_with(name: str, disk: DiskCache) -> None:
    model, text = _model(name, **WINDOWS.get(name, {})), turn(random.Random(3), 300)

    def cache(used: DiskCache | None) -> Any:
        made = model.make_cache(700, kv_bits=8, checkpoints=6)
        if used is not None:
            made.use_disk(used)
        return made

    _, answer = ask(model, cache(disk), text)
    disk.flush(30)
    behind = [*text, *answer, *turn(random.Random(4), 40)]
    known = len(text) + len(answer) - 1
    read, tokens = ask(model, gone_on := cache(disk), behind)
    assert read == (known if name == "qwen3_next" else known // 128 * 128)
    assert tokens == ask(model, cache(None), behind)[1]
    assert ask(model, gone_on, [*behind, *tokens, 7, 8])[0] >= len(behind)
    for path in disk.folder.glob("*.kv"):
        path.write_bytes(b"wrong")
    assert ask(model, cache(disk), behind) == (0, tokens)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "gpt_oss", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_one_answer_heals_its_text(name: str, every: int, disk: DiskCache) -> None:
    """However many of its files are wrong, the next server reads as much of it as if none had been."""
    model, rng = _model(name, **WINDOWS.get(name, {})), random.Random(5)
    text = turn(rng, 500)
    ((answer, _),) = _run(server(model, disk)[0], text)
    text += [*answer, *turn(rng, 40)]
    disk.flush(30)
    for path in sorted(disk.folder.glob("*.kv"))[::every]:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    ((answer, _),) = _run(server(model, disk)[0], text)
    for behind in ([], [*answer, *turn(rng, 30)]):
        disk.flush(30)
        text += behind
        ((again, known),) = _run(server(model, disk)[0], text)
        assert again == fresh_answers(model, text)[0]
        assert known >= 500


def _written(model: BridgedModel, disk: DiskCache) -> list[int]:
    """Return a conversation's text, which has been written to the disk."""
    cache = model.make_cache(900, kv_bits=8)
    cache.use_disk(disk)
    text = turn(random.Random(3), 700)
    ask(model, cache, text)
    disk.flush(30)
    return text


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_conversation_removes_what_is_behind_a_wrong_page(
    name: str, disk: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layer groups: only the pages before the wrong one were seen to be right."""
    model = _model(name, **WINDOWS.get(name, {}))
    text = _written(model, disk)
    cache = model.make_cache(900, kv_bits=8)
    cache.use_disk(disk)
    hashes = digests(text, b"")
    pool_disk = cache.pool.disk
    assert pool_disk is not None
    read = PoolDisk.page

    def page(self: PoolDisk, group: LayerGroup, digest: bytes, rows: int) -> list[mx.array]:
        if group.window is None and digest == hashes[2]:
            raise PageGoneError("wrong")
        return read(self, group, digest, rows)

    monkeypatch.setattr(PoolDisk, "page", page)
    assert all(pool_disk.has(group, hashes[4]) for group in cache.pool.groups)
    cache.pool.prefixes.read_into(cache.sequence, [*text, 5])
    assert cache.offset == 0
    main = cache.pool.main
    assert [pool_disk.has(main, digest) for digest in hashes] == [True, True, False, False, False]
    assert not any(pool_disk.has(group, hashes[4]) for group in cache.pool.groups)


def test_other_errors_while_reading_are_raised(disk: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the rest of the code misses is no page that is gone."""
    model = _model("qwen3")
    prompt = [*_written(model, disk), 5]
    cache = model.make_cache(900, kv_bits=8)
    cache.use_disk(disk)
    pool = model.make_pool(**SIZES)
    pool.use_disk(disk)

    def fail(*_: object) -> None:
        raise FileNotFoundError("another file")

    monkeypatch.setattr(LayerGroup, "put_page", fail)
    for read in (
        lambda: cache.pool.prefixes.read_into(cache.sequence, prompt),
        lambda: pool.prefixes.fetch(prompt, most=9),
    ):
        with pytest.raises(FileNotFoundError):
            read()


def test_a_whole_file_of_something_else_is_none(disk: DiskCache) -> None:
    model, text = _model("qwen3_next", **TWO["qwen3_next"]), turn(random.Random(2), 300)
    ((answer, _),) = _run(server(model, disk)[0], text)
    prompt = [*text, *answer, 5]
    expected = fresh_answers(model, prompt)[0]
    wrong: list[list[mx.array | None]] = [[mx.zeros(3)], [], [None] * 50, [mx.zeros((1, 9, 9, 9))] * 50]
    for arrays, is_single in product(wrong, (False, True)):
        disk.flush(30)
        for path in disk.folder.glob("*.kv"):
            disk.remove(path.stem)
            disk.put(path.stem, 100, partial(packed, arrays))
        disk.flush(30)
        scheduler = server(model, disk)[0]
        if is_single:
            cache = model.make_cache(512, kv_bits=8, checkpoints=6)
            cache.use_disk(disk)
            scheduler = CacheScheduler(model, cache, prefill_step_size=64)
        assert _run(scheduler, prompt) == [(expected, 0)]


def test_arrays_as_bytes() -> None:
    arrays = [mx.random.normal((1, 2, 3)).astype(kind) for kind in (mx.float32, mx.bfloat16, mx.float16)]
    arrays += [None, mx.zeros((2, 0, 3), mx.uint8), mx.array([[1, 2]], mx.int8)]
    data = packed(arrays)
    for one, other in zip(unpacked(data, len(arrays)), arrays, strict=True):
        assert one is None if other is None else one.dtype == other.dtype and mx.array_equal(one, other)
    cut = [data[:-1], data[:9], b"", data[:8] + b"x" + data[9:], data + b"x"]
    for wrong in (*cut, *(_file(text) for text in ("null", "[]", "{", '{"0": null}', "[" * 5000))):
        with pytest.raises((ValueError, RecursionError), match=r"."):
            unpacked(wrong, len(arrays))
    for name, dtype in (("6", "U8"), ("00", "U8"), ("x", "U8"), ("0", "F64")):
        entry = {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}
        header = {"__metadata__": {"arrays": str(len(arrays))}, name: entry}
        with pytest.raises(ValueError, match="expected"):
            unpacked(_file(json.dumps(header)), len(arrays))
    for other_count in (len(arrays) - 1, len(arrays) + 1):
        with pytest.raises(ValueError, match="expected"):
            unpacked(data, other_count)


def _file(header: str) -> bytes:
    """Return a safetensors file with a header and nothing behind it."""
    return len(header).to_bytes(8, "little") + header.encode()


def test_a_disk_cache_has_safetensors_files(tmp_path: Path) -> None:
    """Behind a digest: MLX's own reader takes them."""
    arrays = {"0": mx.random.normal((1, 2, 3)), "2": mx.array([[1, 2]], mx.int8)}
    path = tmp_path / "page.safetensors"
    path.write_bytes(packed([arrays["0"], None, arrays["2"]]))
    read = mx.load(str(path))
    assert isinstance(read, dict)
    assert read.keys() == arrays.keys()
    assert all(mx.array_equal(read[name], arrays[name]) for name in arrays)
