"""Scripts for mlx-lm, of its README and its examples: they run with their imports changed, with the same results.

The calls are theirs, with another model and, but in the long run, shorter answers. mlx-lm runs each on the same
weights, in float32 as kvant does on a CPU.
"""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache as mlx_make_prompt_cache
from support.counts import count

import kvant
from kvant.models import Decoder

README_TOKENIZER = """
from mlx_lm import load, generate
model, tokenizer, config = load(
    "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    tokenizer_config={"eos_token": ".", "trust_remote_code": False},
    return_config=True,
)
text = [tokenizer.eos_token, tokenizer.eos_token_id, config["eos_token_id"], sorted(tokenizer.eos_token_ids)]
text.append(generate(model, tokenizer, "Once upon a time", max_tokens=200))
"""

EXAMPLE_GENERATE_RESPONSE = """
from mlx_lm import generate, load
checkpoint = "mlx-community/Mistral-7B-Instruct-v0.3-4bit"
model, tokenizer = load(path_or_hf_repo=checkpoint)
prompt = "Why is the sky blue?"
conversation = [{"role": "user", "content": prompt}]
prompt = tokenizer.apply_chat_template(conversation=conversation, add_generation_prompt=True)
max_tokens = 1000
verbose = True
response = generate(model=model, tokenizer=tokenizer, prompt=prompt, max_tokens=max_tokens, verbose=verbose)
text = response
"""

EXAMPLE_CHAT = """
from mlx_lm import generate, load
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
checkpoint = "mlx-community/Mistral-7B-Instruct-v0.3-4bit"
model, tokenizer = load(path_or_hf_repo=checkpoint)
prompt_cache = make_prompt_cache(model)
prompt = "Hi my name is <Name>."
messages = [{"role": "user", "content": prompt}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
text = [generate(model, tokenizer, prompt=prompt, verbose=True, prompt_cache=prompt_cache)]
prompt = "What's my name?"
messages = [{"role": "user", "content": prompt}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
text.append(generate(model, tokenizer, prompt=prompt, verbose=True, prompt_cache=prompt_cache))
save_prompt_cache("mistral_prompt.safetensors", prompt_cache)
prompt_cache = load_prompt_cache("mistral_prompt.safetensors")
text.append(generate(model, tokenizer, prompt=prompt, prompt_cache=prompt_cache))
"""

# As far as the model's answer, which pocket does not make a call.
EXAMPLE_TOOL_USE = """
from mlx_lm import generate, load
from mlx_lm.models.cache import make_prompt_cache
checkpoint = "mlx-community/Qwen2.5-32B-Instruct-4bit"
model, tokenizer = load(path_or_hf_repo=checkpoint)
def multiply(a: float, b: float):
    \"\"\"
    A function that multiplies two numbers
    Args:
        a: The first number to multiply
        b: The second number to multiply
    \"\"\"
    return a * b
tools = {"multiply": multiply}
prompt = "Multiply 12234585 and 48838483920."
messages = [{"role": "user", "content": prompt}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=list(tools.values()))
prompt_cache = make_prompt_cache(model)
response = generate(
    model=model, tokenizer=tokenizer, prompt=prompt, max_tokens=2048, verbose=True, prompt_cache=prompt_cache
)
text = [response]
"""

EXAMPLE_BATCH_GENERATE_RESPONSE = """
from mlx_lm import batch_generate, load
checkpoint = "mlx-community/Llama-3.2-3B-Instruct-4bit"
model, tokenizer = load(path_or_hf_repo=checkpoint)
prompts = ["Write a story about Einstein.", "Why is the sky blue?", "What time is it?", "How tall is Mt Everest?"]
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True) for p in prompts
]
result = batch_generate(model, tokenizer, prompts, verbose=False, return_prompt_caches=True, max_tokens=2048)
print(result.texts[-1])
text = result.texts
prompts = ["Could you summarize that?", "And what about the sea?", "Try again?", "And Mt Olympus?"]
prompts = [
    tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True) for p in prompts
]
result = batch_generate(model, tokenizer, prompts, verbose=False, prompt_caches=result.caches)
print(result.texts[-1])
text = text + result.texts
"""

SAMPLING = """
from mlx_lm import load, generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler
model, tokenizer = load("mlx-community/Mistral-7B-Instruct-v0.3-4bit")
text = generate(
    model,
    tokenizer,
    "Once upon a time",
    max_tokens=100,
    sampler=make_sampler(temp=0.0, top_p=0.9, xtc_special_tokens=tokenizer.encode("\\n")),
    logits_processors=make_logits_processors({5: -3.0}, repetition_penalty=1.3, repetition_context_size=64),
)
"""

