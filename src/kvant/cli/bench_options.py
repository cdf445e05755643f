"""Convert the flags of ``kvant bench`` to values; raise a usage error for values that cannot be used."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from kvant import blas
from kvant.cache.kv_format import PMX, KVFormat
from kvant.cli.options import BadValueError, check_kernels, named, refuse, whole_numbers
from kvant.engine.load import POCKET, find_model
from kvant.fields import MAX_SIZE
from kvant.models.config import ModelConfig
from kvant.operators.quantization import QUANT_BITS
from kvant.plan import read_folder
from kvant.tools.bench.engines import OPENBLAS, EngineSpec, engine_specs, mlx_lm_groups
from kvant.tools.bench.shapes import SHAPES, Shape, random_model, shape_bytes
from kvant.tools.drawing import check_plot_path

if TYPE_CHECKING:
    from kvant.bridge.config import BridgedConfig

DEFAULT_CONTEXTS = (128, 1024, 4096)
MAX_STREAMS = 256


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the weights: a name, the model's sizes, and a context manager of its folder."""

    name: str
    sizes: "ModelConfig | Shape | BridgedConfig"
    folder: AbstractContextManager[Path]


def source(
    model: str | None, shape: str | None, weight_bits: int | None, weight_group_size: int | None, seed: int
) -> Source:
    if shape is None:
        refuse("only --random makes weights", weight_bits=weight_bits, weight_group_size=weight_group_size)
        path = find_model(model or POCKET)
        sizes = read_folder(path).config
        return Source(model or POCKET, sizes, nullcontext(path))
    refuse("--random excludes it", model=model)
    if shape not in SHAPES:
        raise BadValueError(f"--random is {shape!r}; expected one of {', '.join(SHAPES)}")
    if not 0 <= seed < 2**64:
        raise BadValueError(f"--seed is {seed}; for random weights expected from 0 to {2**64 - 1}")
    bits = 4 if weight_bits is None else weight_bits
    group = weight_group_size or 64
    if bits == 0:
        refuse("--weight-bits 0 does not quantize", weight_group_size=weight_group_size)
    with named(f"--weight-bits {bits} --weight-group-size {group}"):
        shape_bytes(SHAPES[shape], bits, group)
    name = f"random {shape}, {f'{bits}-bit weights' if bits else 'bfloat16'}"
    return Source(name, SHAPES[shape], random_model(SHAPES[shape], bits=bits, group_size=group, seed=seed))


def streams(text: str | None) -> list[int]:
    """Parse the numbers of requests that come at once; empty without the flag."""
    counts = [] if text is None else whole_numbers("--streams", text)
    for count in counts:
        if not 1 <= count <= MAX_STREAMS:
            raise BadValueError(f"--streams has {count}; expected from 1 to {MAX_STREAMS}")
    return counts


def contexts(text: str | None, max_tokens: int, context: int | None, streams: bool = False) -> list[int]:
    """Parse prompt lengths, which must leave room for ``max_tokens`` in the ``context``, None: unlimited."""
    room = MAX_SIZE if context is None else context
    if text is None:
        counts = [count for count in DEFAULT_CONTEXTS[: 1 if streams else None] if count + max_tokens <= room]
        if not counts:
            raise BadValueError(
                f"--max-tokens is {max_tokens}; the model's context is {room}; set --prompt-tokens too"
            )
        return counts
    counts = whole_numbers("--prompt-tokens", text)
    for count in counts:
        if count < 1:
            raise BadValueError(f"--prompt-tokens has {count}; expected at least 1")
        if count + max_tokens > room:
            raise BadValueError(
                f"--prompt-tokens has {count}; with --max-tokens {max_tokens} that is more than "
                f"the model's context of {room} tokens"
            )
    return counts


