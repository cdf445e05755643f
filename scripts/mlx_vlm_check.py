"""Generate with tiny random models of mlx-vlm's, from text and from a picture, with kvant's caches and with
its own.

Usage: python scripts/mlx_vlm_check.py, in an environment with kvant and mlx-vlm. The tokens at 0 bits are
    those of
mlx-vlm's own caches, or the exit code is 1.
"""

import sys
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
from mlx.utils import tree_map
from mlx_vlm.generate import generate_step
from mlx_vlm.models import gemma3, qwen2_vl
from mlx_vlm.models.cache import make_prompt_cache

PICTURE, START = 250, 252
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {"hidden_size": 64, "image_size": 56, "patch_size": 14}


def qwen() -> tuple[Any, dict[str, Any], list[int]]:
    """Qwen2-VL: a model, the arguments of a picture of 4 tokens, and the ids of a prompt with it."""
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text = qwen2_vl.TextConfig("qwen2_vl", num_hidden_layers=3, rms_norm_eps=1e-6, vocab_size=300, rope_scaling=rope,
                               tie_word_embeddings=False, **TEXT)  # fmt: skip
    vision = qwen2_vl.VisionConfig(depth=2, embed_dim=64, num_heads=4, mlp_ratio=2.0, **VISION)
    config = qwen2_vl.ModelConfig(
        text, vision, "qwen2_vl", image_token_id=PICTURE, vision_start_token_id=START
    )
    picture = {
        "pixel_values": mx.random.normal((16, 3 * 2 * 14 * 14)),
        "image_grid_thw": mx.array([[1, 4, 4]]),
    }
    return qwen2_vl.Model(config), picture, [3, START, *[PICTURE] * 4, 5, 6, 7]


def gemma() -> tuple[Any, dict[str, Any], list[int]]:
    """Gemma 3, whose layers have windows: the same."""
    windows = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    text = gemma3.TextConfig("gemma3", num_hidden_layers=4, head_dim=16, vocab_size=300, mm_tokens_per_image=4,
                             **windows, **TEXT)  # fmt: skip
    vision = gemma3.VisionConfig("siglip_vision_model", num_hidden_layers=2, intermediate_size=64,
                                 num_attention_heads=4, **VISION)  # fmt: skip
    config = gemma3.ModelConfig(
        text, vision, "gemma3", image_token_index=PICTURE, vocab_size=300, hidden_size=64
    )
    return (
        gemma3.Model(config),
        {"pixel_values": mx.random.normal((1, 3, 56, 56))},
        [3, *[PICTURE] * 4, 5, 6, 7],
    )


def tokens(model: Any, ids: list[int], cache: Any, pixel_values: Any = None, **picture: Any) -> list[int]:
    """24 greedy tokens."""
    steps = generate_step(
        mx.array([ids]),
        model,
        pixel_values,
        mx.ones((1, len(ids)), mx.int32),
        max_tokens=24,
        prompt_cache=cache,
        **picture,
    )
    return [int(token) for token, _ in steps]


def main() -> int:
    """Compare. Returns the exit code."""
    wrong = 0
    for make in (qwen, gemma):
        mx.random.seed(3)
        model, picture, ids = make()
        model.update(tree_map(lambda x: x * 3 if x.ndim == 2 else x, model.parameters()))  # answers that vary
        language = model.language_model
        for name, given in (("text", {}), ("a picture", picture)):
            prompt = ids if given else [i for i in ids if i < PICTURE] * 4
            expected = tokens(model, prompt, make_prompt_cache(language), **given)
            for bits in (0, 8, 4):
                cache = kvant.make_prompt_cache(language, 128, kv_bits=bits, kv_group_size=16)
                same = sum(
                    a == b for a, b in zip(tokens(model, prompt, cache, **given), expected, strict=True)
                )
                print(f"{make.__name__}, {name}, {bits} bits: {same} of 24 tokens are those of mlx-vlm's own "
                      f"cache, "
                      f"{len(set(expected))} different ones")  # fmt: skip
                wrong += not bits and same < 24
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
