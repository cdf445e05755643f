"""The start of every command that runs a model: its flags, the loaded model, the reserved cache."""

import gc
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.disk import QUEUE_BYTES, DiskCache
from kvant.cache.layer_format import describe_formats
from kvant.cache.pool import Pool
from kvant.cli import interrupts, options, ranks
from kvant.cli.fitting import (
    named_format,
    plan_for,
    plan_that_fits,
    ranks_that_fit,
    with_checkpoints,
    with_weights,
)
from kvant.cli.options import BadValueError, KvSize
from kvant.cli.options import RunOptions as RunOptions  # of kvant bench, too
from kvant.cli.progress import LateProgress
from kvant.cli.sampling import describe_sampling, drawn_seed, in_force, model_sampling
from kvant.cli.terminal import say
from kvant.engine.drafts import Drafts, drafts_of
from kvant.engine.load import Weights, find_adapter, find_model, load_folder, load_model
from kvant.engine.model_drafts import ModelDrafts, check_drafts, check_folders
from kvant.engine.processors import LogitsProcessor
from kvant.engine.sampler import Sampler
from kvant.engine.sampling import SamplingOptions
from kvant.machine import Machine, bound_memory, default_device, this_machine
from kvant.models import LanguageModel
from kvant.models.checkpoint import Progress
from kvant.models.identity import identify
from kvant.operators import dispatch
from kvant.plan import (
    AnyCheckpoint,
    Checkpoint,
    DraftModel,
    MemoryPlan,
    Settings,
    read_folder,
    split_pairs,
)
from kvant.ranks.arrangement import Arrangement
from kvant.sizes import format_bytes
from kvant.text.process import TextProcess
from kvant.text.prompt import check_variables
from kvant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvant.ranks.divided import Divided
    from kvant.ranks.guard import Guard

WIRING_MACOS = 15  # the first in which MLX's limit has an effect (its metal/resident.cpp)


@dataclass(frozen=True, slots=True)
class Whole:
    """A model in this process alone; an :class:`kvant.ranks.arrangement.Arrangement`."""

    checkpoint: AnyCheckpoint
    machine: Machine
    max_kv_size: KvSize

    def plan(self, settings: Settings, model: LanguageModel | None = None) -> MemoryPlan:
        pairs = None if model is None else split_pairs(model)
        return plan_that_fits(self.checkpoint, settings, self.max_kv_size, self.machine, pairs)

    def plan_with(self, settings: Settings, tokens: int, model: LanguageModel) -> tuple[MemoryPlan, Machine]:
        made = plan_for(self.checkpoint, settings, tokens, self.machine, split_pairs(model))
        return made, self.machine

    def load(self, folder: Path, progress: Progress | None, adapter: Path | None) -> LanguageModel:
        return load_model(folder, progress, adapter, weights=weights_format(self.checkpoint))

    def describe(self, model: LanguageModel) -> list[str]:
        return []


