"""Flags that several commands share, and checks of their values. Names and defaults follow mlx-lm."""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_args

import typer

from kvant.cache.disk import DiskCache
from kvant.cache.options import BITS_IN_WORDS, CacheOptions
from kvant.cache.pages import PAGE_SIZE
from kvant.cli.defaults import BadValueError as BadValueError  # re-exported for the commands
from kvant.cli.defaults import Defaults, settings_used, source_of
from kvant.engine.drafts import Source
from kvant.engine.load import POCKET
from kvant.engine.model_drafts import check_draft_tokens
from kvant.errors import ArgumentError, KvantError, one_line
from kvant.files import unique_keys
from kvant.operators.dispatch import VARIABLE, choose


@contextmanager
def named(flag: str) -> Iterator[None]:
    """Turn a ValueError into a BadValueError that begins with the flag; kvant's own errors pass."""
    try:
        yield
    except KvantError:
        raise
    except ValueError as error:
        raise BadValueError(f"{flag}: {error}") from error


SIZES = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
AUTO: Literal["auto"] = "auto"
KvSize = int | Literal["auto"] | None  # tokens; as many as fit; the default


def _use_preset(context: typer.Context, name: str | None) -> str | None:
    if name is not None and not context.resilient_parsing:  # true while a shell completes a line
        defaults = context.default_map
        assert isinstance(defaults, Defaults)
        defaults.use(name)
    return name


def complete_models(incomplete: str) -> list[str]:
    """Return names for shell completion: those of `kvant models`, and pulled repositories."""
    from kvant.weights.imported import model_names
    from kvant.weights.lock import read_locks

    names = [POCKET, *model_names()]
    with suppress(KvantError):
        names += [lock.repository for lock in read_locks()]
    return [name for name in names if name.startswith(incomplete)]


MODEL_HELP = (
    f"A folder, a name (`kvant models`), owner/repository[@revision] after `kvant pull`, or '{POCKET}'"
)
Model = Annotated[
    str, typer.Option(help=f"{MODEL_HELP}; KVANT_MODEL is another default.", autocompletion=complete_models)
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="The model, instead of --model.", autocompletion=complete_models),
]
PulledArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A name (`kvant models` lists them) or owner/repository[@revision].",
        autocompletion=complete_models,
    ),
]
Pulled = Annotated[
    str | None, typer.Option(help="The model, instead of the argument.", autocompletion=complete_models)
]
AdapterPath = Annotated[
    str | None,
    typer.Option(help="Apply the LoRA or DoRA adapter in this folder, which mlx_lm.lora wrote."),
]
# the first that fits is used
PARALLEL: tuple[Literal["pipeline", "tensor"], ...] = ("pipeline", "tensor")
PrefillStepSize = Annotated[
    int, typer.Option(help="Read the prompt in chunks of this many tokens; fewer take less memory.")
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(help="Tokens that a draft model or head guesses in a step, 1 to 7; default: 3."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no statistics and no progress.")]

DiskCacheFolder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Keep what the cache holds in this folder, so that a text is not read again after a "
        "restart; default: no folder.",
    ),
]
DiskCacheSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Let the disk cache take at most this much, such as 500MB; default: 20GB."
    ),
]

KvFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|pmx",
        help="Store each layer of the cache as `kvant report --tune` found best for the model; "
        "or pmx: PMX's plain 4 bits.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="Give the same answer whatever else is answered at the time; slower."
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOKEN:BIAS", help="Add BIAS to the logit of the token with the id TOKEN; repeatable."
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """The flags of a command that runs a model, without sampling; also in the config file and presets."""

    # The model.
    model: Model = POCKET
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            is_eager=True,
            callback=_use_preset,
            help="Take the options of this preset in the config file.",
        ),
    ] = None
    adapter_path: AdapterPath = None
    # The prompt, and what ends the answer.
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="End the answer after this many tokens.")
    ] = 256
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; repeatable.")
    ] = None
    extra_eos_token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN", help="End the answer at this token, given as text or id, too; repeatable."
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue past the tokens that end an answer, up to --max-tokens."),
    ] = False
    system_prompt: Annotated[
        str | None, typer.Option(help="Begin the conversation with this system message.")
    ] = None
    chat_template_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Set variables of the chat template, such as '{\"enable_thinking\": false}'."
        ),
    ] = None
    # The cache's format and size, and how tokens are read and fed.
    kv_bits: Annotated[
        int | None,
        typer.Option(help=f"Bits of each number in the cache: {BITS_IN_WORDS}; default: 8."),
    ] = None
    kv_group_size: Annotated[
        int | None,
        typer.Option(
            help="Numbers in the cache that share one scale; it divides the model's head dimension; "
            "default: 32 if it does."
        ),
    ] = None
    kv_bias_split: Annotated[
        bool,
        typer.Option(
            "--kv-bias-split/--no-kv-bias-split",
            help="Keep the biases of keys and values out of the cache, so that they stay exact.",
        ),
    ] = True
    kv_format: KvFormat = None
    kv_tail: Annotated[
        bool | None,
        typer.Option(
            "--kv-tail/--no-kv-tail",
            help="Also keep the first 4 and the last 108 tokens unquantized; default: only at 4 bits.",
        ),
    ] = None
    max_kv_size: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|auto",
            help="Reserve the cache for this many tokens, or for as many as fit into memory; "
            "default: 4096 or the whole context, whichever is less; of serve: auto.",
        ),
    ] = None
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="unfused|fused",
            help="How attention reads the cache; default: KVANT_KERNELS, else the fused kernel on a "
            "GPU that it works on.",
        ),
    ] = None
    checkpoints: Annotated[
        int | None,
        typer.Option(
            help="Places in a text to return to, for models that cannot go back to any token; "
            "default: 2 for each of --sequences; of chat 6, or 2 with only an exact tail."
        ),
    ] = None
    prefill_step_size: PrefillStepSize = 512
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="packed|float32",
            help="How a CPU holds quantized weights: packed as stored, or as float32, which is "
            "faster and takes more memory; default: float32 if that leaves half of the memory "
            "free.",
        ),
    ] = None
    # Drafts.
    draft: Annotated[
        Source,
        typer.Option(
            help="Guess tokens and check several in one step, if that is expected to be faster. prompt: "
            "from repeated text; mtp: with the model's own head for multi-token prediction. The answer "
            "stays the same, except for rounding."
        ),
    ] = "none"
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Guess tokens with this smaller model, which has the same tokenizer, and check "
            "several in one step; named as for --model.",
            autocompletion=complete_models,
        ),
    ] = None
    num_draft_tokens: NumDraftTokens = None
    # How to run, and what to print.
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PARALLEL),
            help="On several machines (`kvant launch`): give each some layers, or a part of every "
            "layer; default: pipeline, or tensor if only that fits.",
        ),
    ] = None
    wired: Annotated[
        bool,
        typer.Option("--wired", help="Keep the planned memory from being swapped out; macOS 15 or later."),
    ] = False
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Send control characters in the answer to the terminal as they are."),
    ] = False
    quiet: Quiet = False
    # Values that no flag set: name -> value, and a description of its source.
    origins: Mapping[str, tuple[Any, str]] = field(default_factory=dict, metadata={"flag": False})
    cache: CacheOptions = field(init=False, metadata={"flag": False})  # made from the flags above

    def __post_init__(self) -> None:
        check_text(model=self.model, adapter_path=self.adapter_path, system_prompt=self.system_prompt)
        check_counts(max_tokens=self.max_tokens, prefill_step_size=self.prefill_step_size)
        for text in self.stop or ():
            check_text(stop=text)
            if not text:  # would end every text before it begins
                raise BadValueError("--stop is empty; expected a string")
        check_text(**{"--extra-eos-token": "".join(self.extra_eos_token or ())})
        template_variables(self.chat_template_config)
        if self.ignore_eos and self.extra_eos_token:
            raise BadValueError(
                "--extra-eos-token ends a text, and --ignore-eos continues past everything that ends one"
            )
        kv_size(self.max_kv_size)
        check_kernels(self.kernels)
        if self.weights not in (None, "packed", "float32"):
            raise BadValueError(f"--weights is {self.weights!r:.80}; expected packed or float32")
        if self.kv_bits == 0 and self.kv_group_size is not None:
            raise BadValueError(f"--kv-group-size is {self.kv_group_size}, but --kv-bits 0 does not quantize")
        options = CacheOptions.from_keywords(
            kv_bits=self.kv_bits,
            kv_group_size=self.kv_group_size,
            bias_split=self.kv_bias_split,
            kernels=self.kernels,
            checkpoints=self.checkpoints or 0,
            kv_format=self.kv_format,
            kv_tail=self.kv_tail,
        )
        object.__setattr__(self, "cache", options)
        check_draft(self.draft, self.draft_model, self.num_draft_tokens)
        check_parallel(self.parallel)

    @property
    def shared(self) -> dict[str, Any]:
        """The flags by name, which must be the same on all ranks."""
        values = {option.name: getattr(self, option.name) for option in flags(RunOptions)}
        return values | {"kv_bits": self.cache.kv_bits}


