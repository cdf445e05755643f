"""Small models of every kind of cache with a tokenizer of whole words and a chat template, loaded as users
do it.
"""

import json
from functools import partial
from pathlib import Path

import kvant
from kvant.models import LanguageModel
from kvant.text.tokenizer import Tokenizer
from support.bridged import write_mlx_lm, write_words
from support.checkpoints import mistral_config, qwen2_config, write_reference

Loaded = tuple[LanguageModel, Tokenizer]
# Each word is a token; w3 begins a question and w4 an answer, and w5 ends both.
TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w2 ', 'user': 'w3 ', 'assistant': 'w4 '}[m['role']] }}{{ "
    "m['content'] }}"
    " w5 {% endfor %}{% if add_generation_prompt %}w4 {% endif %}"
)
WINDOW = 16
# kvant's decoder with biases, and with windows; bridged models with windows, chunks or states.
KINDS = ["qwen2", "mistral", "gemma3_text", "gpt_oss", "qwen3_next", "llama4", "falcon_h1"]


def load_kind(name: str, folder: Path) -> Loaded:
    """One of KINDS, with random weights; its folder is written first."""
    if name in ("qwen2", "mistral"):
        made = {"qwen2": qwen2_config, "mistral": partial(mistral_config, sliding_window=WINDOW)}[name]
        write_reference(folder, made(vocab_size=128))
    else:
        write_mlx_lm(folder, name)
    write_words(folder, 128)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    model, tokenizer = kvant.load(folder)
    tokenizer.eos_token_ids = {5}
    return model, tokenizer
