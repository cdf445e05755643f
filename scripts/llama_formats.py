"""Cache formats of llama.cpp, mlx-lm and kvant on pocket in one table: how far each is from llama.cpp's
float32.

Run: python scripts/llama_formats.py LLAMA_PERPLEXITY [tokens]    (default: 16384)

LLAMA_PERPLEXITY is the program of llama.cpp, which builds from the source that the package llama-cpp-python
has. The package gguf is needed too. llama.cpp runs pocket in float32 and writes its predictions; every other
format is compared with them on the same tokens. Prints JSON: by format bytes a token, mean KLD in nats, share
of the same likeliest token.
"""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import kvant.blas  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

from kvant.engine.load import POCKET, find_model
from kvant.machine import environment
from kvant.tools.report.formats import CacheFormat
from kvant.tools.report.mlx_lm_reader import mlx_lm_readers
from kvant.tools.report.reference import Reference, read_reference
from kvant.tools.report.runs import CacheReader, Reader, read_legs
from kvant.tools.report.texts import heldout_documents

CONTEXT = 1024  # tokens of a piece
TRIES, END = 10, "Same top p: "
ROTATED, AS_IT_IS = {"LLAMA_ATTN_ROT_DISABLE": "0"}, {"LLAMA_ATTN_ROT_DISABLE": "1"}
LLAMA = {
    "llama.cpp f16": ("f16", 16.0, AS_IT_IS),
    "llama.cpp q8_0": ("q8_0", 8.5, AS_IT_IS),
    "llama.cpp q8_0, rotated (default)": ("q8_0", 8.5, ROTATED),
    "llama.cpp q4_0": ("q4_0", 4.5, AS_IT_IS),
    "llama.cpp q4_0, rotated (default)": ("q4_0", 4.5, ROTATED),
}
NAMES = {  # of GGUF
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(folder: Path, path: Path) -> None:
    """The model in float32 for llama.cpp."""
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    special = {token["id"] for token in words["added_tokens"]}
    by_id = {number: word for word, number in words["model"]["vocab"].items()}
    by_id |= {token["id"]: token["content"] for token in words["added_tokens"]}
    writer.add_token_list([by_id.get(number, f"<unused {number}>") for number in range(config["vocab_size"])])
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[number not in special] for number in range(config["vocab_size"])])
    merges = words["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        stem, _, kind = name.rpartition(".")
        if (layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)) is not None:
            stem = f"blk.{layer[1]}.{NAMES[layer[2]]}"
        else:
            stem = NAMES[stem]
        writer.add_tensor(f"{stem}.{kind}", np.array(array.astype(mx.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_llama(
    program: str, model: Path, text: Path, base: Path, cache: str, *flags: str, **variables: str
) -> str:
    """What llama-perplexity says. Now and then its last lines are missing."""
    kept = ["-c", str(CONTEXT), "-b", str(CONTEXT), "-t", "2", "-fa", "on", "-ctk", cache, "-ctv", cache]
    command = [program, "-m", str(model), "-f", str(text), "--kl-divergence-base", str(base), *kept, *flags]
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, check=True)
        if END in done.stdout or "--kl-divergence" not in flags:
            return done.stdout
    raise RuntimeError(f"{program} did not say {END!r} in {TRIES} tries")


def of_llama(said: str) -> dict[str, float]:
    """Mean KLD and the share of the same likeliest token."""
    (kld,), (same,) = re.findall(r"Mean\s+KLD:\s+(\S+)", said), re.findall(rf"{END}\s*(\S+)", said)
    return {"mean_kld_nats": float(kld), "top1": float(same) / 100}


def of_readers(reference: Reference, readers: dict[str, Reader]) -> dict[str, dict[str, float]]:
    """kvant's caches and mlx-lm's."""
    tallies, _ = read_legs(list(readers.values()), reference.text, others=reference)
    return {
        name: {
            "bytes_per_token": reader.nbytes / CONTEXT,
            "mean_kld_nats": tally.figures().mean_kld_nats,
            "top1": tally.figures().top1,
        }
        for (name, reader), tally in zip(readers.items(), tallies, strict=True)
    }


def main() -> None:
    program, tokens = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 16384
    folder = find_model(POCKET)
    model, _ = kvant.load(POCKET)
    values = sum(2 * own.num_kv_heads * own.head_dim for own in model.make_cache(1).formats)
    with TemporaryDirectory() as made:
        gguf, text, base, tuned = (
            Path(made) / name for name in ("pocket.gguf", "text", "base", "tuned.json")
        )
        write_gguf(folder, gguf)
        documents = heldout_documents()
        said = [
            own["text"] if "text" in own else "\n".join(m["content"] for m in own["messages"])
            for own in documents
        ]
        text.write_text("\n".join(said), encoding="utf-8")
        chunks = ["--chunks", str(tokens // CONTEXT)]
        run_llama(program, gguf, text, base, "f32", *chunks)
        reference = read_reference(base, model.config.vocab_size, None)
        found: dict[str, dict[str, float]] = {}
        for name, (cache, bits, variables) in LLAMA.items():
            said_of_it = run_llama(program, gguf, text, base, cache, *chunks, "--kl-divergence", **variables)
            found[name] = {"bytes_per_token": values * bits / 8, **of_llama(said_of_it)}
        tune = [sys.executable, "-m", "kvant", "report", "--tune", str(tuned), "-q"]
        subprocess.run([*tune, "--tokens", "16384", "--max-kld", "1"], check=True, capture_output=True)
        formats = {"kvant 0": CacheFormat(0), "kvant 8": CacheFormat(8), "kvant 4": CacheFormat(4)}
        formats["kvant 4, pmx"] = CacheFormat(4, rotates=False)
        formats["kvant 4, tuned"] = CacheFormat.of(kv_format=tuned)
        readers: dict[str, Reader] = {
            name: CacheReader(model, own.make_cache(model, CONTEXT)) for name, own in formats.items()
        }
        readers |= {own.label: reader for own, reader in mlx_lm_readers(folder, model, CONTEXT).items()}
        found |= of_readers(reference, readers)
    machine = environment()
    print(
        json.dumps(
            {
                "command": "python scripts/llama_formats.py LLAMA_PERPLEXITY",
                "tokens": sum(map(len, reference.text.pieces)),
                "predictions": sum(len(piece) - 1 - len(piece) // 2 for piece in reference.text.pieces),
                "device": machine.device,
                "versions": machine.versions
                | {"llama-cpp-python": version_of_llama(program), "gguf": version("gguf")},
                "formats": found,
            },
            indent=1,
        )
    )


def version_of_llama(program: str) -> str:
    """As the program says it."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    return " ".join(re.findall(r"version: (.+)", done.stdout + done.stderr))


if __name__ == "__main__":
    main()