def specs(
    engines: Sequence[str] | None,
    kv_bits: str | None,
    kv_group_size: int | None,
    sizes: Any,
    streams: bool = False,
    kv_format: str | None = None,
) -> list[EngineSpec]:
    """Return the engines that run on this machine, each in its own process.

    On a CPU with several streams, mlx-lm by default computes as kvant does: in float32, with the same BLAS.
    """
    lent = not blas.loaded().startswith(blas.MLX_BLAS)
    fair = mx.default_device().type == mx.cpu and streams
    theirs = ":".join(["mlx-lm", *["float32"] * fair, *[OPENBLAS] * (fair and lent)])
    bits = whole_numbers("--kv-bits", kv_bits or ("8" if streams else "0,8,4"))
    for number in bits:
        if number not in QUANT_BITS:
            raise BadValueError(f"--kv-bits has {number}; expected 0, 4 or 8")
    if not any(bits):
        refuse("--kv-bits 0 does not quantize", kv_group_size=kv_group_size)
    head_dim = getattr(sizes, "head_dim", None)  # a bridged model's layers may differ
    # mlx-lm's quantized cache fails for windows and some other layers, and supports few head widths.
    unfit = engines is None and kv_bits is None and (head_dim is None or not mlx_lm_groups(head_dim))
    if kv_format not in (None, PMX):
        KVFormat.of(kv_format)  # refuse a bad file in the name of its own flag
    with named("--engine"):
        made = partial(
            engine_specs, kv_group_size=kv_group_size, head_dim=head_dim, kv_format=kv_format, streams=streams
        )
        chosen = (
            [*made(["kvant"], bits), *made([theirs], [0])]
            if unfit
            else made(engines or ("kvant", theirs), bits)
        )
    if kv_format is not None and not any(spec.kv_format for spec in chosen):
        raise BadValueError(f"--kv-format is {kv_format}, but no --engine is kvant")
    for spec in chosen:
        if spec.kernels is not None:
            check_kernels(spec.kernels, "--engine kvant's setting")
    if any(spec.openblas for spec in chosen) and not lent:
        raise BadValueError(
            f"an engine asks for {OPENBLAS}, but kvant does not have it here ({blas.loaded()})"
        )
    return chosen


def drafts(
    draft: str, draft_model: str | None, num_draft_tokens: int | None, model: str | None
) -> dict[str, str | int | None]:
    """Return the attributes of engines that draft; empty if none does."""
    if draft_model is None:
        return {} if draft == "none" else {"draft": draft, "num_draft_tokens": num_draft_tokens}
    from kvant.engine.model_drafts import check_folders

    path = find_model(draft_model)
    check_folders(find_model(model or POCKET), path)
    return {"draft": "model", "draft_model": str(path), "num_draft_tokens": num_draft_tokens}


def servers(urls: Sequence[str], models: Sequence[str]) -> list[EngineSpec]:
    """Return the servers; each of ``urls`` is a URL, or NAME=URL with a label for tables."""
    if models and len(models) != len(urls):
        named_models = ", ".join(map(repr, models))
        raise BadValueError(f"--server-model is {named_models}, but --server is given {len(urls)} times")
    specs: list[EngineSpec] = []
    for text, model in zip_longest(urls, models):
        from kvant.tools.bench.server_client import check_url

        title, equals, url = text.partition("=")
        if not equals or "/" in title:  # the equals sign is part of the URL
            title = "server"
            url = text
        with named("--server"):
            check_url(url)
        if not title.isprintable() or title in ("", *(spec.title for spec in specs)):
            raise BadValueError(
                f"--server has the name {title!r} twice, or none; expected NAME=URL, each name once"
            )
        specs.append(EngineSpec("server", url=url, server_model=model, title=title))
    return specs


def baseline(label: str | None, engines: Sequence[EngineSpec]) -> str:
    """Return the label of the engine whose times divide the others'."""
    labels = [spec.label for spec in engines]
    if label is None:
        return next((spec.label for spec in engines if spec.name == "mlx-lm"), labels[0])
    if label not in labels:
        raise BadValueError(f"--baseline is {label!r}; expected one of {', '.join(map(repr, labels))}")
    return label


def check_files(output: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written at the end; raise a KvantError if matplotlib is missing."""
    if output is not None:
        check_new_file("--output", output)
    if plot is not None:
        with named("--plot"):
            check_plot_path(plot)
        if output is not None and output.resolve() == plot.resolve():
            raise BadValueError(f"--output and --plot are both {plot}; the plot would replace the recording")


def check_new_file(name: str, path: Path) -> None:
    """Refuse a recording's file that exists or could not be created."""
    if path.exists() or path.is_symlink():
        raise BadValueError(f"{name}: {path} exists; a recording goes to a new file")
    if not path.parent.is_dir():
        raise BadValueError(f"{name}: the folder of {path} does not exist")
