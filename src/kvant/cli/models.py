"""``kvant models``: list known and pulled models with the size of their caches."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant import weights
from kvant.bridge.architectures import ALLOWED, NEEDS_METAL, REFUSED, REMAPPED, module_name
from kvant.bridge.config import is_bridged
from kvant.cli import terminal
from kvant.engine.load import POCKET, find_model
from kvant.errors import ModelError
from kvant.files import read_json
from kvant.machine import this_machine
from kvant.models.architectures import ARCHITECTURES
from kvant.models.config import ModelConfig
from kvant.operators.packing import PACKINGS
from kvant.plan import Checkpoint, plan
from kvant.sizes import format_bytes
from kvant.weights.imported import imported_models, size_of
from kvant.weights.known import packaged_models

if TYPE_CHECKING:
    from rich.console import RenderableType

GROUP = 32  # values that share a float16 scale
CACHE_BITS = (16, *PACKINGS)
CACHE_TOKENS = 4096
CACHE_COLUMN = "cache for\n4k tokens"
MAX_COUNT = 10**8  # more heads, layers or tokens than any model has; a config may contain anything


@dataclass(frozen=True, slots=True)
class Row:
    """A model. None: unknown."""

    name: str
    bytes: int  # of all known files
    context: int | None  # tokens
    # by bits of a value; below 16 in groups of 32 with float16 scales
    cache_bytes_per_token: dict[int, float] | None
    license: str | None
    here: str  # "embedded", "yes", "no", or "changed" since verified; only the first two can be loaded
    way: str | None  # "native": kvant's decoder; "bridged": mlx-lm's class with kvant's cache; or "refused"
    problem: str | None = None  # what has changed, or why it is refused
    fits_here: bool | None = None  # according to its memory plan, with a cache for CACHE_TOKENS at 8 bits


def models(
    json_rows: Annotated[
        bool, typer.Option("--json", help="Print the list as JSON instead of a table.")
    ] = False,
    architectures: Annotated[
        bool,
        typer.Option(
            "--architectures", help="List architectures instead of models: native, bridged or refused."
        ),
    ] = False,
) -> None:
    """List the models known by name, and others pulled or imported."""
    if architectures:
        ways = _architectures()
        lines = (
            f"{way['model_type']:24} {way['way']}" + (f": {way['reason']}" if way["reason"] else "")
            for way in ways
        )
        terminal.show(ways, lines, as_json=json_rows)
        return
    rows = _rows()
    terminal.show([asdict(row) for row in rows], _table(rows), as_json=json_rows)


def _table(rows: list[Row]) -> "Iterator[RenderableType]":
    several = any(row.way not in (None, "native") for row in rows)
    texts = []
    for row in rows:
        per_token = (row.cache_bytes_per_token or {}).get(8)
        cache = "" if per_token is None else format_bytes(round(per_token * _tokens(row.context)))
        context = "" if row.context is None else f"{row.context:,}"
        fits = {True: "yes", False: "no", None: ""}[row.fits_here]
        numbers = [format_bytes(row.bytes), cache, context]
        way = [row.way or ""] if several else []
        texts.append([row.name, row.here, fits, *numbers, row.license or "", *way])
    right = ["size", CACHE_COLUMN, "context"]
    columns = ["name", "here", "fits\nhere", *right, "license", *(["way"] if several else [])]
    yield terminal.table(columns, texts, right=right, padding=0)
    machine = this_machine()
    memory = f"{format_bytes(machine.limit_bytes)} ({machine.limit_source})"
    yield (
        f"cache: at 8 bits, for {CACHE_TOKENS} tokens or the whole context; "
        f"fits here: all of a run in {memory}"
    )
    yield (
        f"names of architectures: {len(ARCHITECTURES)} native, {len(_bridged())} bridged, which is mlx-lm's "
        "model with kvant's cache (--architectures lists them)"
    )
    for row in rows:
        if row.problem is not None:
            yield f"{row.name}: {row.problem}"


def _rows() -> list[Row]:
    pocket = find_model(POCKET)
    size = sum(path.stat().st_size for path in pocket.iterdir() if path.suffix in (".json", ".safetensors"))
    rows = [_row(POCKET, read_json(pocket / "config.json"), "MIT", size, "embedded")]
    here = {reference: pulled for pulled in weights.pulled() for reference in pulled.references}
    imported = imported_models()
    licenses = {name: packaged.license for name, packaged in packaged_models().items()}
    for name, packaged in packaged_models().items():
        if name not in imported:
            rows.append(_row(name, packaged.config, packaged.license, packaged.tensor_bytes, "no"))
    for name, folder in imported.items():
        rows.append(_row(name, _config_of(folder), licenses.get(name), size_of(folder), "yes"))
    for name, model in weights.known_models().items():
        size = sum(file.bytes for file in model.files if file.bytes is not None)
        rows.append(_row(name, model.config, model.license, size, "no", here.pop(name, None)))
    for reference, pulled in here.items():
        rows.append(_row(reference, _config_of(pulled.folder), None, 0, "yes", pulled))
    return rows


def _config_of(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json(folder / "config.json")
    except ModelError:
        return {}


def _row(
    name: str,
    config: Mapping[str, Any],
    terms: str | None,
    size: int,
    here: str,
    pulled: weights.Pulled | None = None,
) -> Row:
    way, problem = way_of(config)
    if pulled is not None:
        size = sum(file.bytes for file in pulled.files.values())
        here = "changed" if pulled.problem else "yes"
        problem = pulled.problem or problem
    context = _count(config, "max_position_embeddings")
    fits = _fits(config, size, context) if way == "native" else None
    return Row(name, size, context, cache_bytes(config), terms, here, way, problem, fits)


def _fits(config: Mapping[str, Any], size: int, context: int | None) -> bool | None:
    """Whether a model's plan fits into this machine's memory; None if it cannot be planned."""
    try:
        planned = plan(Checkpoint.from_facts(config, size or None), max_kv_size=_tokens(context))
    except (ModelError, ValueError):
        return None
    return planned.total <= this_machine().limit_bytes


def _tokens(context: int | None) -> int:
    """Return the tokens of the table's cache, limited by the model's context."""
    return min(CACHE_TOKENS, context or CACHE_TOKENS)


def way_of(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return how a config.json is run, and why it is refused; None: the config is empty."""
    if not config:
        return None, None
    try:
        if is_bridged(config):
            module_name(config)
            return "bridged", None
        ModelConfig.from_dict(config)
        return "native", None
    except ModelError as error:
        return "refused", str(error)


