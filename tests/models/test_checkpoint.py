"""Model folders that cannot be loaded: one clear line each, that names what was given and what was
expected.
"""

import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from safetensors import SafetensorError, safe_open
from support.checkpoints import (
    CONFIGS,
    TOLERANCE,
    change_tensors,
    llama_config,
    qwen2_config,
    qwen3_config,
    reference_logits,
    smollm3_config,
)
from support.counts import count
from support.hostile import one_line, said
from support.numbers import relative_error

from kvant.errors import CheckpointError, ModelError
from kvant.models import ModelConfig, load_decoder
from kvant.models.tensors import TensorFiles

Make = Callable[..., tuple[Path, nn.Module]]
SLIDING = "sliding_attention"
BAD_VALUES: dict[str, dict[str, list[Any]]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM", [{}]],
        "hidden_size": [-128, "128"],
        "num_hidden_layers": [10**9],
        "rms_norm_eps": [0, "x"],
        "rope_theta": [math.inf, 1e-300, 10**400],
        "rope_parameters": [[1]],
        "layer_types": [5],
        "tie_word_embeddings": ["false"],
        "use_sliding_window": [1],
        "eos_token_id": ["</s>"],
    },
    "qwen3": {"head_dim": [0, -32, 33, 10**12], "attention_bias": [True, "no"]},
    "smollm3": {"no_rope_layers": [[1], [1, 2], [1, True], [], "10"], "attention_bias": [True]},
    "qwen3_moe": {
        "num_experts": [0, 5000],
        "num_experts_per_tok": [9, 0],
        "moe_intermediate_size": [-1],
        "norm_topk_prob": ["yes"],
        "decoder_sparse_step": [0],
        "mlp_only_layers": [[2], [True], "0"],
    },
}


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in BAD_VALUES.items() for key in keys])
def test_a_value_that_is_refused(kind: str, key: str) -> None:
    for value in BAD_VALUES[kind][key]:
        with one_line(ModelError, said(key, value)):
            ModelConfig.from_dict(CONFIGS[kind] | {key: value})


def _quantized(**changes: Any) -> dict[str, Any]:
    return {"quantization": {"group_size": 32, "bits": 4} | changes}


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    (qwen2_config(architectures=["GemmaForCausalLM"]), "GemmaForCausalLM is not supported"),
    (
        qwen2_config(architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM with model_type 'qwen2'; expected 'llama'",
    ),
    (qwen2_config(model_type="mixtral", architectures=None), "model_type 'mixtral'"),
    (qwen2_config(hidden_size=None), "hidden_size is missing"),
    (qwen3_config(head_dim=None), "head_dim is missing"),
    (qwen2_config(num_attention_heads=3), "num_attention_heads 3 is not a multiple"),
    ({**qwen2_config(), "num_key_value_heads": 32}, "not a multiple of num_key_value_heads 32"),
    (qwen2_config(rope_scaling={"factor": 4.0}), "rope_scaling has factor 4.0"),
    (
        qwen2_config(rope_parameters={"full_attention": {"rope_theta": 10.0}}),
        "rope_parameters has full_attention",
    ),
    (
        qwen2_config(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "yarn"}),
        "rope_scaling and rope",
    ),
    (
        qwen2_config(rope_parameters={"rope_type": "default", "type": "yarn"}),
        "'default' and rope type 'yarn'",
    ),
    (qwen2_config(use_sliding_window=True, sliding_window=0, max_window_layers=0), "sliding_window is 0"),
    (qwen2_config(use_sliding_window=True, max_window_layers="1"), "max_window_layers is '1'"),
    (qwen2_config(layer_types=["full_attention"]), "layer_types has 1 layers; num_hidden_layers is 2"),
    (qwen2_config(layer_types=["full_attention", "linear_attention"]), "layer_types has 'linear_attention'"),
    (qwen2_config(layer_types=["full_attention", SLIDING]), f"layer_types has '{SLIDING}', but there is no"),
    (llama_config(layer_types=[SLIDING] * 2, sliding_window=None), "sliding_window is missing"),
    (llama_config(model_type="mistral", architectures=None), "attention_bias is true; supported for mistral"),
    (smollm3_config(no_rope_layers=None, no_rope_layer_interval=0), "no_rope_layer_interval is 0"),
    (CONFIGS["qwen3_moe"] | {"num_local_experts": 4}, "num_experts 8 and num_local_experts 4"),
    (qwen2_config(quantization_config=["quant_method"]), "quantization is"),
    (qwen2_config(quantization_config={"quant_method": "gptq", "bits": 4}), "method 'gptq'"),
    (qwen2_config(**_quantized(lm_head="8")), "lm_head '8'"),
    (qwen2_config(**_quantized(bits=7)), "bits is 7"),
    (qwen2_config(**_quantized(group_size=16)), "group_size is 16"),
    (
        qwen2_config(**_quantized(group_size=64, mode="mxfp4")),
        "mxfp4 with bits 4 and group_size 64; expected",
    ),
    (qwen2_config(**_quantized(mode="mxfp6")), "'mxfp6' is not supported"),
    (qwen2_config(**_quantized(mode=["mxfp4"])), r"mode is \['mxfp4'\]"),
    (
        qwen2_config(**_quantized(group_size=16, mode="nvfp4", lm_head={"global_scale": True})),
        "global_scale True",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS, ids=[message for _, message in BAD_CONFIGS])
