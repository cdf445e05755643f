"""The start of every command that runs a model: its flags, the loaded model, the reserved cache."""

import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cli import options
from kvant.cli.fitting import plan_that_fits
from kvant.cli.options import BadValueError
from kvant.cli.progress import LateProgress
from kvant.cli.sampling import describe_sampling, drawn_seed, in_force, model_sampling
from kvant.cli.template import checked_variables, set_ends
from kvant.engine.draw import Sampler
from kvant.engine.load import POCKET, find_adapter, find_model, load_folder
from kvant.engine.processors import LogitsProcessor
from kvant.engine.sampling import SamplingOptions
from kvant.errors import ContextError
from kvant.models import Decoder, LanguageModel
from kvant.sizes import format_bytes
from kvant.text.process import TextProcess
from kvant.text.tokenizer import Tokenizer
from kvant.tools.machine import default_device, this_machine
from kvant.tools.plan import Settings, read_folder, split_pairs


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The flags of a command that runs a model, beside those of sampling.

    Raises:
        BadValueError: a value that no model can take.
    """

    model: options.Model = POCKET
    preset: options.Preset = None
    adapter_path: options.AdapterPath = None
    max_tokens: options.MaxTokens = 256
    stop: options.Stop = None
    extra_eos_token: options.ExtraEosToken = None
    ignore_eos: options.IgnoreEos = False
    system_prompt: options.SystemPrompt = None
    chat_template_config: options.ChatTemplateConfig = None
    kv_bits: options.KvBits = 8
    kv_group_size: options.KvGroupSize = None
    kv_bias_split: options.KvBiasSplit = True
    max_kv_size: options.MaxKvSize = None
    kernels: options.Kernels = None
    prefill_step_size: options.PrefillStepSize = 512
    wired: options.Wired = False
    raw: options.Raw = False
    quiet: options.Quiet = False
    # Of values that no flag gave: name -> value, and where it comes from, in words.
    origins: Mapping[str, tuple[Any, str]] = field(default_factory=dict, metadata={"flag": False})

    def __post_init__(self) -> None:
        options.check_counts(max_tokens=self.max_tokens, prefill_step_size=self.prefill_step_size)
        options.kv_size(self.max_kv_size)
        options.check_kv_format(self.kv_bits, self.kv_group_size)
        options.check_kernels(self.kernels)
        options.check_text(model=self.model, adapter_path=self.adapter_path, system_prompt=self.system_prompt)
        options.check_stop(self.stop or ())
        options.check_text(**{"--extra-eos-token": "".join(self.extra_eos_token or ())})
        options.template_variables(self.chat_template_config)
        if self.ignore_eos and self.extra_eos_token:
            raise BadValueError("--extra-eos-token ends a text, and --ignore-eos goes on past all that ends one")

    def settings(self) -> Settings:
        """Of the cache and of reading the prompt."""
        group_size = options.check_kv_format(self.kv_bits, self.kv_group_size)
        return Settings(self.kv_bits, group_size, self.kv_bias_split, self.prefill_step_size)


@dataclass(slots=True)
class Session:
    """A loaded model with its reserved cache.

    Attributes:
        kind: the cache's format, in words.
        state_bytes: of linear and convolution layers, beside keys and values: mlx-lm allocates them at the first
            prefill.
        name: the model as the user named it.
        folder: its files.
        template_variables: for the chat template, beside those it always has.
        origins: of the options that no flag gave, as those of RunOptions.
        sampling_line: for a person, what :meth:`sampling` gave last: every option in force and where it comes from.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    cache: ModelCache
    load_s: float
    kind: str
    state_bytes: int
    name: str
    folder: Path
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    sampling_line: str = field(default="", init=False)

    @property
    def cache_bytes(self) -> int:
        """Bytes reserved for keys and values in all layers; they never change."""
        if isinstance(self.model, Decoder):
            return self.cache.nbytes
        from kvant.bridge.cache import BridgedCache  # there already: its cache is one

        assert isinstance(self.cache, BridgedCache)
        return self.cache.used.keys_values

    def sampling(self, wanted: SamplingOptions) -> tuple[Sampler, list[LogitsProcessor]]:
        """The sampler and processors for this model; options that were not given are the model's own.

        The sampler has a seed, drawn where none is given: sampling_line says which, so that a run can be repeated.

        Raises:
            ArgumentError: a token the model does not have, or an option that would have no effect.
            ModelError: a generation_config.json that cannot be used.
        """
        of_the_model = model_sampling(self.folder, wanted)
        if of_the_model.get("top_k", 0) >= self.model.config.vocab_size:
            of_the_model["top_k"] = 0  # it leaves nothing out
        given, wanted = wanted, in_force(wanted, of_the_model, self.origins)
        if wanted.temp and wanted.seed is None:
            wanted = replace(wanted, seed=drawn_seed())
        self.sampling_line = describe_sampling(given, wanted, of_the_model, self.origins)
        special: list[int] = []
        if wanted.xtc_probability:  # as in mlx-lm, XTC never leaves out the ends of a line and of the text
            special = [*self.tokenizer.encode("\n", add_special_tokens=False), *self.tokenizer.eos_token_ids]
        return wanted.build(self.model.config.vocab_size, special)

    def describe_cache(self) -> str:
        """The reservation in a line."""
        text = f"{self.cache.max_seq_len} tokens reserved, {self.kind}, {format_bytes(self.cache_bytes)}"
        if not self.state_bytes:
            return text
        return f"{text} for keys and values, {format_bytes(self.state_bytes)} for the state of linear layers"

    def describe_layers(self) -> list[str]:
        """Where layers differ, a line for each kind."""
        if isinstance(self.model, Decoder):
            return []
        from kvant.bridge.cache import BridgedCache

        assert isinstance(self.cache, BridgedCache)
        lines = self.cache.describe()
        return lines if len(lines) > 1 else []


