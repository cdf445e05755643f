"""Defaults of a command's flags from outside of its code, and their sources."""

from collections.abc import Iterable, Mapping
from typing import Any

import typer
from typer.exceptions import TyperException

from kvant.errors import did_you_mean

# commands that take defaults from the config file
CONFIGURED = ("generate", "chat", "serve", "plan", "report")
OF_THE_TEMPLATE = ("system_prompt", "chat_template_config")  # have no effect without a chat template


class BadValueError(TyperException):
    """A value that a flag does not accept. The message names the flag, the value and what was expected."""

    exit_code = 2


class Defaults(dict[str, Any]):
    """Defaults by parameter for a command's context; ``sources`` describes where each comes from."""

    def __init__(
        self, parameters: Iterable[str], presets: Mapping[str, Mapping[str, Any]], place: str
    ) -> None:
        """Start without defaults; :meth:`use` applies one of ``presets``, which are written in ``place``."""
        super().__init__()
        self.sources: dict[str, str] = {}
        self._parameters = set(parameters)
        self._presets = presets
        self._place = place

    def override(self, values: Mapping[str, Any], source: str) -> None:
        """Override the current defaults. Names that the command does not have are ignored."""
        names = self._parameters & values.keys()
        self.update({name: values[name] for name in names})
        self.sources.update(dict.fromkeys(names, source))

    def use(self, preset: str) -> None:
        """Override the current defaults with a preset's values."""
        if preset not in self._presets:
            known = (
                f"{self._place} has {', '.join(self._presets) or 'none'}{did_you_mean(preset, self._presets)}"
            )
            raise BadValueError(f"--preset is {preset!r}; {known}")
        self.override(self._presets[preset], f"preset {preset}")


def settings_used(context: typer.Context, values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return values from the config file, a preset or the environment: name -> value and its source."""
    defaults = context.default_map
    if not isinstance(defaults, Defaults):
        return {}
    used = {
        name: (values[name], defaults.sources[name])
        for name in values
        if name in defaults.sources and source_of(context, name) == "DEFAULT_MAP"
    }
    for name, (_, source) in list(used.items()):
        blocker = blocked_by(name, values)
        if name == "draft_model" and source_of(context, "draft") == "COMMANDLINE":
            blocker = "draft"  # even if it is none
        # Two values from different sources were not meant to be used together.
        if blocker is not None and (blocker not in used or used[blocker][1] != source):
            values[name] = next(option.default for option in context.command.params if option.name == name)
            del used[name]
    return used


def source_of(context: typer.Context, name: str) -> str | None:
    """Return click's name for the source of a parameter's value."""
    source = context.get_parameter_source(name)
    return None if source is None else source.name


def blocked_by(name: str, values: Mapping[str, Any]) -> str | None:
    """Return the parameter whose value makes this one ineffective; both together would be refused."""
    from kvant.cache.kv_format import PMX  # imports MLX, which the help does not need

    if name in ("kv_bits", "kv_group_size") and values.get("kv_format") not in (None, "", PMX):
        return "kv_format"
    if name == "kv_format" and values[name] == PMX:
        return "kv_bits" if values.get("kv_bits") == 0 else None
    if name == "kv_format":
        return next((other for other in ("kv_bits", "kv_group_size") if values.get(other) is not None), None)
    if name == "kv_tail":
        return "kv_bits" if values["kv_tail"] and values["kv_bits"] == 0 else None
    if name == "kv_group_size":
        return "kv_bits" if values["kv_bits"] == 0 else None
    if name == "num_draft_tokens":
        return None if values["draft_model"] or values.get("draft") == "mtp" else "draft_model"
    if name in ("draft", "draft_model"):
        other = "draft_model" if name == "draft" else "draft"
        if values.get(other) not in (None, "none"):
            return other
        return "deterministic" if values.get("deterministic") else None
    if name in (*OF_THE_TEMPLATE, "prefill"):
        return "ignore_chat_template" if values.get("ignore_chat_template") else None
    if name == "extra_eos_token":
        return "ignore_eos" if values["ignore_eos"] else None
    if "tasks" in values and name in ("samples", "seed"):
        return None if values["tasks"] else "tasks"
    from kvant.engine.sampling import NEUTRAL, OPTIONS

    needs = OPTIONS[name].metadata["needs"] if name in OPTIONS else ""
    if not needs or values[needs] is None or values[needs] != NEUTRAL.get(needs, OPTIONS[needs].default):
        return None
    return str(needs)
