"""The models of ``kvant serve``: their names, their shares of the memory, and how to load each."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvant.cache.disk import DiskCache
from kvant.cache.kv_format import PMX
from kvant.cli import options, ranks, terminal
from kvant.cli.fitting import named_format, plan_that_fits, with_weights
from kvant.cli.options import BadValueError, KvSize, RunOptions
from kvant.cli.session import drafts_for_pool, load_session, prepare
from kvant.engine.head_drafts import HeadDrafts
from kvant.engine.load import find_model
from kvant.engine.model_drafts import PooledDrafts
from kvant.errors import ContextError
from kvant.machine import Machine
from kvant.plan import MemoryPlan
from kvant.plan.memory import as_record
from kvant.server.metrics import Metrics
from kvant.server.served_model import ServedModel, served_model
from kvant.server.service import Service, make_pool
from kvant.server.settings import Settings
from kvant.sizes import format_bytes, list_bytes
from kvant.text.process import TextProcess

SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
FOREVER = "forever"


@dataclass(slots=True)
class Loader:
    """Loads one model for a server."""

    run: RunOptions  # the flags, with this model
    settings: Settings  # the server's, with this model and its aliases
    machine: Machine  # what the model may use
    other_bytes: int  # for requests and disk writes, not included in the machine's bytes
    disk: DiskCache | None
    process: TextProcess | None = None  # for the tokenizer of the first load; None: start one

    @property
    def max_kv_size(self) -> KvSize:
        """Return the --max-kv-size, the tokens to reserve for a sequence."""
        return options.kv_size(self.run.max_kv_size or options.AUTO)

    def plan(self) -> MemoryPlan:
        """Return the memory plan before loading; raise a ContextError if the model does not fit."""
        folder = find_model(self.run.model)
        checkpoint, settings, machine = prepare(
            self.run, folder, sequences=self.settings.sequences, machine=self.machine
        )
        checkpoint, settings = with_weights(self.run.weights, checkpoint, settings, self.max_kv_size, machine)
        return plan_that_fits(checkpoint, settings, self.max_kv_size, machine)

    def __call__(self, metrics: Metrics) -> Service:
        """Load the model and start its engine."""
        run = self.run
        process = self.process
        self.process = None
        deterministic = self.settings.deterministic
        session = load_session(
            run,
            process,
            max_kv_size=self.max_kv_size,
            sequences=self.settings.sequences,
            hashes=self.disk is not None,
            machine=self.machine,
        )
        planned = session.plan()
        terminal.say(f"memory: {describe_plan(planned, self.other_bytes)}", run.quiet)
        settings = replace(
            self.settings,
            cache=session.settings.cache,
            max_kv_size=planned.max_kv_size,
            template_variables=dict(session.template_variables),
        )
        with named_format(session.settings):
            pool = make_pool(settings, session.model)
        drafts = drafts_for_pool(session, run, pool, deterministic=deterministic)
        if self.disk is not None:
            pool.use_disk(self.disk, is_exact=deterministic)
        with options.named("--deterministic"):
            pooled = drafts if isinstance(drafts, PooledDrafts | HeadDrafts) else None
            service = Service(
                settings, session.model, session.tokenizer, pool, metrics, as_record(planned), pooled
            )
        session.say_cache(pool.describe(), run.quiet)
        self.run = replace(run, quiet=True)  # later loads are only logged
        return service


def offer(
    names: Sequence[str],
    run: RunOptions,
    settings: Settings,
    machine: Machine,
    *,
    aliases: Mapping[str, tuple[str, ...]],
    other_bytes: int,
    disk: DiskCache | None,
    process: TextProcess | None,
) -> list[ServedModel]:
    """Return the models of a server, not loaded yet.

    If there are several, each is planned with an equal share of the memory, or with all of it if it does not
    fit into its share. A ContextError is raised for a model that does not fit at all.

    Args:
        names: values of --model.
        run, settings: the flags; their model is ignored.
        machine: the memory for all models together.
        aliases: each model's aliases, by its name.
        other_bytes, disk, process: see :class:`Loader`.
    """
    share = replace(
        machine,
        limit_bytes=machine.limit_bytes // len(names),
        limit_source=f"1/{len(names)} of {machine.limit_source}" if len(names) > 1 else machine.limit_source,
    )
    models = []
    for place, name in enumerate(names):
        loader = Loader(
            replace(run, model=name),
            replace(settings, model=name, aliases=aliases[name]),
            share,
            other_bytes,
            disk,
            process if place == 0 else None,
        )
        if len(names) == 1:
            models.append(served_model(loader.settings, loader))
            continue
        try:
            planned = loader.plan()
        except ContextError:
            loader.machine = machine
            planned = loader.plan()
        models.append(served_model(loader.settings, loader, as_record(planned), planned.max_kv_size))
    check_names(models)
    return models


def chosen_models(argument: str | None, model: Sequence[str], models: str | None) -> list[str]:
    """Return the names of the models that the flags name, at least one.

    Args:
        argument: the positional model.
        model: values of --model, with its default if no model was named.
        models: the value of --models: a folder of model folders, or names separated by commas.
    """
    names = [*([] if argument is None else [argument]), *model]
    if models is not None:
        folder = Path(os.path.expanduser(models))
        if os.path.isdir(folder):  # Path.is_dir() raises an error for a list longer than a file name may be
            folders = sorted(str(path.parent) for path in folder.glob("*/config.json"))
            if not folders:
                raise BadValueError(f"--models is {models[:200]!r}, a folder without folders of models")
            names += folders
        else:
            names += [name.strip() for name in models.split(",")]
    for name in names:
        options.check_text(model=name)
        if not name:
            raise BadValueError("--models has an empty name; expected names with commas between them")
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadValueError(f"the model {twice[:200]!r} is given twice")
    return names


def keep_alive_seconds(text: str) -> float:
    """Parse --keep-alive; return seconds."""
    if text == FOREVER:
        return float("inf")
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([smh]?)", text)
    if match is None:
        raise BadValueError(f"--keep-alive is {text[:80]!r}; expected a time such as 0, 90s, 5m or {FOREVER}")
    return float(match[1]) * SECONDS[match[2]]


def describe_plan(planned: MemoryPlan, other_bytes: int) -> str:
    """Describe a server's memory in one line; ``other_bytes`` are for requests and disk writes."""
    parts = {
        "weights": planned.weights,
        "cache": planned.cache,
        "state": planned.state,
        "scratch": planned.scratch,
    }
    parts |= {"draft weights": planned.draft_weights, "draft cache": planned.draft_cache}
    # neither is in a GPU's memory
    parts |= {"process": planned.process, "requests": other_bytes if planned.process else 0}
    total = planned.total + parts["requests"]
    return f"{format_bytes(total)} planned at most: {list_bytes(parts)}"


