"""The architectures of mlx-lm that kvant loads: every module of the installed version is allowed or
refused.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING, _get_classes
from support.tiny_models import CONFIGS

from kvant.bridge.architectures import ALLOWED, NEEDS_METAL, REFUSED, REMAPPED, REMAPPED_BY_CLASS, module_name
from kvant.errors import ModelError

MODELS = Path(next(iter(find_spec("mlx_lm.models").submodule_search_locations)))  # type: ignore[union-attr, arg-type]


def defines_a_model(path: Path) -> bool:
    """Whether a module of mlx-lm has a class Model of its own or another module's. It is read, not
    imported.
    """
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, ast.ClassDef)}
    imports = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return "Model" in names | {alias.asname or alias.name for alias in imports}


def test_every_architecture_of_mlx_lm_is_allowed_or_refused() -> None:
    found = {path.stem for path in MODELS.glob("*.py") if defines_a_model(path)}
    assert found == ALLOWED | REFUSED.keys()
    assert not ALLOWED & REFUSED.keys()
    assert NEEDS_METAL <= ALLOWED
    assert ALLOWED <= CONFIGS.keys() <= found  # a tiny configuration of each


def test_the_remapping_is_mlx_lm_s() -> None:
    assert REMAPPED == MODEL_REMAPPING
    assert REMAPPED_BY_CLASS == MODEL_ARCHITECTURE_REMAPPING
    assert {*REMAPPED.values(), *REMAPPED_BY_CLASS.values()} <= ALLOWED | REFUSED.keys()


HYBRID: dict[str, Any] = {"model_type": "bailing_hybrid"}
TAKEN = [
    *({"model_type": kind} for kind in ("gemma4", "mistral")),
    {"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"]},
    *(
        HYBRID | {"architectures": a}
        for a in ([], ["Another", "BailingMoeV3ForCausalLM"], "BailingMoeV3ForCausalLM")
    ),
]


@pytest.mark.parametrize("config", TAKEN, ids=str)
def test_the_module_is_the_one_mlx_lm_takes(config: dict[str, Any]) -> None:
    theirs, _ = _get_classes(config)
    assert import_module(f"mlx_lm.models.{module_name(config)}").Model is theirs


NOT_A_MODULE = ["__init__", "base", "cache", "../utils", "os", "llama.py", "", "Llama", "gemma5"]
REFUSALS = [
    *((kind, "is not supported") for kind in NOT_A_MODULE),
    *((kind, "expected the name of an architecture") for kind in (None, 3, ["llama"], {})),
    ("olmo", "olmo is not supported: mlx-lm's module ends the whole process"),
    ("deepseek_v41_text", "deepseek_v41_text is not supported: its layers keep their rows"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSALS)
def test_another_name_is_refused(kind: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        module_name({"model_type": kind})


@pytest.mark.parametrize("classes", [[{}], [3], {"a": 1}, 7, [["x"]]], ids=str)
def test_architectures_of_another_type_say_nothing(classes: object) -> None:
    assert module_name({"model_type": "bailing_hybrid", "architectures": classes}) == "bailing_hybrid"
