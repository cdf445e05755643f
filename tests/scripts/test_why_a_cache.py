"""The reason a key/value cache is right: nothing that is cached would be computed differently later."""

from typing import Any

import pytest
from why_a_cache import earlier_rows_differences, greedy_tokens, last_row_difference

from kvant.models import Decoder


@pytest.mark.parametrize("tokens", [2, 17, 48])
def test_the_last_row_alone_is_the_last_row_of_all(tokens: int) -> None:
    assert last_row_difference(tokens) < 1e-6


@pytest.mark.parametrize("tokens", [2, 17, 48])
def test_a_token_changes_nothing_before_it(tokens: int) -> None:
    outputs, cached = earlier_rows_differences(tokens)
    assert outputs < 1e-6
    assert cached == 0


def test_the_loop_without_a_cache_gives_the_same_tokens(pocket: tuple[Decoder, Any], heldout_ids: list[int]) -> None:
    model, _ = pocket
    prompt = heldout_ids[:24]
    assert greedy_tokens(model, prompt, 48, cached=True) == greedy_tokens(model, prompt, 48, cached=False)
