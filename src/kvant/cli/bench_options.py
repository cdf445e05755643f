"""The flags of ``kvant bench`` checked and turned into values; each value that cannot be used is a usage error."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import typer

from kvant import blas
from kvant.cli.options import BadValueError, check_kernels, named
from kvant.engine.load import POCKET, find_model, is_bridged_folder
from kvant.fields import MAX_SIZE
from kvant.models.config import ModelConfig
from kvant.operators.quantization import QUANT_BITS
from kvant.tools.bench.engines import OPENBLAS, EngineSpec, engine_specs, stream_specs
from kvant.tools.drawing import check_plot_path

if TYPE_CHECKING:
    from kvant.bridge.config import BridgedConfig
    from kvant.tools.bench.shapes import Shape

DEFAULT_ENGINES = ("kvant", "mlx-lm")
DEFAULT_CONTEXTS = (128, 1024, 4096)
DEFAULT_KV_BITS = (0, 8, 4)
MAX_STREAMS = 256
SHAPE_NAMES = "qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, qwen3-0.6b or pocket"
DEFAULT_WEIGHT_BITS = 4
DEFAULT_WEIGHT_GROUP_SIZE = 64


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights come from: a folder, or random numbers of a shape.

    Attributes:
        name: of recordings.
        sizes: of the model, before it is loaded.
        folder: a context that has the model's folder; one that is made for it is removed at its end.
        random: whether the folder is made.
    """

    name: str
    sizes: "ModelConfig | Shape | BridgedConfig"
    folder: Callable[[], AbstractContextManager[Path]]
    random: bool


def source(
    model: str | None, shape: str | None, weight_bits: int | None, weight_group_size: int | None, seed: int
) -> Source:
    """The weights to measure with.

    Raises:
        BadValueError: flags that exclude each other, an unknown shape, or a quantization it cannot have.
        ModelError: a folder that does not hold a supported model.
    """
    if shape is None:
        for flag, value in (("bits", weight_bits), ("group-size", weight_group_size)):
            if value is not None:
                raise BadValueError(f"--weight-{flag} is {value}, but only --random makes weights")
        name = POCKET if model is None else model
        path = find_model(name)
        if is_bridged_folder(path):
            from kvant.bridge.folder import check_bridged

            return Source(name, check_bridged(path)[1], lambda: nullcontext(path), random=False)
        return Source(name, ModelConfig.from_folder(path), lambda: nullcontext(path), random=False)
    if model is not None:
        raise BadValueError(f"--model {model} and --random {shape} exclude each other")
    from kvant.tools.bench.shapes import SHAPES, random_model, shape_bytes

    if shape not in SHAPES:
        raise BadValueError(f"--random is {shape!r}; expected {SHAPE_NAMES}")
    bits = DEFAULT_WEIGHT_BITS if weight_bits is None else weight_bits
    if bits == 0 and weight_group_size is not None:
        raise BadValueError(f"--weight-group-size is {weight_group_size}, but --weight-bits 0 does not quantize")
    group = DEFAULT_WEIGHT_GROUP_SIZE if weight_group_size is None else weight_group_size
    with named(f"--weight-bits {bits} --weight-group-size {group}"):
        shape_bytes(SHAPES[shape], bits, group)
    name = f"random {shape}, {f'{bits}-bit weights' if bits else 'bfloat16'}"
    made = partial(random_model, SHAPES[shape], bits=bits, group_size=group, seed=seed)
    return Source(name, SHAPES[shape], made, random=True)


def streams(text: str) -> list[int]:
    """Numbers of requests that come at once; a BadValueError for numbers that cannot be used."""
    found = _numbers("--streams", text)
    for count in found:
        if not 1 <= count <= MAX_STREAMS:
            raise BadValueError(f"--streams has {count}; expected from 1 to {MAX_STREAMS}")
    return found


def contexts(
    text: str | None, max_tokens: int, context: int | None, defaults: Sequence[int] = DEFAULT_CONTEXTS
) -> list[int]:
    """Prompt lengths, each of which has room for the tokens after it in the model's context; None: any number."""
    room = MAX_SIZE if context is None else context
    if text is None:
        found = [count for count in defaults if count + max_tokens <= room]
        if not found:
            raise BadValueError(f"--max-tokens is {max_tokens}; the model's context is {room}; set --prompt-tokens too")
        return found
    found = _numbers("--prompt-tokens", text)
    for count in found:
        if count < 1:
            raise BadValueError(f"--prompt-tokens has {count}; expected at least 1")
        if count + max_tokens > room:
            raise BadValueError(
                f"--prompt-tokens has {count}; with --max-tokens {max_tokens} that is more than "
                f"the model's context of {room} tokens"
            )
    return found