def _bridged() -> list[str]:
    """Return the architectures that run as mlx-lm's classes, by their names in config.json."""
    known = {name for name, module in REMAPPED.items() if module in ALLOWED}
    return sorted((ALLOWED | known) - ARCHITECTURES.keys(), key=str.lower)


def _architectures() -> list[dict[str, str | None]]:
    ways: list[tuple[str, str, str | None]] = [(name, "native", None) for name in sorted(ARCHITECTURES)]
    ways += [(name, "bridged", "only on a Mac" if name in NEEDS_METAL else None) for name in _bridged()]
    ways += [(name, "refused", reason) for name, reason in sorted(REFUSED.items())]
    return [dict(zip(("model_type", "way", "reason"), way, strict=True)) for way in ways]


def cache_bytes(config: Mapping[str, Any]) -> dict[int, float] | None:
    """Return the bytes of a cached token by bits of a value; None if the config lacks the shape."""
    layers, heads, hidden = (
        _count(config, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    kv_heads = heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads")
    head_dim = hidden // heads if hidden and heads else None
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
    if not layers or not kv_heads or not head_dim:
        return None
    values = 2 * layers * kv_heads * head_dim
    return {bits: values * (bits / 8 + (0 if bits == 16 else 2 / GROUP)) for bits in CACHE_BITS}


def _count(config: Mapping[str, Any], key: str) -> int | None:
    """Read a positive number of the config; return None for anything else."""
    value = config.get(key)
    return value if type(value) is int and 0 < value <= MAX_COUNT else None