def open_session(
    run: RunOptions,
    process: TextProcess | None = None,
    sampling: SamplingOptions | None = None,
    *,
    announce: bool = True,
    forks: bool = False,
) -> Session:
    """Plan the memory, load a model and reserve its cache; the reservation is printed before the first token.

    Args:
        run: the command's flags.
        sampling: its flags of sampling, to be refused before the model is loaded.
        process: for the tokenizer, where one was started already.
        announce: print the reservation, unless the flags ask for quiet.
        forks: plan for a prompt that is continued several times.

    Raises:
        ModelError: a model or adapter that cannot be loaded.
        ContextError: more tokens asked for than the model's context, or a plan that does not fit into this machine.
        BadValueError: a group size that does not divide the model's head dimension, a cache format that the chosen
            kernel does not take, or memory that cannot be wired.
    """
    started = time.perf_counter()
    folder = find_model(run.model)
    if sampling is not None:
        in_force(sampling, model_sampling(folder, sampling), run.origins)
    checkpoint = read_folder(folder)
    if run.adapter_path is not None:
        checkpoint = checkpoint.adapted(find_adapter(run.adapter_path))
    machine, max_kv_size = this_machine(), options.kv_size(run.max_kv_size)
    settings = replace(run.settings(), forks=forks)
    planned = plan_that_fits(checkpoint, settings, max_kv_size, machine)
    if run.wired:
        wire(planned.total)
    with LateProgress("loading", quiet=run.quiet) as progress:
        model, tokenizer = load_folder(folder, progress.update, adapter_path=run.adapter_path, process=process)
    variables = checked_variables(tokenizer, run.chat_template_config)
    set_ends(tokenizer, run.extra_eos_token or (), model.config.vocab_size, ignored=run.ignore_eos)
    gc.freeze()  # the loaded objects stay: the collector need not look at them between tokens
    # Only the weights say how much of their biases stays out of the cache. The first plan guessed it.
    planned = plan_that_fits(checkpoint, settings, max_kv_size, machine, split_pairs(model))
    try:
        cache = model.make_cache(
            planned.max_kv_size,
            quant_bit=settings.kv_bits,
            quant_group=settings.kv_group_size,
            bias_split=settings.kv_bias_split,
            kernels=run.kernels,
        )
    except ContextError:
        raise
    except ValueError as error:  # the plan checked the format itself
        raise BadValueError(
            f"--kv-bits {settings.kv_bits} --kv-group-size {settings.kv_group_size}: {error}"
        ) from error
    bits, groups = settings.kv_bits, " or ".join(map(str, cache.groups))
    kind = f"{bits} bits in groups of {groups}" if bits else str(model.dtype).removeprefix("mlx.core.")
    session = Session(
        model,
        tokenizer,
        cache,
        time.perf_counter() - started,
        kind,
        planned.state,
        run.model,
        folder,
        variables,
        run.origins,
    )
    if announce and not run.quiet:
        print("\n  ".join([f"cache: {session.describe_cache()}", *session.describe_layers()]), file=sys.stderr)
    return session


def wire(count: int) -> None:
    """Keep up to ``count`` bytes of MLX's memory resident.

    Raises:
        BadValueError: a device that cannot.
    """
    if not mx.metal.is_available() or default_device() != "gpu":
        raise BadValueError(
            f"--wired: only a Mac's GPU has memory to wire; MLX computes on the {default_device()} here"
        )
    mx.set_wired_limit(count)
