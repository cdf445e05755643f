"""A fused kernel that fails in a step of many requests: every answer goes on, and what a pool holds is right."""

import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors
from support.batches import ids_of, run_all, scheduler_of
from support.failing_kernel import WORDS, FailingKernel
from support.metal_host import host_pytest_skip
from support.pools import check_pages, tiny_model
from support.tiny_models import CONFIGS, build

from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.cache.pool import Pool
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.request import Request, Token
from kvant.engine.run import Run
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder
from kvant.operators import dispatch, fused_attention
from kvant.sample_utils import make_sampler

pytestmark = host_pytest_skip

WINDOWS = (None, 40, 200)
SHARED = [(7 + 31 * i) % 290 for i in range(260)]
PROMPTS = [SHARED[:3], SHARED[100:227], [*SHARED, 5], [*SHARED, 8, 9]]
Fail = Callable[..., FailingKernel]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Layers of which some have windows, with biases that are split off."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), WINDOWS, hidden_size=256)


@pytest.fixture
def fail(fused_calls: Any, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """A function that puts a failing kernel in place."""

    def put(how: str, first: int) -> FailingKernel:
        kernel = FailingKernel(how, first)
        monkeypatch.setattr(fused_attention, "attend", kernel)
        monkeypatch.setattr(dispatch, "_warned", False)
        monkeypatch.setattr(dispatch, "_given_up", None)
        return kernel

    return put


def requests() -> list[Request]:
    """Of different lengths, with beginnings that are shared, forks, and one that has to see its tokens."""
    return [
        *(Request(ids, 6 + 3 * number) for number, ids in enumerate(PROMPTS)),
        Request([*SHARED, 7], 8, make_sampler(temp=1.0, seed=4), answers=3),
        Request(SHARED[:130], 9, logits_processors=make_logits_processors(None, 1.3, 20)),
    ]


def answered(model: Decoder, kernels: str | None, **options: Any) -> tuple[list[list[int]], Any]:
    """The tokens of all answers, twice: those of the second time begin with pages of the first. And the pool."""
    pool_options = {"kernels": kernels, "max_seq_len": 500}
    scheduler, pool = scheduler_of(model, 0, max_batch=5, pool=pool_options, **options)
    found = []
    for _ in range(2):
        asked = requests()
        told = run_all(scheduler, asked)
        assert not [token.error for tokens in told.values() for token in tokens if token.error]
        found += [ids_of(told[request], answer) for request in asked for answer in range(request.answers)]
    return found, pool


@pytest.fixture(scope="module")
def expected(tiny: Decoder) -> dict[bool, list[list[int]]]:
    """The tokens of an unfused pool, deterministic or not."""
    return {deterministic: answered(tiny, "unfused", deterministic=deterministic)[0] for deterministic in (False, True)}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("how", "first"), [("build", 2), ("eval", 2), ("build", 23), ("eval", 8), ("eval", 23), ("eval", 50)]
)
def test_every_answer_goes_on(
    tiny: Decoder, fail: Fail, expected: dict[bool, list[list[int]]], how: str, first: int, deterministic: bool
) -> None:
    """In a prompt, and in steps that are read or queued."""
    kernel = fail(how, first)
    with pytest.warns(RuntimeWarning, match=f"failed in a run: .*{WORDS[how]}") as caught:
        found, pool = answered(tiny, None, deterministic=deterministic)
    assert len(caught) == 1
    assert found == expected[deterministic]
    assert first <= kernel.calls < first + 2 * len(WINDOWS)  # the step that failed, and one that was built behind it
    assert pool.backend is None
    assert pool.num_free == pool.num_pages
    check_pages(pool, [])


