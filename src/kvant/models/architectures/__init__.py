"""The architectures that kvant loads, by the model_type of config.json. Each has a module here."""

from importlib import import_module
from pkgutil import iter_modules

from kvant.models.architectures.table import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture
    for module in iter_modules(__path__)
    if module.name != "table"
    for architecture in [import_module(f"{__name__}.{module.name}").ARCHITECTURE]
}
