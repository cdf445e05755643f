"""A fused kernel that fails in the middle of an answer: one error that says how to go on without it."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from support.attend_stand_in import WORDS, FailingKernel
from support.drafts import KnownDrafts
from support.fused_path import begin_process
from support.metal_host import host_pytest_skip
from support.runs import Run

from kvant import batch_generate, generate
from kvant.errors import KernelError
from kvant.models import Decoder
from kvant.operators import paged_kernel

pytestmark = host_pytest_skip

Pocket = tuple[Decoder, Any]
PROMPT = [(7 * i) % 1000 for i in range(100)]
LAYERS = 4


@pytest.fixture(params=["build", "eval"])
def kernel(
    request: pytest.FixtureRequest, fused_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> FailingKernel:
    """It fails in the third step after a prompt, in its third layer."""
    made = FailingKernel(request.param, 2 * LAYERS + 3)
    monkeypatch.setattr(paged_kernel, "attend", made)
    return made


def _keep_last(model: Decoder, tokenizer: Any) -> None:
    run = Run(model, PROMPT, model.make_cache(512), max_tokens=3)
    assert len(list(run)) == 3
    run.scheduler.keep_last()


WAYS: dict[str, Callable[[Decoder, Any], object]] = {
    "alone": lambda model, tokenizer: list(Run(model, PROMPT, model.make_cache(512), max_tokens=20)),
    "with drafts": lambda model, tokenizer: list(
        Run(model, PROMPT, model.make_cache(512), drafts=KnownDrafts(text=PROMPT * 2))
    ),
    "the last token of a cache that is kept": _keep_last,
    "in a batch": lambda model, tokenizer: batch_generate(
        model, tokenizer, [PROMPT, PROMPT[:50]], max_tokens=20
    ),
}


@pytest.mark.parametrize("answer", WAYS.values(), ids=WAYS)
def test_an_answer_ends_with_one_error(pocket: Pocket, kernel: FailingKernel, answer: Any) -> None:
    with pytest.raises(KernelError, match=rf"{WORDS[kernel.how]}.*--kernels unfused"):
        answer(*pocket)
    begin_process()  # the next one does not meet it again
    with pytest.warns(RuntimeWarning, match=rf"fails here: a step failed: .*{WORDS[kernel.how]}"):
        assert pocket[0].make_cache(512).pool.backend is None
    assert pocket[0].make_cache(512, kernels="fused").pool.backend == "metal"
    cache = pocket[0].make_cache(512, kernels="unfused")
    assert len([token for token, _ in Run(pocket[0], PROMPT, cache, max_tokens=5)]) == 5


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_the_kernel_is_not_blamed_for_a_callers_error(
    pocket: Pocket, fused_calls: Any, kind: type[Exception]
) -> None:
    def sampler(logprobs: mx.array) -> mx.array:
        raise kind("the sampler fails")

    for ask, prompt in ((generate, PROMPT), (batch_generate, [PROMPT])):
        with pytest.raises(kind, match=r"^the sampler fails$"):
            ask(*pocket, prompt, sampler=sampler)  # type: ignore[operator]
