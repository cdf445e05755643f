"""What a config.json of the family says, and leaves out: against transformers' own config classes; what is
refused.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from support.checkpoints import (
    llama_config,
    mlx_lm_model,
    mlx_lm_module,
    tensor_shapes,
    write_reference,
)
from support.counts import count
from support.hostile import one_line, said
from support.runs import Run

from kvant.engine.generate import stream_generate
from kvant.errors import ModelError
from kvant.models import Decoder, ModelConfig, load_decoder
from kvant.models.architectures import ARCHITECTURES
from kvant.models.rope import Rope, read_rope

REQUIRED: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 5,
    "intermediate_size": 64,
    "vocab_size": 100,
}
REQUIRED["num_attention_heads"] = 32
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"
ON = {"use_sliding_window": True, "sliding_window": 16}
NOT_NULL = ("mistral", "qwen3_moe")  # num_key_value_heads of transformers' configs


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("nulls", [False, True])
def test_what_is_left_out_is_transformers_default(kind: str, nulls: bool) -> None:
    from transformers import AutoConfig

    said: dict[str, Any] = {"num_key_value_heads": None} if nulls and kind not in NOT_NULL else {}
    theirs = AutoConfig.for_model(kind, **REQUIRED, **said)
    ours = ModelConfig.from_dict({"model_type": kind, **REQUIRED, **said})
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 32)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert theirs.rope_parameters == {"rope_type": ours.rope.kind, "rope_theta": ours.rope.theta}
    window = theirs.sliding_window if kind == "mistral" else None
    assert ours.windows == (window,) * ours.num_hidden_layers
    # But for the context: where mlx-lm's class has no default, there is no limit.
    default = mlx_lm_module(kind).ModelArgs.__dataclass_fields__["max_position_embeddings"].default
    assert ours.max_position_embeddings == (theirs.max_position_embeddings if default is not None else None)
    assert ours.rotates == tuple(
        map(bool, getattr(theirs, "no_rope_layers", [True] * ours.num_hidden_layers))
    )
    network = mlx_lm_model(theirs.to_dict() | {"rope_theta": ours.rope.theta})
    names = {name for name, _ in tree_flatten(network.parameters())}
    vectors = {name for name, shape in tensor_shapes(ours).items() if len(shape) == 1}
    assert {name for name in names if name.endswith(".bias") or "norm" in name} == vectors
    if ours.experts is not None:
        experts = ours.experts
        assert (experts.count, experts.per_token, experts.inner_size, experts.normalized) == (
            theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size, theirs.norm_topk_prob
        )  # fmt: skip
        assert experts.layers == (theirs.decoder_sparse_step == 1,) * 5
    assert ours.attention_bias == any(name.endswith("q_proj.bias") for name in names)
    assert bool(ours.architecture.of_role("query_norm")) == any(
        name.endswith("q_norm.weight") for name in names
    )


@pytest.mark.parametrize(
    ("kind", "settings", "windows"),
    [
        ("mistral", {}, [4096] * 5),
        ("mistral", {"sliding_window": None}, [None] * 5),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, [None] * 5),
        ("qwen2", ON, [None] * 5),  # from layer 28 on
        ("qwen2", ON | {"max_window_layers": 5}, [None] * 5),
        ("qwen2", ON | {"max_window_layers": 3}, [None] * 3 + [16] * 2),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, [4096] * 5),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 5),
        ("qwen2", ON | {"layer_types": [FULL, SLIDING, FULL, FULL, SLIDING]}, [None, 16, None, None, 16]),
        ("smollm3", {"sliding_window": 16}, [None] * 5),
        ("smollm3", ON, [None, None, None, 16, None]),
        ("smollm3", ON | {"no_rope_layers": [1] * 5}, [None] * 5),
        ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": False}, [None] * 5),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}, [None] * 5),
        ("qwen3_moe", {"use_sliding_window": True}, [4096] * 5),
        ("qwen3_moe", ON | {"max_window_layers": 5}, [16] * 5),
        ("llama", {"sliding_window": 16}, [None] * 5),
        ("llama", {"sliding_window": 16, "layer_types": [SLIDING] * 4 + [FULL]}, [16] * 4 + [None]),
    ],
)
def test_the_windows_of_the_layers(kind: str, settings: dict[str, Any], windows: list[int | None]) -> None:
    raw = {
        "model_type": kind,
        **REQUIRED,
        "num_key_value_heads": 2,
        "max_position_embeddings": 9000,
        **settings,
    }
    config = ModelConfig.from_dict(raw)
    assert config.windows == tuple(windows)
    assert config.max_position_embeddings == 9000


def _rope(rope: dict[str, Any], **others: Any) -> Rope:
    return read_rope({"rope_parameters": rope, **others}, 64, 1000)


BOTH = {"rope_type": "linear", "factor": 2, "rope_theta": 5.0}
LINEAR_SAID: list[dict[str, Any]] = [  # each way to say the same
    {"rope_parameters": BOTH},
    {"rope_parameters": BOTH, "rope_theta": 7.0},
    {"rope_parameters": BOTH, "rope_scaling": dict(BOTH)},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5},
    {"rope_parameters": {"type": "linear", **BOTH, "beta_fast": None}},
]


def test_where_rotary_positions_are_said() -> None:
    for raw in LINEAR_SAID:
        assert read_rope(raw, 64, 1000) == Rope("linear", 5.0, 2.0)
    for empty in (
        {},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_parameters": {"partial_rotary_factor": 1.0}},
    ):
        assert read_rope(empty, 64, 1000) == Rope(theta=10000.0)
    # As transformers fills it in, and what it lets win.
    own, outer = ({"original_max_position_embeddings": context} for context in (50, 40))
    assert _rope(LLAMA3).original_context == 1000
    assert _rope(LLAMA3 | own).original_context == 50
    assert _rope(YARN | own, **outer) == _rope(YARN | outer)


def test_the_context_of_dynamic_positions_is_longer() -> None:
    raw = {"model_type": "llama", **REQUIRED, "max_position_embeddings": 2048}
    for kind, context in (("dynamic", 5120), ("linear", 2048), ("yarn", 2048)):
        config = ModelConfig.from_dict(raw | {"rope_scaling": {"type": kind, "factor": 2.5}})
        assert config.max_position_embeddings == context


LINEAR = {"rope_type": "linear", "factor": 2.0}
PAIR = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
BAD_VALUES: list[tuple[dict[str, Any], str, list[Any]]] = [  # of a rope, a key, and what it cannot be
    (LINEAR, "factor", [0, 0.5, math.nan, math.inf, True, "2", 10**400]),
    (LLAMA3, "low_freq_factor", [4, 0]),
    (LLAMA3, "original_max_position_embeddings", [8192.0, -1, 0]),
    (YARN | {"beta_slow": 2}, "beta_fast", [1]),
    (YARN, "beta_slow", [1e-320]),
    (YARN, "truncate", ["no"]),
    (YARN, "attention_factor", [0, -1.0]),
    (PAIR, "mscale", [-1.0]),
    (YARN, "rope_theta", [1.0]),
    ({}, "rope_theta", [0.5]),
]
BAD_ROPES: list[tuple[dict[str, Any], str]] = [
    *((rope | {key: value}, said(key, value)) for rope, key, values in BAD_VALUES for value in values),
    ({"rope_type": "longrope"}, "'longrope' is not supported; supported: 'default', 'linear', 'dynamic'"),
    ({"type": "mrope", "mrope_section": [1]}, "rope type 'mrope'"),
    ({"rope_type": ["yarn"]}, r"rope type \['yarn'\]"),
    ({"rope_type": "linear"}, "factor is missing"),
    (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor is missing"),
    (LINEAR | {"beta_fast": 3}, "beta_fast 3, .* rope type 'linear'"),
    (LINEAR | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    (YARN | {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta 0.1"),
    ({"rope_type": "dynamic", "factor": 1e29}, r"rope factor 1e\+29 makes a context of more than"),
]


@pytest.mark.parametrize(("rope", "message"), BAD_ROPES)
def test_rotary_positions_that_are_refused(rope: dict[str, Any], message: str) -> None:
    with one_line(ModelError, message):
        _rope(rope)


def test_dynamic_positions_need_two_pairs() -> None:
    with pytest.raises(ModelError, match="head_dim is 2; rope type 'dynamic' needs at least 4"):
        read_rope({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2, 1000)


ODD = st.one_of(
    *(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.integers(), max_size=2),
    ),
    *(st.floats(1e-6, 1e6), st.integers(1, 100_000)),
)
NAMES = ["factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
NAMES += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"]


@settings(
    max_examples=count(40, 400),
    derandomize=True,
    database=None,
)
@given(
    st.sampled_from(["linear", "dynamic", "llama3", "yarn"]),
    st.dictionaries(st.sampled_from(NAMES), ODD, max_size=4),
    st.sampled_from([2, 4, 64, 128]),
    st.integers(1, 100_000),
)
def test_any_values_are_refused_or_give_frequencies(
    kind: str, changes: dict[str, Any], head_dim: int, length: int
) -> None:
    known = {"linear": {"factor": 2.0}, "dynamic": {"factor": 2.0}, "llama3": LLAMA3, "yarn": YARN}[kind]
    try:
        rope = read_rope({"rope_parameters": {"rope_type": kind, **known, **changes}}, head_dim, 1000)
    except ModelError:
        return
    rotary = rope.rotary(head_dim)
    assert len(rotary.frequencies) == head_dim // 2
    assert all(math.isfinite(f) and 0 < f <= 1 for f in rotary.frequencies)
    assert 0 < rotary.factor < math.inf


def test_no_context_limit_but_the_reservation(tmp_path: Path, pocket: tuple[Decoder, Any]) -> None:
    config = llama_config(vocab_size=1280)
    del config["architectures"], config["max_position_embeddings"]
    model = load_decoder(write_reference(tmp_path, config)[0])
    assert model.config.max_position_embeddings is None
    assert model.make_cache().max_seq_len == 4096
    prompt = [t % 290 for t in range(2100)]  # more than transformers' default of 2048
    assert len(list(Run(model, prompt, model.make_cache(2110), max_tokens=-1))) == 11
    assert list(stream_generate(model, pocket[1], [1, 2], max_tokens=5))
    with pytest.raises(ValueError, match="no context limit"):
        stream_generate(model, pocket[1], [1, 2], max_tokens=-1)