def refuse_for_several(run: RunOptions, pooling: str | None, count: int) -> None:
    """Refuse flags that are for one model, if there are several."""
    if count == 1:
        return
    tuned = run.kv_format if run.kv_format != PMX else None
    flags = {
        "draft_model": run.draft_model,
        "adapter_path": run.adapter_path,
        "kv_format": tuned,
        "wired": run.wired,
        "pooling": pooling,
    }
    for name, value in flags.items():
        if value:
            raise BadValueError(f"{options.flag(name)} is for one model; {count} models are given")
    if ranks.guard() is not None:
        raise BadValueError(f"several ranks serve one model; {count} are given")


def aliases_by_model(names: Sequence[str], aliases: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return each model's aliases by its name: NAME=MODEL is for that model, NAME alone for the first one."""
    by_model: dict[str, list[str]] = {name: [] for name in names}
    for text in aliases:
        alias, equals, model = text.partition("=")
        if model in by_model:
            by_model[model].append(alias)
        elif len(names) == 1 or not equals:
            by_model[names[0]].append(text)
        else:
            raise BadValueError(f"--alias is {text[:200]!r}; {model[:200]!r} is none of the models")
    return {name: tuple(of_model) for name, of_model in by_model.items()}


def check_names(models: Sequence[ServedModel]) -> None:
    """Raise an error if two models share a name; drop last components of names that several models share."""
    models_of: Counter[str] = Counter()  # name -> number of models with it
    for model in models:
        models_of.update({*model.names, *model.aliases})
    for model in models:
        for name in (model.name, *model.aliases):
            if any(name in (other.name, *other.aliases) for other in models if other is not model):
                raise BadValueError(f"two models are named {name[:200]!r}; expected another name for one")
        model.names = (model.name, *(name for name in model.names[1:] if models_of[name] == 1))