@dataclass(slots=True)
class Session:
    """A loaded model, and its cache once that is reserved."""

    model: LanguageModel
    tokenizer: Tokenizer
    load_s: float  # seconds that loading took
    name: str  # the model as the user named it
    folder: Path
    checkpoint: AnyCheckpoint  # its memory was planned with it, as with the next
    settings: Settings
    template_variables: Mapping[str, Any]  # for the chat template, beside those it always has
    origins: Mapping[str, tuple[Any, str]]  # of the options that no flag gave, as those of RunOptions
    arrangement: Arrangement  # in this process, or over ranks
    draft_model: LanguageModel | None
    drafts: Drafts | None = field(default=None, init=False)  # a draft model's with its reserved cache
    reserved: int | None = field(default=None, init=False)  # tokens that a sequence can have
    # Of linear and convolution layers, beside keys and values: mlx-lm allocates them at the first prefill.
    state_bytes: int = field(default=0, init=False)
    # For a person, what sampling() gave last: every option in force and where it comes from.
    sampling_line: str = field(default="", init=False)
    cache: ModelCache = field(init=False, repr=False)  # reserved by open_session()

    def plan(self) -> MemoryPlan:
        """The memory of a run, with what only the weights say: how much of their biases stays out of the
        cache.
        """
        return self.arrangement.plan(self.settings, self.model)

    def plan_with(self, settings: Settings, tokens: int) -> tuple[MemoryPlan, Machine]:
        """The memory of other settings, whether it fits or not, and of which machine: of several the
        fullest.
        """
        return self.arrangement.plan_with(settings, tokens, self.model)

    def sampling(
        self, wanted: SamplingOptions, drawn: int | None = None
    ) -> tuple[Sampler, list[LogitsProcessor]]:
        """The sampler, with ``drawn`` or a new seed if none is given, and the processors; sampling_line
        says all.
        """
        of_the_model = model_sampling(self.folder, wanted, self.model.config.vocab_size)
        used = in_force(wanted, of_the_model, self.origins)
        if used.temp and used.seed is None:
            used = replace(used, seed=drawn_seed() if drawn is None else drawn)
        self.sampling_line = describe_sampling(wanted, used, of_the_model, self.origins)
        return used.build_for(self.tokenizer, self.model.config.vocab_size)

    def describe_cache(self) -> str:
        kind = describe_formats(self.cache.pool.formats)
        text = f"{self.cache.max_seq_len} tokens reserved, {kind}, {format_bytes(self.cache.keys_values)}"
        if not self.state_bytes:
            return text
        return f"{text} for keys and values, {format_bytes(self.state_bytes)} for the state of linear layers"

    def say_cache(self, reserved: str, quiet: bool) -> None:
        """Print what is reserved, and what is to be known of its format."""
        say(f"cache: {reserved}", quiet)
        if warning := self.settings.cache.warning:
            say(f"note: {warning}", quiet)

    def describe_layers(self) -> list[str]:
        """Where layers differ, a line for each kind."""
        lines = self.cache.describe()
        return lines if len(lines) > 1 else []


def open_session(
    run: RunOptions,
    process: TextProcess | None = None,
    sampling: SamplingOptions | None = None,
    *,
    announce: bool = True,
    talks: bool = False,
    disk: DiskCache | None = None,
    hashes: bool = False,
) -> Session:
    """Plan the memory, load a model and reserve its cache, from which turns are taken back if it
    ``talks``.
    """
    wanted, beside = options.kv_size(run.max_kv_size), 0 if disk is None else QUEUE_BYTES
    hashes = hashes or disk is not None
    session = load_session(
        run, process, sampling, max_kv_size=wanted, requests=beside, talks=talks, hashes=hashes
    )
    planned = session.plan()
    started = time.perf_counter()
    with named_format(session.settings):
        session.cache = session.model.reserve_cache(planned.max_kv_size, session.settings.cache)
    if disk is not None:
        session.cache.use_disk(disk)
    session.load_s += time.perf_counter() - started
    session.reserved, session.state_bytes = planned.max_kv_size, planned.state
    lines = [session.describe_cache(), *session.describe_layers()]
    session.say_cache("\n  ".join(lines), run.quiet or not announce)
    session.drafts = drafts_for_pool(session, run, session.cache.pool, announce=announce)
    return session


def drafts_for_pool(
    session: Session, run: RunOptions, pool: Pool, *, deterministic: bool = False, announce: bool = True
) -> Drafts | None:
    """Where the answers of a pool draft from; what a draft model needs is reserved, and that is printed.

    None: there are no drafts. Those that the pool cannot verify are refused.
    """
    drafts: Drafts | ModelDrafts | None = drafts_of(run.draft)
    if session.draft_model is not None:
        options = session.settings.cache
        drafts = ModelDrafts(
            model=session.draft_model, num_draft_tokens=run.num_draft_tokens, options=options
        )
    check_drafts(drafts, pool, deterministic=deterministic)
    if not isinstance(drafts, ModelDrafts):
        return drafts
    made = drafts.for_pool(pool)
    say(f"draft model: {run.draft_model}, {made.describe()}", run.quiet or not announce)
    return made