# The loop of mlx_lm.chat, with typed questions.
CHAT = """
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
model, tokenizer = load(
    "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    adapter_path=None,
    tokenizer_config={"trust_remote_code": None},
    trust_remote_code=False,
)
prompt_cache = make_prompt_cache(model, None)
text = []
for query in ("Hello! Who are you?", "Tell me about a fox.", "r", "And about a duck?"):
    if query == "r":
        prompt_cache = make_prompt_cache(model, 1024)
        continue
    messages = [{"role": "user", "content": query}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = ""
    for response in stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=64,
        sampler=make_sampler(
            0.0,
            1.0,
            xtc_threshold=0.1,
            xtc_probability=0.0,
            xtc_special_tokens=tokenizer.encode("\\n") + list(tokenizer.eos_token_ids),
        ),
        prompt_cache=prompt_cache,
        prefill_step_size=2048,
    ):
        answer += response.text
    text.append(answer)
"""

# A prompt that is read once, and gone back to for each question.
GOING_BACK = """
from mlx_lm import load, generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
model, tokenizer = load("mlx-community/Mistral-7B-Instruct-v0.3-4bit")
prompt_cache = make_prompt_cache(model)
progress, text = ([], [])
story = tokenizer.encode("Once upon a time, a fox and a duck lived by the river. ")
for ending in ("The fox", "The duck", "Then"):
    before = prompt_cache[0].offset
    prompt = (story if not before else []) + tokenizer.encode(ending)
    text.append(
        generate(
            model,
            tokenizer,
            prompt,
            max_tokens=30,
            prompt_cache=prompt_cache,
            prompt_progress_callback=lambda done, total: progress.append((done, total)),
        )
    )
    text.append(can_trim_prompt_cache(prompt_cache))
    trim_prompt_cache(prompt_cache, prompt_cache[0].offset - len(story))
    text.append(prompt_cache[0].offset)
text += [progress[0], progress[-1]]
"""

SCRIPTS = {
    name: text for name, text in globals().items() if name.isupper() and isinstance(text, str) and "mlx_lm" in text
}
CHANGED = {
    "from mlx_lm import": "from kvant import",
    "from mlx_lm.sample_utils import": "from kvant.sample_utils import",
    "from mlx_lm.models.cache import": "from kvant import",
}


def changed(script: str) -> str:
    """A script with nothing but its imports changed."""
    for theirs, ours in CHANGED.items():
        script = script.replace(theirs, ours)
    assert "mlx_lm" not in script
    return script


def run(script: str, model: str) -> dict[str, Any]:
    """Run a script with another model's name, and shorter answers; what it left in its variables."""
    script, names = re.subn(r'"mlx-community/[^"]*"', repr(model), script)
    assert names == 1
    script = re.sub(r"(max_tokens ?= ?)(\d{3,}|\d_\d+)", lambda found: found[1] + count("100", found[2]), script)
    variables: dict[str, Any] = {}
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

    def full(plain: Any) -> Any:
        def make(self: Decoder, *arguments: Any, **options: Any) -> Any:
            assert options.pop("kv_bits", 8) in (8, 0)  # no script asks for anything; a saved cache for what it has
            return plain(self, *arguments, kv_bits=0, **options)

        return make

    for name in ("make_cache", "make_pool"):
        monkeypatch.setattr(Decoder, name, full(getattr(Decoder, name)))


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
    """Its text is mlx-lm's."""
    monkeypatch.chdir(tmp_path)
    ours = _text(run(changed(SCRIPTS[name]), "pocket"))
    assert ours == _text(run(SCRIPTS[name], str(pocket_folder)))


@pytest.mark.parametrize("max_tokens", [5, 300])
def test_the_cache_holds_what_mlx_lms_does(pocket_folder: Path, max_tokens: int) -> None:
    """Every token, the end of text too: the next turn's prompt goes behind it."""
    model, tokenizer = mlx_lm.load(str(pocket_folder))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], add_generation_prompt=True)
    theirs, (own, own_tokenizer) = mlx_make_prompt_cache(model), kvant.load("pocket")
    last = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens, prompt_cache=theirs)][-1]
    ours = own.make_cache(400)
    kvant.generate(own, own_tokenizer, prompt, max_tokens=max_tokens, prompt_cache=ours)
    assert ours.offset == theirs[0].offset
    assert ours.ids[0][-1] == last
    assert (last in own_tokenizer.eos_token_ids) == (max_tokens == 300)