class Without(frozenset[str]):
    """Flags of a group that a command does not have: ``Annotated[RunOptions, Without(["stop"])]``."""


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's dataclass parameters with one flag per field; call it with the dataclasses.

    A field is annotated as a flag, or has its help in its metadata like those of SamplingOptions.
    """
    groups: dict[str, tuple[Any, list[Field[Any]]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group, *without = get_args(parameter.annotation) or [parameter.annotation]
        if is_dataclass(group):
            groups[parameter.name] = (
                group,
                [f for f in flags(group) if not without or f.name not in without[0]],
            )
            for option in groups[parameter.name][1]:
                default = None if option.default is MISSING else option.default
                parameters.append(
                    parameter.replace(name=option.name, default=default, annotation=annotation(option))
                )
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(context: typer.Context, **values: Any) -> None:
        origins = settings_used(context, values)
        try:
            if "logit_bias" in values:
                values["logit_bias"] = _biases(values["logit_bias"])
            for name, (group, group_flags) in groups.items():
                arguments = {option.name: values.pop(option.name) for option in group_flags}
                if any(option.name == "origins" for option in fields(group)):
                    arguments["origins"] = origins
                values[name] = group(**arguments)
            command(context=context, **values)
        except (BadValueError, ArgumentError) as error:
            message = error.worded(flag) if isinstance(error, ArgumentError) else error.message
            sources = [
                f"{flag(name)} is from {source}"
                for name, (_, source) in origins.items()
                if flag(name) in message
            ]
            raise BadValueError("; ".join([message, *sources])) from error

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def flags(group: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass that are flags."""
    return [option for option in fields(group) if option.metadata.get("flag", True)]


def annotation(option: Field[Any]) -> Any:
    kind: Any = LogitBias if option.name == "logit_bias" else option.type
    return Annotated[kind, typer.Option(help=option.metadata["help"])] if "help" in option.metadata else kind


def choose_model(context: typer.Context, argument: str | None, option: Any) -> Any:
    """Return the model from the argument or --model; refuse both."""
    check_text(model=argument or option)
    if argument is None:
        return option
    if source_of(context, "model") == "COMMANDLINE":
        raise BadValueError(
            f"the model is given twice, as the argument {argument!r} and with --model {option}"
        )
    return argument


