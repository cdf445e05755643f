"""What mlx-lm's classes are told where they do not read what transformers writes; facts that are refused."""

import pytest

from kvant.bridge.translation import translated
from kvant.errors import ModelError
from kvant.plan import read_facts

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"


def test_layers_that_mlx_lm_s_class_cannot_have() -> None:
    types = {"layer_types": [LINEAR, FULL, LINEAR, FULL]}
    for given in (types, types | {"full_attention_interval": 2}):
        assert translated(given, "qwen3_next")["full_attention_interval"] == 2
    assert "full_attention_interval" not in translated(types, "gpt_oss")
    for wrong in ([FULL, LINEAR], [LINEAR, FULL, FULL]):
        with pytest.raises(ModelError, match="takes every nth layer for full"):
            translated({"text_config": {"layer_types": wrong}}, "qwen3_5")
    sizes = {"layer_types": [SLIDING, FULL], "per_layer_config": {"1": {"head_dim": 64}}}
    assert translated(sizes, "gemma4_text")["global_head_dim"] == 64
    for module, own in (("gemma3", sizes), ("gemma4", sizes | {"per_layer_config": {"0": {"head_dim": 64}}})):
        with pytest.raises(ModelError, match="has no such layers"):
            translated(own, module)


def test_where_rotary_positions_are_said() -> None:
    plain = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}
    own = translated({"rope_parameters": plain}, "x")
    assert (own["rope_theta"], own["partial_rotary_factor"], own["rope_scaling"]) == (5.0, 0.5, None)
    yarn = {"rope_type": "yarn", "rope_theta": 5.0, "factor": 2.0}
    own = translated({"text_config": {"rope_parameters": yarn, "rope_theta": 7.0}}, "x")["text_config"]
    assert (own["rope_theta"], own["rope_scaling"]) == (7.0, yarn)
    own = translated({"rope_parameters": {FULL: yarn, SLIDING: plain | {"rope_theta": 3.0}}}, "x")
    assert (own["rope_theta"], own["rope_local_base_freq"], own["rope_scaling"]) == (5.0, 3.0, yarn)


def test_facts_that_are_refused() -> None:
    with pytest.raises(ModelError, match=r"missing .* required positional argument"):
        read_facts({"model_type": "llama4_text", "vocab_size": 5})
