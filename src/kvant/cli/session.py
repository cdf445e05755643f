"""Start a command that runs a model: apply its flags, load the model, reserve the cache."""

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
from kvant.cli.options import RunOptions as RunOptions  # re-exported for kvant bench
from kvant.cli.progress import LateProgress
from kvant.cli.sampling import describe_sampling, drawn_seed, in_force, model_sampling
from kvant.cli.terminal import say
from kvant.engine.drafts import Drafts
from kvant.engine.head_drafts import drafts_of
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

WIRING_MACOS = 15  # the first version in which MLX's limit has an effect (its metal/resident.cpp)


@dataclass(frozen=True, slots=True)
class Whole:
    """A model in one process; an :class:`kvant.ranks.arrangement.Arrangement`."""

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
        how = weights_format(self.checkpoint)
        return load_model(folder, progress, adapter, weights=how, mtp=self.checkpoint.has_head)

    def describe(self, model: LanguageModel) -> list[str]:
        return []


@dataclass(slots=True)
class Session:
    """A loaded model with its cache, once that is reserved."""

    model: LanguageModel
    tokenizer: Tokenizer
    load_s: float  # seconds for loading
    name: str  # the model as the user named it
    folder: Path
    checkpoint: AnyCheckpoint  # what the memory plan is based on, with settings
    settings: Settings
    template_variables: Mapping[str, Any]  # additional variables of the chat template
    origins: Mapping[str, tuple[Any, str]]  # options that no flag set; see RunOptions
    arrangement: Arrangement  # in one process, or over ranks
    draft_model: LanguageModel | None
    drafts: Drafts | None = field(default=None, init=False)  # includes a draft model's reserved cache
    reserved: int | None = field(default=None, init=False)  # the most tokens of a sequence
    # State of linear and convolution layers, in addition to keys and values, allocated at the first prefill.
    state_bytes: int = field(default=0, init=False)
    # Describes the last result of sampling(): every effective option and its source.
    sampling_line: str = field(default="", init=False)
    cache: ModelCache = field(init=False, repr=False)  # reserved by open_session()

    def plan(self) -> MemoryPlan:
        """Plan the run's memory, taking into account how much of the biases stays out of the cache."""
        return self.arrangement.plan(self.settings, self.model)

    def plan_with(self, settings: Settings, tokens: int) -> tuple[MemoryPlan, Machine]:
        """Plan other settings, whether they fit or not; return the plan and its machine, the fullest one."""
        return self.arrangement.plan_with(settings, tokens, self.model)

    def sampling(
        self, flags: SamplingOptions, drawn: int | None = None
    ) -> tuple[Sampler, list[LogitsProcessor]]:
        """Return sampler and processors, with ``drawn`` or a new seed as default; set sampling_line."""
        of_the_model = model_sampling(self.folder, flags, self.model.config.vocab_size)
        used = in_force(flags, of_the_model, self.origins)
        if used.temp and used.seed is None:
            used = replace(used, seed=drawn_seed() if drawn is None else drawn)
        self.sampling_line = describe_sampling(flags, used, of_the_model, self.origins)
        return used.build_for(self.tokenizer, self.model.config.vocab_size)

    def describe_cache(self) -> str:
        kind = describe_formats(self.cache.pool.formats)
        text = f"{self.cache.max_seq_len} tokens reserved, {kind}, {format_bytes(self.cache.keys_values)}"
        if not self.state_bytes:
            return text
        return f"{text} for keys and values, {format_bytes(self.state_bytes)} for the state of linear layers"

    def say_cache(self, reserved: str, quiet: bool) -> None:
        """Print what is reserved, and a note about its format if there is one."""
        say(f"cache: {reserved}", quiet)
        if warning := self.settings.cache.warning:
            say(f"note: {warning}", quiet)

    def describe_layers(self) -> list[str]:
        """Return a line for each kind of layer if there are several kinds."""
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
    """Plan the memory, load a model and reserve its cache; ``talks`` means that turns can be undone."""
    size = options.kv_size(run.max_kv_size)
    queue_bytes = 0 if disk is None else QUEUE_BYTES
    hashes = hashes or disk is not None
    session = load_session(
        run, process, sampling, max_kv_size=size, requests=queue_bytes, talks=talks, hashes=hashes
    )
    planned = session.plan()
    started = time.perf_counter()
    with named_format(session.settings):
        session.cache = session.model.reserve_cache(planned.max_kv_size, session.settings.cache)
    if disk is not None:
        session.cache.use_disk(disk)
    session.load_s += time.perf_counter() - started
    session.reserved = planned.max_kv_size
    session.state_bytes = planned.state
    lines = [session.describe_cache(), *session.describe_layers()]
    session.say_cache("\n  ".join(lines), run.quiet or not announce)
    session.drafts = drafts_for_pool(session, run, session.cache.pool, announce=announce)
    return session


def drafts_for_pool(
    session: Session, run: RunOptions, pool: Pool, *, deterministic: bool = False, announce: bool = True
) -> Drafts | None:
    """Return the source of drafts for a pool's answers, or None; refuse drafts that it cannot verify.

    If a draft model needs memory, it is reserved and printed.
    """
    drafts: Drafts | ModelDrafts | None = drafts_of(run.draft, session.model, run.num_draft_tokens)
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
        process: a started process for the tokenizer.
        sampling: the sampling flags, to refuse bad ones before the model is loaded.
        max_kv_size: the tokens that will be reserved, as far as known.
        requests: bytes for a server's requests and for a disk queue, if they use the same memory.
        hashes: compute the model's digest, which disk caches and cache files need.
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
            mtp=checkpoint.has_head,
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
            _ = model.identity.model  # computed now, with a progress bar, instead of at its first use
    variables = options.template_variables(run.chat_template_config)
    try:
        check_variables(tokenizer, variables)
    except ValueError as error:
        raise BadValueError(f"--chat-template-config {error}") from error
    _set_ends(tokenizer, run, model.config.vocab_size)
    gc.freeze()  # loaded objects stay, so the collector need not visit them between tokens
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
    """Return the format in which a plan has quantized weights."""
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
    """Load a part of the model, follow rank 0, and exit with it; on rank 0 do nothing."""
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
    """Divide a model over ranks so that a run fits into each machine. Every rank must call this."""
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
    """Return the inputs of a plan: the model in a folder, the settings and this machine."""
    if run.parallel is not None and ranks.guard() is None:
        raise BadValueError(
            f"--parallel is {run.parallel!r}, which has no effect in one process; `kvant launch` starts "
            f"several ranks"
        )
    if run.weights == "float32" and ranks.guard() is not None:
        raise BadValueError("--weights is 'float32'; on several ranks weights stay as they are stored")
    ranks.refuse_head(run.draft)
    checkpoint = read_folder(folder, head=run.draft == "mtp")
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
    """Wire up to ``count`` bytes of MLX's memory, so that they are not swapped out."""
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
