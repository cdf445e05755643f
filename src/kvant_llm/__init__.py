"""Plugin that offers kvant's models to the command ``llm`` and its Python library: the extra ``llm``.

It is outside of the package kvant, whose import loads MLX: every ``llm`` imports this plugin, whatever model
it uses.
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
    """Register the embedded and the pulled models without loading any."""
    for name in ["pocket", *_pulled()]:
        register(KvantModel(name))


def _pulled() -> list[str]:
    """List pulled models without importing MLX."""
    if "kvant" in sys.modules:
        return _names()
    package = find_spec("kvant")
    assert package is not None
    sys.modules["kvant"] = bare = ModuleType("kvant")  # the package without running its __init__
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
    except WeightsError as error:  # llm's other models still work
        log.warning("kvant: %s", error)
        return []
