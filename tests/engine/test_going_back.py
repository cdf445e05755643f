"""Caches with windows cannot go back far: what was to be kept is then fed again, or gone, and never wrong."""

from typing import Any

import pytest
from support.checkpoints import mistral_config, reference_model, save_checkpoint

from kvant.engine.conversation import Conversation
from kvant.engine.run import Run
from kvant.models import Decoder
from kvant.models.checkpoint import load_decoder

WINDOW = 16
PROMPT = [t % 250 + 3 for t in range(90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A Mistral with a window and the embedded model's vocabulary."""
    config = mistral_config(sliding_window=WINDOW, vocab_size=1280)
    return load_decoder(save_checkpoint(tmp_path_factory.mktemp("window"), config, reference_model(config)))


def _stop_after(fed: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done >= fed:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(("fed", "left"), [(10, 40), (60, 0)])
def test_an_interrupted_prompt(model: Decoder, fed: int, left: int) -> None:
    """A few tokens are taken back exactly. Where the window has moved on, the cache is emptied and can be used."""
    cache = model.make_cache(256)
    list(Run(model, PROMPT[:40], cache, max_tokens=1))
    run = Run(model, PROMPT, cache, max_tokens=3, prefill_step_size=5, progress=_stop_after(fed))
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert cache.offset == left
    after = [token for token, _ in Run(model, PROMPT[left:], cache, max_tokens=8)]
    assert after == [token for token, _ in Run(model, PROMPT, model.make_cache(256), max_tokens=8)]


def test_a_changed_history_is_fed_again(model: Decoder, pocket: tuple[Decoder, Any]) -> None:
    _, tokenizer = pocket
    conversation = Conversation(model, tokenizer, model.make_cache(1024, kv_bits=0))
    list(conversation.send("Tell me a story about a fox named Pip.", max_tokens=20))
    list(conversation.send("And then what did the fox do?", max_tokens=20))
    list(conversation.send("And then?", max_tokens=20))
    assert conversation.reused_tokens > WINDOW
    conversation.messages[0] = {"role": "user", "content": "Tell me a story about a bear named Pip."}
    answer = [response.token for response in conversation.send("Is it true?", max_tokens=20)]
    assert conversation.reused_tokens == 0
    fresh = Conversation(model, tokenizer, model.make_cache(1024, kv_bits=0))
    fresh.messages = conversation.messages[:-2]
    assert answer == [response.token for response in fresh.send("Is it true?", max_tokens=20)]