def load_session(
    run: RunOptions,
    process: TextProcess | None = None,
    sampling: SamplingOptions | None = None,
    *,
    max_kv_size: KvSize,
    sequences: int | None = None,
    requests: int = 0,
    talks: bool = False,
    hashes: bool = False,
    machine: Machine | None = None,
) -> Session:
    """Plan the memory and load a model; nothing is reserved yet.

    Args:
        process: for the tokenizer, if one was started already.
        sampling: the flags of sampling, to be refused before the model is loaded.
        max_kv_size: tokens that are going to be reserved, as far as that is known yet.
        requests: bytes for a server's requests and for a disk, if they come out of the same memory.
        hashes: compute the model's digest, which disk caches and files of caches need.
        machine: what may be used of this machine, ``requests`` subtracted; default: all of it.
    """
    started = time.perf_counter()
    folder = find_model(run.model)
    if sampling is not None:
        in_force(sampling, model_sampling(folder, sampling), run.origins)
    draft_folder = None if run.draft_model is None else find_model(run.draft_model)
    if draft_folder is not None:
        check_folders(folder, draft_folder)
    checkpoint, settings, machine = prepare(
        run, folder, sequences=sequences, requests=requests, talks=talks, machine=machine
    )
    arrangement: Arrangement
    if (guard := ranks.guard()) is None:
        checkpoint, settings = with_weights(run.weights, checkpoint, settings, max_kv_size, machine)
        arrangement = Whole(checkpoint, machine, max_kv_size)
    else:
        arrangement = divide_model(guard, run, folder, checkpoint, settings, machine, max_kv_size)
    planned = arrangement.plan(settings)
    if isinstance(checkpoint, Checkpoint) and checkpoint.unpacked:
        unpacked = f"weights: {format_bytes(planned.weights)}, unpacked to float32 for speed"
        say(f"{unpacked}; --weights packed holds {format_bytes(checkpoint.stored_bytes)}", run.quiet)
    if run.wired:
        wire(planned.total)
    dispatch.say = partial(say, quiet=run.quiet)
    with LateProgress("loading", quiet=run.quiet) as progress:
        model, tokenizer = load_folder(
            folder,
            progress.update,
            adapter_path=run.adapter_path,
            process=process,
            load_weights=arrangement.load,
        )
        draft_model = None
        if draft_folder is not None and settings.draft_model is not None:
            identity = identify(draft_folder)
            draft_model = load_model(
                draft_folder, progress.update, weights=weights_format(settings.draft_model.checkpoint)
            )
            draft_model.identity = identity
            pairs = tuple(split_pairs(draft_model))
            settings = replace(settings, draft_model=replace(settings.draft_model, split_pairs=pairs))
    if hashes or settings.cache.kv_format is not None:
        with LateProgress("hashing the weights", quiet=run.quiet):
            assert model.identity is not None
            _ = model.identity.model  # computed here, with a progress line, rather than at its first use
    variables = options.template_variables(run.chat_template_config)
    try:
        check_variables(tokenizer, variables)
    except ValueError as error:
        raise BadValueError(f"--chat-template-config {error}") from error
    _set_ends(tokenizer, run, model.config.vocab_size)
    gc.freeze()  # the loaded objects stay: the collector need not look at them between tokens
    return Session(
        model=model,
        tokenizer=tokenizer,
        load_s=time.perf_counter() - started,
        name=run.model,
        folder=folder,
        checkpoint=checkpoint,
        settings=settings,
        template_variables=variables,
        origins=run.origins,
        arrangement=arrangement,
        draft_model=draft_model,
    )


def weights_format(checkpoint: AnyCheckpoint) -> Weights:
    """How a plan holds quantized weights."""
    return "float32" if isinstance(checkpoint, Checkpoint) and checkpoint.unpacked else "packed"