def specs(
    engines: Sequence[str] | None,
    kv_bits: str | None,
    kv_group_size: int | None,
    sizes: "ModelConfig | Shape | BridgedConfig",
    streams: bool = False,
) -> list[EngineSpec]:
    """The engines that compute on this machine, in processes of their own.

    Several streams are by default served with 8 bits, and on a CPU mlx-lm then computes as kvant does, in float32 and
    with the same BLAS.

    mlx-lm's quantized cache raises for windows and some other layers. Of a bridged model it is measured only when
    engines or bits are named.
    """
    names = engines or DEFAULT_ENGINES
    bits = list(DEFAULT_KV_BITS) if kv_bits is None else _numbers("--kv-bits", kv_bits)
    if streams:
        on_cpu, lent = mx.default_device().type == mx.cpu, not blas.loaded().startswith(blas.OWN)
        fair = ":".join(["mlx-lm", *["float32"] * on_cpu, *[OPENBLAS] * (on_cpu and lent)])
        names, bits = engines or ("kvant", fair), bits if kv_bits else [8]
    for number in bits:
        if number not in QUANT_BITS:
            raise BadValueError(f"--kv-bits has {number}; expected 0, 4 or 8")
    if not any(bits) and kv_group_size is not None:
        raise BadValueError(f"--kv-group-size is {kv_group_size}, but --kv-bits 0 does not quantize")
    with named("--engine"):
        head_dim = getattr(sizes, "head_dim", None)  # a bridged model's layers may differ
        found = (stream_specs if streams else engine_specs)(names, bits, kv_group_size, head_dim)
    if engines is None and kv_bits is None and head_dim is None:
        found = [spec for spec in found if spec.name != "mlx-lm" or not spec.kv_bits]
    for spec in found:
        if spec.kernels is not None:
            check_kernels(spec.kernels, "--engine kvant's setting")
    if any(spec.openblas for spec in found) and blas.loaded().startswith(blas.OWN):
        raise BadValueError(f"an engine is to have {OPENBLAS}, but kvant has none to lend here ({blas.loaded()})")
    return found


def check_no_cache(kv_bits: str | None, kv_group_size: int | None) -> None:
    """Refuse settings of a cache where only servers are measured, which have their own."""
    for flag, value in (("bits", kv_bits), ("group-size", kv_group_size)):
        if value is not None:
            raise BadValueError(f"--kv-{flag} is {value}, but --streams with --server measures no other --engine")


def servers(given: Sequence[str], models: Sequence[str], source: Source) -> list[EngineSpec]:
    """The servers: ``given`` has a URL each, or a label for tables and a URL: NAME=URL."""
    if models and len(models) != len(given):
        named_models = ", ".join(map(repr, models))
        raise BadValueError(f"--server-model is {named_models}, but --server is given {len(given)} times")
    if not given:
        return []
    from kvant.tools.bench.streaming import check_url

    if source.random:
        raise BadValueError("--server needs --model, whose tokenizer writes its prompts; random weights have none")
    found: list[EngineSpec] = []
    for text, model in zip_longest(given, models):
        title, equals, url = text.partition("=")
        if not equals or "/" in title:  # of the URL itself
            title, url = "server", text
        with named("--server"):
            check_url(url)
        if not title.isprintable() or title in ("", *(spec.title for spec in found)):
            raise BadValueError(f"--server has the name {title!r} twice, or none; expected NAME=URL, each name once")
        found.append(EngineSpec("server", url=url, server_model=model, title=title))
    return found


def baseline(label: str | None, engines: Sequence[EngineSpec]) -> str:
    """The label of the engine that the others are divided by."""
    labels = [spec.label for spec in engines]
    if label is None:
        return next((spec.label for spec in engines if spec.name == "mlx-lm"), labels[0])
    if label not in labels:
        raise BadValueError(f"--baseline is {label!r}; expected one of {', '.join(map(repr, labels))}")
    return label