def test_states_are_computed_again(fused_calls: Any, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linear layers, which go back to nothing alone, beside windows' and whole layers' rows."""
    monkeypatch.setitem(CONFIGS, "qwen3_next", CONFIGS["qwen3_next"] | {"head_dim": 64})
    model = BridgedModel(build("qwen3_next")[0], BridgedConfig("qwen3_next", 100_000, None), mx.float32)
    found = []
    for kernels in ("unfused", None):
        if kernels is None:
            fail("eval", 11)
        pool = model.make_pool(2048, sequences=3, max_seq_len=300, quant_bit=0, kernels=kernels)
        scheduler = Scheduler(model, pool, max_batch=3)
        asked = [Request([(5 * i + b) % 97 for i in range(length)], 9) for b, length in enumerate((30, 3, 140))]
        if kernels is None:
            assert pool.backend == "metal"
            with pytest.warns(RuntimeWarning, match="failed in a run"):
                told = run_all(scheduler, asked)
        else:
            told = run_all(scheduler, asked)
        found.append([ids_of(told[request]) for request in asked])
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["build", "eval"])
def test_a_cache_that_is_kept_goes_on(tiny: Decoder, fail: Fail, how: str) -> None:
    """The kernel fails where the last token of an answer is fed alone, between two tokens of the others."""
    found = []
    for kernels in ("unfused", None):
        kernel = fail(how, 10**6)
        scheduler, pool = scheduler_of(tiny, 0, max_batch=3, pool={"kernels": kernels, "max_seq_len": 500})
        asked = [Request(SHARED[:20], 12), Request(SHARED[:30], 5, keep_cache=True), Request(SHARED[:25], 12)]
        for request in asked:
            scheduler.submit(request)
        told: list[Token] = []
        leave = scheduler._leave

        def leaving(answer: Any, leave: Any = leave, kernel: FailingKernel = kernel) -> Any:
            if answer.work.checked.request.keep_cache:
                kernel.first = kernel.calls + 2
            return leave(answer)

        scheduler._leave = leaving  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while not scheduler.idle:
                told += scheduler.step()
        assert len(caught) == (kernels is None)
        (cache,) = [token.cache for token in told if token.cache is not None]
        after = [token for token, _ in Run(tiny, [5, 6, 7, 8, 9, 10, 11, 12, 13], cache, max_tokens=6)]
        found.append([[t.token for t in told if t.request is request] for request in asked] + [cache.ids, after])
        assert pool.backend is None
    assert found[0] == found[1]


def test_the_memory_of_the_lost_pool_is_freed_first(tiny: Decoder, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    fail("eval", 20)
    scheduler, pool = scheduler_of(tiny, 0, pages=400, max_batch=3, pool={"max_seq_len": 500})
    active = mx.get_active_memory()
    refill, peaks = Pool._refill, []

    def measured(self: Pool, *arguments: Any) -> None:
        mx.reset_peak_memory()
        refill(self, *arguments)
        peaks.append(mx.get_peak_memory() - active)

    monkeypatch.setattr(Pool, "_refill", measured)
    with pytest.warns(RuntimeWarning, match="failed in a run"):
        run_all(scheduler, [Request(ids, 12) for ids in PROMPTS])
    assert peaks[0] < pool.nbytes / len(WINDOWS)
    assert mx.get_active_memory() - active < pool.nbytes / 100


def test_a_thread_of_an_engine_goes_on(tiny: Decoder, fail: Fail) -> None:
    found = []
    for kernels in ("unfused", None):
        fail("eval", 20)
        pool = tiny.make_pool(2048, sequences=3, max_seq_len=500, quant_bit=0, kernels=kernels)
        with warnings.catch_warnings(record=True) as caught, BatchEngine(tiny, pool, max_batch=3) as engine:
            warnings.simplefilter("always")
            answers = [engine.submit(Request(ids, 12)) for ids in PROMPTS]
            found.append([[token.token for token in answer] for answer in answers])
        assert len(caught) == (kernels is None)
    assert found[0] == found[1]


def test_a_kernel_that_was_asked_for_ends_its_requests(tiny: Decoder, fail: Fail) -> None:
    fail("eval", 8)
    scheduler, pool = scheduler_of(tiny, 0, max_batch=3, pool={"kernels": "fused", "max_seq_len": 500})
    request = Request(SHARED[:20], 12)
    (*_, last) = run_all(scheduler, [request])[request]
    assert WORDS["eval"] in str(last.error)
    assert pool.backend == "metal"


def test_an_error_of_somebody_else_is_the_requests(tiny: Decoder, fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes again without the kernel, of which nothing is said."""
    fail("eval", 10**6)
    scheduler, pool = scheduler_of(tiny, 0, max_batch=3, pool={"max_seq_len": 500})
    request, other = Request(SHARED[:20], 12), Request(SHARED[:20], 12)
    monkeypatch.setattr(tiny, "next_logits", _no_memory)
    (last,) = run_all(scheduler, [request])[request]
    assert "no memory" in str(last.error)
    monkeypatch.undo()
    fail("eval", 10**6)
    assert len(ids_of(run_all(scheduler, [other])[other])) == 12
    assert pool.backend == "metal"


def _no_memory(*arguments: Any) -> mx.array:
    raise RuntimeError("no memory")
