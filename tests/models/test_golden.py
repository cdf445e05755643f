"""Every architecture and kind of RoPE against logits that transformers computed (scripts/golden.py)."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.checkpoints import TOLERANCE, change_tensors, check_three_ways, in_steps
from support.golden import CASES, GOLDEN, IDS
from support.numbers import relative_error

from kvant.models import Decoder, ModelConfig, load_decoder
from kvant.models.architectures import ARCHITECTURES
from kvant.tools.bench.adapters import MLXLM
from kvant.tools.bench.engines import EngineSpec

Load = Callable[[str], Decoder]
MODELS = sorted(set(CASES.values()))
FREQUENCIES: list[dict[str, Any]] = json.loads((GOLDEN / "frequencies.json").read_text())


def _config(case: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((GOLDEN / case.replace(" ", "-") / "config.json").read_text())
    return raw


def _folder(case: str, tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(parents=True)
    shutil.copy(GOLDEN / "weights" / f"{CASES[case]}.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(case) | changes))
    return folder


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A function (case) -> its model, which is loaded once."""
    return cache(lambda case: load_decoder(_folder(case, tmp_path_factory.mktemp("golden"))))


@cache
def _expected(case: str) -> mx.array:
    return mx.array(np.load(GOLDEN / case.replace(" ", "-") / "logits.npy"))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers(case: str, load: Load) -> None:
    """In one pass, and through a cache without quantization, with biases in it and split off."""
    model = load(case)
    assert model.dtype == mx.float32
    for split in (True, False):
        check_three_ways(model, _expected(case), IDS, bias_split=split)


@pytest.mark.parametrize(
    "case",
    [
        "qwen2 linear",
        "llama yarn",
        "qwen3 yarn",
        "llama llama3",
        "smollm3 yarn",
        "mistral old dynamic",
        "olmo2 linear",
    ],
)
def test_the_benchmark_gives_mlx_lm_the_positions_that_it_does_not_read(case: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    folder = _folder(case, tmp_path)
    adapter = MLXLM(EngineSpec("mlx-lm", kv_bits=0), folder, 512)
    assert relative_error(adapter._model(mx.array([IDS]))[0], _expected(case)) < TOLERANCE
    by_itself = relative_error(load_model(folder)[0](mx.array([IDS]))[0], _expected(case))
    assert by_itself < TOLERANCE if case in ("qwen3 yarn", "mistral old dynamic") else by_itself > 0.01


def test_the_fixture_tells_the_kinds_apart() -> None:
    """With tolerances of the same size as the differences nothing would have been checked."""
    for model in MODELS:
        wanted = [f"{model} {kind}" for kind in ("default", "linear", "llama3", "yarn", "dynamic")]
        kinds = [case for case in wanted if case in CASES]
        assert len(kinds) == {"llama-bias": 3, "qwen3-moe-mixed": 2}.get(model, 5)
        for i, case in enumerate(kinds):
            for other in kinds[:i]:
                assert relative_error(_expected(case), _expected(other)) > 100 * TOLERANCE, (case, other)
    assert {_config(case)["model_type"] for case in CASES} == {*ARCHITECTURES}


def _weights(case: str) -> dict[str, mx.array]:
    return dict(mx.load(str(GOLDEN / "weights" / f"{CASES[case]}.safetensors")))  # type: ignore[arg-type]


def _parts(model: str) -> list[str]:
    """The ends of names of its biases and norms."""
    names = [name for name in _weights(f"{model} default") if name.endswith(("bias", "norm.weight"))]
    return sorted({".".join(name.split(".")[-2:]) for name in names})


MOE = ("qwen3-moe", "qwen3-moe-mixed")
# A bias or a norm that is left out, or a setting that is another.
NOTICED: list[tuple[str, dict[str, Any] | str]] = [
    *((f"{model} default", part) for model in MODELS for part in _parts(model)),
    *(("smollm3 default", {"no_rope_layers": layers}) for layers in ([1, 1], [0, 1], [0, 0])),
    *((f"{model} default", {"num_experts_per_tok": n}) for model in MOE for n in (1, 3)),
    *(
        (case, {"norm_topk_prob": not _config(case)["norm_topk_prob"]})
        for case in (f"{m} default" for m in MOE)
    ),
    *((case, {"sliding_window": len(IDS)}) for case in CASES if "window" in case),
]


@pytest.mark.parametrize(("case", "change"), NOTICED, ids=str)
def test_what_is_left_out_or_another_is_noticed(
    case: str, change: dict[str, Any] | str, tmp_path: Path
) -> None:
    folder = _folder(case, tmp_path, **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        make = mx.ones_like if change.endswith("norm.weight") else mx.zeros_like
        weights = _weights(case)
        change_tensors(
            folder / "model.safetensors", {x: make(weights[x]) for x in weights if x.endswith(change)}
        )
    assert relative_error(load_decoder(folder)(mx.array([IDS]))[0], _expected(case)) > 100 * TOLERANCE


@pytest.mark.parametrize("entry", FREQUENCIES, ids=lambda e: f"{e['config']['rope_parameters']['rope_type']}")
def test_frequencies_are_transformers(entry: dict[str, Any]) -> None:
    """transformers computes them in float32, each with a few roundings. Dynamic's are those at the context
    limit.
    """
    config = ModelConfig.from_dict(entry["config"])
    rotary = config.rope.rotary(config.head_dim)
    np.testing.assert_allclose(rotary.frequencies, entry["frequencies"], rtol=2e-6)
    assert rotary.factor == pytest.approx(entry["factor"], rel=1e-12)
    if config.rope.kind == "dynamic":
        assert config.max_position_embeddings == entry["length"]


@pytest.mark.parametrize("case", [case for case in CASES if "dynamic" in case])
def test_dynamic_positions_depend_on_the_model_alone(case: str, load: Load) -> None:
    """Not on how many tokens a cache reserves, nor on how a prompt is cut or how long it is."""
    model = load(case)
    assert model.config.max_position_embeddings == len(IDS)
    for size in (5, 19):
        for reserved, bounds in ((size, [0, size]), (len(IDS), [0, 3, size]), (100, [*range(size + 1)])):
            layers = model.make_cache(reserved, kv_bits=0)
            assert relative_error(in_steps(model, IDS, bounds, layers), _expected(case)[:size]) < TOLERANCE
