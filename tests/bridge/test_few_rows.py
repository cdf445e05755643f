"""mlx-lm's linear layers, whose few rows are products of a matrix and a vector: the logits are mlx-lm's."""

from pathlib import Path

import architectures as table
import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from support.bridged import write_mlx_lm
from support.tiny_models import build

from kvant import blas
from kvant.bridge import few_rows
from kvant.bridge.few_rows import FewRowsLinear, multiplies_few_rows, multiply_few_rows
from kvant.engine.load import load_model
from kvant.models import gemv

pytestmark = pytest.mark.skipif(blas.sgemv() is None, reason="MLX multiplies with its own BLAS")


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "BREAK_EVEN_ELEMENTS", 0)
    monkeypatch.setattr(few_rows, "FROM_ELEMENTS", 0)


def logits_of(model: Module) -> list[mx.array]:
    cache = make_prompt_cache(model)
    return [
        model(mx.array([ids]), cache=cache)[0].astype(mx.float32)
        for ids in ([5, 9, 2, 6, 5, 3], [7], [11], [4])
    ]


@pytest.mark.parametrize("name", table.measured())
def test_the_logits_are_mlx_lms(name: str) -> None:
    model, _ = build(name)
    expected = logits_of(model)
    multiply_few_rows(model)
    assert multiplies_few_rows(model)
    for ours, theirs in zip(logits_of(model), expected, strict=True):
        assert table.worst(table.errors(table.finite(ours), table.finite(theirs))) < 1e-4


def test_a_model_that_is_loaded_has_them(tmp_path: Path) -> None:
    model = load_model(write_mlx_lm(tmp_path / "model", "gemma3_text"))
    assert model.computes_at_once
    layers = [module for module in model.module.modules() if isinstance(module, FewRowsLinear)]  # type: ignore[attr-defined]
    assert layers
    assert all(memoryview(layer["weight"].T).c_contiguous for layer in layers)
