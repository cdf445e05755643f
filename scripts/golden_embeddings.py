"""Write tests/data/embeddings: small random embedding models as sentence-transformers saves them, and its
vectors of some texts, in float32.

Run: python scripts/golden_embeddings.py (needs sentence-transformers and torch)

    NAME/...             a model's folder: tensors without the prefix of a whole model, tokenizer, modules.json
    NAME/vectors.npy     (texts, numbers) as SentenceTransformer.encode returns them, all texts in one batch
    texts.json           the texts, and the versions that computed all this
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
import transformers
from golden_bridged import randomize
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModel

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "embeddings"
TEXTS = [
    "The quick brown fox.",
    "Ein Bär trinkt Öl, l'été.",
    "a",
    "The fox jumps over the lazy dog, and then it sleeps by the river for the whole long afternoon. " * 2,
    "The quick brown fox jumps!",
]
END = "<|endoftext|>"
SIZES = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
# Name -> model_type, settings, how it pools, whether it normalizes, its default prompt. The first is laid out
# as Qwen3-Embedding-8B: its config.json does not tie a head that is not stored.
MODELS: dict[str, tuple[str, dict[str, Any], str, bool, str]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": False}, "lasttoken", True, ""),
    "mistral": ("mistral", {"sliding_window": None}, "mean", True, ""),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 8,
            "hidden_size": 64,
            "query_pre_attn_scalar": 16,
            "head_dim": 32,
        },
        "mean",
        False,
        "passage: ",
    ),
}


def tokenizer() -> Tokenizer:
    """Bytes, a few merges, and Qwen3-Embedding's token behind every text."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens([AddedToken(END, special=True)])
    end = made.token_to_id(END)
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)]),
        ]
    )
    return made


def write(name: str) -> None:
    """One model's folder."""
    kind, settings, pools, normalizes, prompt = MODELS[name]
    model = AutoModel.from_config(AutoConfig.for_model(kind, **SIZES | settings))
    randomize(model)
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch)
        tokenizer().save(f"{scratch}/tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
        Path(scratch, "tokenizer_config.json").write_text(json.dumps(settings))
        transformer = Transformer(scratch)
        modules: list[Any] = [transformer, Pooling(model.config.hidden_size, pools)]
        modules += [Normalize()] if normalizes else []
        prompts = {"query": "Instruct: find\nQuery: ", "document": prompt}
        default = "document" if prompt else None
        SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name=default).save(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    loaded = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    vectors = loaded.encode(TEXTS, batch_size=len(TEXTS))
    np.save(folder / "vectors.npy", vectors.astype(np.float32))


def main() -> None:
    """All of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        write(name)
        print(name, sum(file.stat().st_size for file in (FOLDER / name).rglob("*") if file.is_file()))
    used = (torch, transformers, sentence_transformers)
    versions = {module.__name__: module.__version__ for module in used}
    (FOLDER / "texts.json").write_text(json.dumps({"texts": TEXTS, **versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
