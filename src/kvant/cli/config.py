"""The config file: presets, and other defaults of flags, for one command or all that have them.

A flag overrides a preset, which overrides the environment, then the file, then the model's own settings.
"""

import inspect
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from kvant.cli import options
from kvant.cli.defaults import CONFIGURED, BadValueError, Defaults
from kvant.engine.sampling import SamplingOptions
from kvant.errors import KvantError, did_you_mean, one_line
from kvant.files import read_user_file

FILE = "config.toml"
MAX_BYTES = 32 * 1024  # Python's TOML parser can take more than linear time
PATH_VARIABLE = "KVANT_CONFIG"
MODEL_VARIABLE = "KVANT_MODEL"
PRESETS = "presets"
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list of strings",
}

Flags = Mapping[str, tuple[str, Any]]  # flag without dashes -> parameter, and the type of its value


@dataclass(frozen=True, slots=True)
class Settings:
    """A config file's tables as written."""

    path: Path | None  # None: there is no file
    shared: Mapping[str, Any] = field(default_factory=dict)
    commands: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def defaults(command: str) -> Defaults:
    """Return the defaults of a command's flags from the config file and the environment, and its presets."""
    settings = read_settings()
    flags = command_flags(command)
    place = str(settings.path or f"{config_path()}, which does not exist,")
    merged = Defaults((name for name, _ in flags.values()), checked_presets(settings), place)
    for table in checked_tables(settings, command, flags):
        merged.override(table, FILE)
    if model := os.environ.get(MODEL_VARIABLE):
        merged.override({"model": model}, MODEL_VARIABLE)
    _, kind = flags.get("model", ("", str))
    if kind is list and isinstance(merged.get("model"), str):  # serve takes several
        merged["model"] = [merged["model"]]
    return merged


def read_settings() -> Settings:
    """Read the user's config file; return empty settings if there is none."""
    path = config_path()
    if path is None or not (path.exists() or PATH_VARIABLE in os.environ):
        return Settings(None)
    if not path.is_file():
        raise KvantError(f"{PATH_VARIABLE} is {str(path)!r}, which is not a file")
    data = read_user_file(path, MAX_BYTES)
    import tomllib

    try:
        raw = tomllib.loads(data.decode().replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:  # including UnicodeDecodeError
        raise BadValueError(f"{path}: not TOML: {one_line(error)}") from error
    tables = {name: raw.pop(name) for name in (*CONFIGURED, PRESETS) if name in raw}
    presets = tables.pop(PRESETS, {})
    named = (
        {f"{PRESETS}.{name}": table for name, table in presets.items()} if isinstance(presets, dict) else {}
    )
    for name, table in {**tables, PRESETS: presets, **named}.items():
        if not isinstance(table, dict):
            raise BadValueError(f"{path}: {name} is {_shown(table)}; expected a table, [{name}]")
    return Settings(path, raw, tables, presets)


def config_path() -> Path | None:
    """Return the config file's path: KVANT_CONFIG (none if that is empty), or one in the user's folder."""
    named = os.environ.get(PATH_VARIABLE)
    if named is not None:
        return Path(os.path.expanduser(named)) if named else None
    import platformdirs

    return platformdirs.user_config_path("kvant") / FILE


def checked_tables(settings: Settings, command: str, flags: Flags) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return values by parameter: those of the file's top, and those of the command's table."""
    shared = (
        check(settings, "", settings.shared, shared_flags(), "generate and chat") if settings.shared else {}
    )
    return shared, check(settings, f"{command}.", settings.commands.get(command, {}), flags, command)


def checked_presets(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the presets by name, each as values by parameter."""
    if not settings.presets:
        return {}
    flags = {flag: kind for flag, kind in shared_flags().items() if flag != "preset"}
    return {
        name: check(settings, f"{PRESETS}.{name}.", table, flags, "a preset")
        for name, table in settings.presets.items()
    }


def check(
    settings: Settings, where: str, table: Mapping[str, Any], flags: Flags, whose: str
) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        if key not in flags:
            near = did_you_mean(key.replace("_", "-"), flags)
            raise BadValueError(f"{settings.path}: {where}{key} is not a flag of {whose}{near}")
        name, kind = flags[key]
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise BadValueError(
                f"{settings.path}: {where}{key} is {_shown(value)!r}; expected a number of 64 bits"
            )
        if name == "chat_template_config" and isinstance(value, dict):
            value = json.dumps(value)
        elif name == "max_kv_size" and type(value) is int:
            value = str(value)
        elif name == "model" and kind is list and isinstance(value, str):
            value = [value]
        right = isinstance(value, (int, float) if kind is float else kind)
        if kind is list:
            right = right and all(isinstance(item, str) for item in value)
        if not right or (isinstance(value, bool) and kind is not bool):
            raise BadValueError(f"{settings.path}: {where}{key} is {_shown(value)!r}; expected {WORDS[kind]}")
        values[name] = value
    return values


def _shown(value: object) -> str:
    try:
        return str(value)[:80]
    except ValueError:  # Python refuses to format numbers of more than 4,300 digits
        return "a number of thousands of digits"


def shared_flags() -> Flags:
    """Return the flags that generate and chat share, which the file's top and presets may set."""
    groups = [*options.flags(options.RunOptions), *options.flags(SamplingOptions)]
    return _flags((option.name, options.annotation(option)) for option in groups)


def command_flags(command: str) -> Flags:
    """Return a command's flags whose defaults can be changed."""
    parameters = inspect.signature(getattr(import_module(f"kvant.cli.{command}"), command)).parameters
    return _flags((name, parameter.annotation) for name, parameter in parameters.items() if name != "prompt")


def _flags(parameters: Iterable[tuple[str, Any]]) -> Flags:
    flags = {}
    for name, annotation in parameters:
        kind, option = get_args(annotation)[:2] if get_origin(annotation) is Annotated else (annotation, None)
        if kind is typer.Context or isinstance(option, ArgumentInfo):
            continue
        declared = option.param_decls if isinstance(option, OptionInfo) else None
        flag = next((text for text in declared or () if text.startswith("--")), options.flag(name))
        flags[flag.partition("/")[0].removeprefix("--")] = name, _kind(kind)
    return flags


def _kind(annotation: Any) -> type:
    """Return bool, int, float, str or list for an annotation such as ``list[str] | None``."""
    kind = next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)
    kind = get_origin(kind) or kind
    return kind if kind in (bool, int, float, list) else str  # a path is a string


def config(
    path: Annotated[
        bool, typer.Option("--path", help="Print where the file is looked for, and nothing else.")
    ] = False,
) -> None:
    """Show the config file, and what it sets.

    The command checks all of it. Top-level keys are flags of generate and chat; serve, plan and report use
    those that they have, too. [generate], [chat], [serve], [plan] and [report] are for one command,
    [presets.NAME] for --preset NAME.
    """
    expected = config_path()
    if path:
        print("" if expected is None else expected)
        return
    settings = read_settings()
    checked_presets(settings)
    for command in settings.commands or CONFIGURED[:1]:
        checked_tables(settings, command, command_flags(command))
    if settings.path is None:
        print(f"# {expected} does not exist" if expected else f"# no file: {PATH_VARIABLE} is empty")
    else:
        print(f"# {settings.path}\n{read_user_file(settings.path, MAX_BYTES).decode().rstrip()}")