def _set_ends(tokenizer: Tokenizer, run: RunOptions, vocab_size: int) -> None:
    if run.ignore_eos:
        tokenizer.eos_token_ids = set()
    for text in run.extra_eos_token or ():
        try:
            tokenizer.add_eos_token(text)
        except ValueError:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) != 1:
                raise BadValueError(
                    f"--extra-eos-token is {text!r}, which is {len(ids)} tokens for this model; expected "
                    f"one, or its id"
                ) from None
            tokenizer.add_eos_token(str(ids[0]))
        if text.isdecimal() and int(text) >= vocab_size:
            raise BadValueError(f"--extra-eos-token is {text}; the model knows 0 to {vocab_size - 1}")


def follow(run: RunOptions, *, bounded: bool = False) -> None:
    """Load a part of the model, compute what rank 0 tells, and exit as it does; on rank 0 do nothing."""
    guard = ranks.guard()
    if guard is None or not guard.rank:
        return
    from kvant.ranks.follow import follow as compute

    folder = find_model(run.model)
    divided = divide_model(guard, run, folder, *prepare(run, folder))
    if run.wired:
        wire(divided.total)
    if bounded:
        bound_memory(divided.arrays, divided.scratch)
    adapter = None if run.adapter_path is None else find_adapter(run.adapter_path)
    compute(divided.load(folder, None, adapter), guard)


def divide_model(
    guard: "Guard",
    run: RunOptions,
    folder: Path,
    checkpoint: AnyCheckpoint,
    settings: Settings,
    machine: Machine,
    max_kv_size: KvSize = None,
) -> "Divided":
    """Divide a model over ranks so that a run fits into each one's machine. Every rank calls it."""
    from kvant.ranks.divided import divide

    parallel = options.check_parallel(run.parallel)
    plan = partial(ranks_that_fit, checkpoint, settings, max_kv_size, parallel=parallel)
    return divide(guard, folder, run.shared, machine, plan, interrupts.deferred)


def prepare(
    run: RunOptions,
    folder: Path,
    *,
    sequences: int | None = None,
    requests: int = 0,
    talks: bool = False,
    machine: Machine | None = None,
) -> tuple[AnyCheckpoint, Settings, Machine]:
    """What a plan is made of: what is known of the model in a folder, the settings and this machine."""
    if run.parallel is not None and ranks.guard() is None:
        raise BadValueError(
            f"--parallel is {run.parallel!r}, which has no effect in one process; `kvant launch` starts "
            f"several ranks"
        )
    if run.weights == "float32" and ranks.guard() is not None:
        raise BadValueError("--weights is 'float32'; on several ranks weights stay as they are stored")
    checkpoint = read_folder(folder)
    if run.adapter_path is not None:
        checkpoint = checkpoint.adapted(find_adapter(run.adapter_path))
    cache = with_checkpoints(run, checkpoint, sequences, talks=talks)
    settings = Settings(cache, run.prefill_step_size, sequences=sequences)
    if run.draft_model is not None:
        settings = replace(settings, draft_model=DraftModel(read_folder(find_model(run.draft_model))))
    return checkpoint, settings, machine or machine_without(requests)


def machine_without(requests: int) -> Machine:
    """Return this machine without the bytes that a server's requests, or a disk cache, take of its memory."""
    machine = this_machine()
    if not requests or machine.device != "cpu":
        return machine
    source = f"{machine.limit_source}, less {format_bytes(requests)} for requests"
    return replace(machine, limit_bytes=machine.limit_bytes - requests, limit_source=source)


def wire(count: int) -> None:
    """Keep up to ``count`` bytes of MLX's memory resident."""
    if not mx.metal.is_available() or default_device() != "gpu":
        raise BadValueError(
            f"--wired: only a Mac's GPU has memory to wire; MLX computes on the {default_device()} here"
        )
    version = platform.mac_ver()[0]
    if version and int(version.partition(".")[0]) < WIRING_MACOS:
        raise BadValueError(
            f"--wired: macOS {version} wires no memory for MLX; expected {WIRING_MACOS} or later"
        )
    mx.set_wired_limit(count)
