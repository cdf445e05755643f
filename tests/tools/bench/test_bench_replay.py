"""A text that is known comes out of a model whatever it says, through drafted steps that are compiled and not."""

from typing import Any

import pytest
from support.drafts import KnownDrafts

from kvant.engine.drafted_run import make_run
from kvant.tools.bench.replay import Replayed

PROMPT = [(7 * i) % 1000 + 20 for i in range(20)]
ANSWER = [(11 * i) % 900 + 30 for i in range(16)]


@pytest.mark.parametrize("compiled", [False, True])
def test_it_gives_the_known_text(pocket: tuple[Any, Any], *, compiled: bool) -> None:
    model: Any = Replayed(pocket[0])
    text = [*PROMPT, *ANSWER]
    model.replay(text)
    cache = model.make_cache(len(text))
    run = make_run(KnownDrafts(text=text), model, PROMPT, cache, max_tokens=len(ANSWER), compiled=compiled)
    assert [token for token, _ in run] == ANSWER
    assert run.drafts is not None
    assert run.drafts.accepted > 2
