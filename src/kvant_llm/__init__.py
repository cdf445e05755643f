"""kvant's models in the command ``llm`` and its Python library: the extra ``llm``.

Outside of kvant's package, whose first lines load MLX: every ``llm`` imports this, whatever model it is asked
for.
"""

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import llm

from kvant_llm.model import KvantModel

log = logging.getLogger("kvant")


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the embedded model and those that were pulled. None is loaded."""
    for name in ["pocket", *_pulled()]:
        register(KvantModel(name))


def _pulled() -> list[str]:
    """Names of the models that were pulled. MLX, which a list does not need, is not loaded for it."""
    if "kvant" in sys.modules:
        return _names()
    package = find_spec("kvant")
    assert package is not None
    sys.modules["kvant"] = bare = ModuleType("kvant")  # the package without its first lines
    bare.__path__ = list(package.submodule_search_locations or ())
    try:
        return _names()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvant"]:
            del sys.modules[name]


def _names() -> list[str]:
    from kvant.errors import WeightsError
    from kvant.weights import pulled

    try:
        return [model.references[0] for model in pulled()]
    except WeightsError as error:  # llm's other models are none the worse
        log.warning("kvant: %s", error)
        return []