def check_draft(
    draft: str,
    draft_model: str | None,
    replay: str | None,
    streams: str | None,
    plot: Path | None,
    shape: str | None,
    engines: Sequence[str],
    servers: Sequence[str],
) -> str | None:
    """Where kvant's drafts come from, "prompt" or "model"; None: there are none.

    Raises:
        BadValueError: what drafts are not measured with, or a known text where it would not be generated.
    """
    if draft == "none" and draft_model is None:
        if replay is not None:
            raise BadValueError(f"--replay is {replay}, which has no effect without --draft prompt")
        return None
    asked = f"--draft is {draft}" if draft_model is None else f"--draft-model is {draft_model!r:.80}"
    if streams is not None:
        raise BadValueError(f"{asked}; with --streams {streams} drafts are not measured")
    if plot is not None:
        raise BadValueError(f"{asked}; --plot draws each token's time, and drafted tokens come several at once")
    if engines and not any(name.partition(":")[0] == "kvant" for name in engines):
        raise BadValueError(f"{asked}; of --engine {', '.join(engines)} none is kvant, which drafts")
    if draft_model is not None:
        for flag, given in (("random", shape), ("replay", replay)):
            if given is not None:
                raise BadValueError(f"{asked}; it drafts what a model writes, and --{flag} {given} is no such text")
    if replay is not None:
        others = [("engine", name) for name in engines if name.partition(":")[0] != "kvant"]
        for flag, name in [*others, *(("server", url) for url in servers)]:
            raise BadValueError(f"--replay is {replay}; --{flag} {name} generates the likeliest tokens alone")
    return "prompt" if draft_model is None else "model"


def draft_folder(name: str | None, source: Source) -> str | None:
    """The folder of a draft model; its tokenizer is compared with the model's.

    Raises:
        KvantError: there is no such folder, or the tokenizer is another.
    """
    if name is None:
        return None
    from kvant.engine.drafting.same_tokenizer import check_folders

    path = find_model(name)
    with source.folder() as folder:
        check_folders(folder, path)
    return str(path)


def refuse_over_ranks(
    engines: Sequence[str] | None, shape: str | None, streams: str | None, servers: Sequence[str]
) -> list[str]:
    """The engines to measure on several ranks.

    Raises:
        BadValueError: what cannot be measured there.
    """
    where = "on several ranks bench measures kvant with one request at a time"
    for name in engines or ():
        if name.partition(":")[0] != "kvant":
            raise BadValueError(f"--engine is {name!r}; {where}")
    for flag, value in (("streams", streams), ("server", ", ".join(servers))):
        if value:
            raise BadValueError(f"--{flag} is {value}; {where}")
    if shape is not None:
        raise BadValueError(f"--random is {shape!r}; on several ranks expected a model folder that each of them has")
    return list(engines or ("kvant",))


def check_seed(seed: int) -> None:
    """Refuse a seed that a recording cannot hold."""
    from kvant.tools.bench.lines import WIDEST

    if not -WIDEST <= seed <= WIDEST:
        raise BadValueError(f"--seed is {seed}; expected from {-WIDEST} to {WIDEST}")


def check_files(output: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written at the end; a KvantError where matplotlib is missing."""
    if output is not None:
        if output.exists() or output.is_symlink():
            raise BadValueError(f"--output: {output} exists; a recording goes to a new file")
        if not output.parent.is_dir():
            raise BadValueError(f"--output: the folder of {output} does not exist")
    if plot is not None:
        with named("--plot"):
            check_plot_path(plot)
        if output is not None and output.resolve() == plot.resolve():
            raise BadValueError(f"--output and --plot are both {plot}; the plot would replace the recording")


def refuse_all(context: typer.Context) -> None:
    """Options given before a subcommand would do nothing."""
    for name in context.params:
        given = context.get_parameter_source(name)
        if given is not None and given.name != "DEFAULT":
            raise BadValueError(f"{context.invoked_subcommand} takes no options of bench; {name} is given")


def _numbers(flag: str, text: str) -> list[int]:
    """Whole numbers between commas, each once."""
    found: list[int] = []
    for part in text.split(","):
        try:
            number = int(part)
        except ValueError:
            raise BadValueError(f"{flag} is {text!r}; expected whole numbers between commas") from None
        if number in found:
            raise BadValueError(f"{flag} has {number} twice")
        found.append(number)
    return found