def test_a_config_that_is_refused(config: dict[str, Any], message: str) -> None:
    with one_line(ModelError, message):
        ModelConfig.from_dict(config)


def test_a_header_is_refused_where_the_safetensors_library_refuses_it(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "model.safetensors"
    taken = []
    for _ in range(count(1000, 4000)):
        path.write_bytes(text := _header(rng))
        theirs, ours = None, None
        with suppress(SafetensorError), safe_open(path, framework="np") as file:
            theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        try:
            tensors = TensorFiles(tmp_path, [path])
            ours = {name: tensors.shape(name) for name in tensors.names}
        except CheckpointError as error:
            assert str(error).isprintable()  # noqa: PT017
        assert ours == theirs, text
        taken.append(ours is not None)
    assert 0.15 < sum(taken) / len(taken) < 0.85


def _header(rng: random.Random) -> bytes:
    sizes = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8, "F4": 0.5, "F6_E2M3": 0.75}
    end, header = 0, {}
    for number in range(rng.randrange(4)):
        dtype, shape = rng.choice(list(sizes)), [4 * rng.randrange(3), rng.randrange(4)][: rng.randrange(3)]
        size = int(math.prod(shape) * sizes[dtype])
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    spoil, entry = (
        rng.randrange(8),
        rng.choice([*header.values(), {"data_offsets": [0, 0], "dtype": "", "shape": [0]}]),
    )
    bad: dict[str, list[Any]] = {
        "shape": [[-1], [2**63], [1.0], "x", None, [True], [[]], [2**40, 2**40]],
        "dtype": ["F33", "f32", None, 4, "I32", "C64"],
        "data_offsets": [[], [0], [0, 1, 2], None, ["0", "1"], [1, 0]],
    }
    if spoil == 0:
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-1, 1, 8])
    elif spoil == 1:
        entry.pop(rng.choice([*bad]))
    elif spoil == 2:
        header["__metadata__"] = rng.choice([{}, None, {"a": "b"}, {"a": 1}, [], "x"])
    elif spoil < 6:
        key = [*bad][spoil - 3]
        entry[key] = rng.choice(bad[key])
    text = json.dumps(header).encode() + b" " * rng.choice([0, 0, 3])
    length = len(text) + rng.choice([0] * 8 + [-1, 1])
    return length.to_bytes(8, "little") + text + bytes(max(0, end + rng.choice([0] * 8 + [-1, 1])))


def test_generation_config_names_the_end(make_checkpoint: Make) -> None:
    folder, _ = make_checkpoint(eos_token_id=5)
    assert ModelConfig.from_folder(folder).eos_token_ids == (5,)
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": [7, 8]}')
    assert ModelConfig.from_folder(folder).eos_token_ids == (7, 8)
    path.write_text('{"eos_token_id": [7, -1]}')
    with one_line(ModelError, r"generation_config.json: eos_token_id is \[7, -1\]"):
        ModelConfig.from_folder(folder)


def test_shards_and_a_copy_of_the_embedding_as_a_head(make_checkpoint: Make) -> None:
    folder, reference = make_checkpoint(shards=3)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 3
    change_tensors(files[0], {"lm_head.weight": reference.model.embed_tokens.weight})  # tied
    assert load_decoder(folder).nbytes_read == load_decoder(folder).nbytes
    ids = list(range(1, 20))
    assert (
        relative_error(load_decoder(folder)(mx.array([ids]))[0], reference_logits(reference, ids)) < TOLERANCE
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_that_does_not_say_is_tied_where_there_is_no_head(make_checkpoint: Make, tied: bool) -> None:
    folder, reference = make_checkpoint(tie_word_embeddings=tied)
    raw = json.loads((folder / "config.json").read_text())
    del raw["tie_word_embeddings"], raw["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(raw))
    ids = mx.array([[1, 2, 3]])
    assert mx.allclose(load_decoder(folder)(ids), reference(ids), rtol=1e-4, atol=1e-4)