def template_variables(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        variables = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadValueError(
            f"--chat-template-config is {text[:80]!r}: not JSON: {one_line(error)}"
        ) from error
    if not isinstance(variables, dict):
        raise BadValueError(f"--chat-template-config is {text[:80]!r}; expected a JSON object")
    return variables


def _biases(texts: Sequence[str] | None) -> Mapping[int, float]:
    biases = {}
    for text in texts or ():
        token, _, bias = text.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise BadValueError(f"--logit-bias is {text!r}; expected TOKEN:BIAS, such as 42:-5.0") from None
    return biases


def whole_numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise BadValueError(f"{name} is {text!r}; expected whole numbers between commas") from None
    for number in numbers:
        if numbers.count(number) > 1:
            raise BadValueError(f"{name} has {number} twice")
    return numbers


def refuse(why: str, **values: object) -> None:
    for name, value in values.items():
        if value is not None:
            raise BadValueError(f"{flag(name)} is {value}; {why}")


def check_counts(**counts: int | None) -> None:
    """Refuse a count below 1 or above the machine's largest index, naming its flag."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise BadValueError(f"{flag(name)} is {count}; expected at least 1")
        if count is not None and count > sys.maxsize:
            raise BadValueError(f"{flag(name)} is {count}; expected at most {sys.maxsize}")


def kv_size(text: str | None) -> KvSize:
    """Parse --max-kv-size."""
    if text is None or text == AUTO:
        return text
    try:
        count = int(text)
    except ValueError:
        raise BadValueError(f"--max-kv-size is {text[:80]!r}; expected a number of tokens, or auto") from None
    check_counts(max_kv_size=count)
    return count


def disk_cache(folder: str | None, size: str | None) -> DiskCache | None:
    """Make the disk cache of --disk-cache and --disk-cache-size, or None."""
    check_text(disk_cache=folder, disk_cache_size=size)
    if folder is None:
        if size is not None:
            raise BadValueError(f"--disk-cache-size is {size[:80]!r}; expected --disk-cache with it")
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(MB|GB|TB)", size or "20GB")
    if match is None or not (count := int(float(match[1]) * SIZES[match[2]])) >= SIZES["MB"]:
        raise BadValueError(
            f"--disk-cache-size is {(size or '')[:80]!r}; expected a size such as 500MB or 20GB"
        )
    return DiskCache(folder, count)


def check_draft(draft: str, draft_model: str | None, num_draft_tokens: int | None) -> None:
    """Refuse --draft with --draft-model, and a number of tokens out of range or without effect."""
    check_text(draft_model=draft_model)
    check_draft_tokens(num_draft_tokens, has_model=draft_model is not None or draft == "mtp")
    if draft_model is not None and draft != "none":
        raise BadValueError(f"--draft is {draft}, and --draft-model drafts too: expected one of the two")


def check_parallel(parallel: str | None) -> Literal["pipeline", "tensor"] | None:
    """Parse --parallel."""
    known = next((kind for kind in PARALLEL if kind == parallel), None)
    if known is None and parallel is not None:
        raise BadValueError(f"--parallel is {parallel!r}; expected {' or '.join(PARALLEL)}")
    return known


def check_deterministic(run: RunOptions) -> None:
    """Refuse short chunks and drafts with --deterministic: a step of more tokens rounds differently."""
    size = run.prefill_step_size
    if size < PAGE_SIZE:
        raise BadValueError(
            f"--prefill-step-size is {size}; --deterministic reads prompts in chunks of {PAGE_SIZE}"
        )
    for flag, value in (("--draft", run.draft), ("--draft-model", run.draft_model)):
        if value not in (None, "none"):
            raise BadValueError(f"{flag} is {value:.80}; it is not supported with --deterministic")


def check_kernels(kernels: str | None = None, name: str = "--kernels") -> None:
    """Refuse kernels, by default those of KVANT_KERNELS, that do not work here; messages use ``name``."""
    if kernels is None and not os.environ.get(VARIABLE):
        return
    try:
        choose(kernels, name)
    except ValueError as error:
        raise BadValueError(str(error)) from error


def check_text(**texts: str | None) -> None:
    """Refuse text that is not Unicode, such as bytes of another encoding on the command line."""
    for name, text in texts.items():
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise BadValueError(f"{name.replace('_', ' ')} is not valid UTF-8") from None
