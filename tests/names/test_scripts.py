"""Scripts that use mlx-lm's public names: with nothing but their imports changed they give the same results.

mlx-lm runs each on the same weights, in float32 as kvant does on a CPU. A script finds its model's name in
MODEL and a number of tokens in TOKENS, and leaves what is compared in ``text``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from support.counts import count

from kvant.cache import CacheOptions
from kvant.models import Decoder

OTHER_END_OF_TEXT = """
from mlx_lm import generate, load

settings = {"eos_token": ".", "trust_remote_code": False}
model, tokenizer, config = load(MODEL, tokenizer_config=settings, return_config=True)
text = [tokenizer.eos_token, tokenizer.eos_token_id, config["eos_token_id"], sorted(tokenizer.eos_token_ids)]
text.append(generate(model, tokenizer, "Once upon a time", max_tokens=TOKENS))
"""

KEYWORDS = """
from mlx_lm import generate, load

def look_up(city: str, day: int):
    \"\"\"
    Find the weather of a day.

    Args:
        city: Where.
        day: Days from now.
    \"\"\"

model, tokenizer = load(path_or_hf_repo=MODEL)
asked = [{"role": "user", "content": "Will it rain on the river tomorrow?"}]
text = []
for options in ({}, {"tools": [look_up]}):
    prompt = tokenizer.apply_chat_template(conversation=asked, add_generation_prompt=True, **options)
    text.append(generate(model=model, tokenizer=tokenizer, prompt=prompt, max_tokens=TOKENS, verbose=True))
"""

SAVED_CACHE = """
from mlx_lm import generate, load
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

model, tokenizer = load(MODEL)
cache, text = make_prompt_cache(model), []
for question in ("My fox is called Pip.", "What is my fox called?", "And where does he live?"):
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    text += [generate(model, tokenizer, prompt=prompt, prompt_cache=cache), cache[0].offset]
    save_prompt_cache("talk.safetensors", cache)
    cache = load_prompt_cache("talk.safetensors")
"""

BATCHES = """
from mlx_lm import batch_generate, load

model, tokenizer = load(MODEL)
caches, text = None, []
for questions in (("Who is Pip?", "Tell me about a duck.", "Hello!"), ("And then?", "Is it yellow?", "Bye!")):
    turns = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True) for turn in turns]
    options = {"prompt_caches": caches} if caches else {"return_prompt_caches": True, "max_tokens": TOKENS}
    result = batch_generate(model, tokenizer, prompts, verbose=False, **options)
    caches = result.caches
    text += result.texts
"""

SAMPLING = """
from mlx_lm import generate, load
from mlx_lm.sample_utils import make_logits_processors, make_sampler

model, tokenizer = load(MODEL)
sampler = make_sampler(temp=0.0, top_p=0.9, xtc_special_tokens=tokenizer.encode("\\n"))
processors = make_logits_processors({5: -3.0}, repetition_penalty=1.3, repetition_context_size=64)
text = generate(model, tokenizer, "A bear", max_tokens=TOKENS, sampler=sampler, logits_processors=processors)
"""

STREAMED_TALK = """
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

safe = {"trust_remote_code": None}
model, tokenizer = load(MODEL, adapter_path=None, tokenizer_config=safe, trust_remote_code=False)
text = []
for talk in (("Hello! Who are you?", "Tell me about a fox."), ("And about a duck?",)):
    cache = make_prompt_cache(model, 1024 if text else None)
    for question in talk:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        special = [*tokenizer.encode("\\n"), *tokenizer.eos_token_ids]
        sampler = make_sampler(0.0, 1.0, xtc_threshold=0.1, xtc_probability=0.0, xtc_special_tokens=special)
        options = {"sampler": sampler, "prompt_cache": cache, "prefill_step_size": 2048}
        text.append("".join(each.text for each in stream_generate(model, tokenizer, prompt, max_tokens=64, **options)))
"""

GOING_BACK = """
from mlx_lm import generate, load
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

model, tokenizer = load(MODEL)
cache, progress, text = make_prompt_cache(model), [], []
story = tokenizer.encode("Once upon a time, a fox and a duck lived by the river. ")
for ending in ("The fox", "The duck", "Then"):
    prompt = ([] if cache[0].offset else story) + tokenizer.encode(ending)
    tell = lambda done, total: progress.append((done, total))
    text.append(
        generate(model, tokenizer, prompt, max_tokens=30, prompt_cache=cache, prompt_progress_callback=tell)
    )
    text.append(can_trim_prompt_cache(cache))
    trim_prompt_cache(cache, cache[0].offset - len(story))
    text.append(cache[0].offset)
text += [progress[0], progress[-1]]
"""

SCRIPTS = {
    name: text
    for name, text in globals().items()
    if name.isupper() and isinstance(text, str) and "mlx_lm" in text
}
CHANGED = {
    "from mlx_lm import": "from kvant import",
    "from mlx_lm.sample_utils import": "from kvant.sample_utils import",
    "from mlx_lm.models.cache import": "from kvant import",
}


def changed(script: str) -> str:
    for theirs, ours in CHANGED.items():
        script = script.replace(theirs, ours)
    assert "mlx_lm" not in script
    return script


def run(script: str, model: str) -> dict[str, Any]:
    variables: dict[str, Any] = {"MODEL": model, "TOKENS": count(50, 1000)}
    exec(compile(script, "script", "exec"), variables)
    return variables


@pytest.fixture
def _theirs_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlx_lm.load

    def load(*arguments: Any, **options: Any) -> Any:
        model, *rest = plain(*arguments, **options)
        model.set_dtype(mx.float32)
        return model, *rest

    monkeypatch.setattr(mlx_lm, "load", load)


@pytest.fixture
def _in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache and pool that is made is, as mlx-lm's are."""

    plain = Decoder.make_pool  # which reserves caches too

    def make(self: Decoder, *arguments: Any, options: CacheOptions, **sizes: Any) -> Any:
        assert options.kv_bits in (8, 0)  # no script asks for anything; a saved cache for what it has
        return plain(self, *arguments, options=replace(options, kv_bits=0), **sizes)

    monkeypatch.setattr(Decoder, "make_pool", make)


def _text(left: Any) -> list[Any]:
    """What a script left in ``text``. mlx-lm leaves out the space that a text begins with."""
    pieces = left["text"] if isinstance(left["text"], list) else [left["text"]]
    assert pieces
    assert all(pieces)
    return [piece.removeprefix(" ") if isinstance(piece, str) else piece for piece in pieces]


@pytest.mark.usefixtures("_theirs_in_float32", "_in_full_precision")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_its_imports_changed(
    name: str, pocket_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = _text(run(changed(SCRIPTS[name]), "pocket"))
    assert ours == _text(run(SCRIPTS[name], str(pocket_folder)))
