"""Flags that several commands share, and what is made of them. Names and defaults follow mlx-lm."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
from typer.exceptions import TyperException

from kvant.engine.load import POCKET
from kvant.operators.dispatch import VARIABLE, choose
from kvant.operators.quantization import QUANT_BITS


class BadValueError(TyperException):
    """A flag whose value cannot be applied; the command ends with exit code 2."""

    exit_code = 2


@contextmanager
def named(flag: str) -> Iterator[None]:
    """A ValueError in the block becomes a BadValueError that begins with the flag."""
    try:
        yield
    except ValueError as error:
        raise BadValueError(f"{flag}: {error}") from error


DEFAULT_KV_GROUP_SIZE = 32
AUTO: Literal["auto"] = "auto"
KvSize = int | Literal["auto"] | None  # tokens; as many as fit; the default

MODEL_HELP = f"A folder, a name (`kvant models`), owner/repository[@revision] after `kvant pull`, or '{POCKET}'"
Model = Annotated[str, typer.Option(help=f"{MODEL_HELP}.")]
AdapterPath = Annotated[
    str | None, typer.Option(help="The folder of a LoRA or DoRA adapter as mlx_lm.lora writes it; applied at load.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", help="Generate at most this many tokens.")]
SystemPrompt = Annotated[str | None, typer.Option(help="A system message before the conversation.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")]
KvBits = Annotated[int, typer.Option(help="Bits of a cached key or value: 8, 4, or 0 for no quantization.")]
KvGroupSize = Annotated[
    int | None, typer.Option(help="Cached values that share one scale; divides the head dimension; default: 32.")
]
KvBiasSplit = Annotated[
    bool,
    typer.Option(
        "--kv-bias-split/--no-kv-bias-split", help="Keep the projections' biases out of the cache; attention adds them."
    ),
]
Kernels = Annotated[
    str | None,
    typer.Option(
        metavar="unfused|fused",
        help="How attention reads the cache; default: KVANT_KERNELS, else the fused kernel on a GPU that it works on.",
    ),
]
MaxKvSize = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS|auto",
        help="Tokens reserved in the cache, or auto: as many as fit; default: the smaller of 4096 and the context.",
    ),
]
Wired = Annotated[
    bool, typer.Option("--wired", help="Keep the planned memory from being paged out; on Macs only, macOS 15 or later.")
]
PrefillStepSize = Annotated[int, typer.Option(help="Prompt tokens fed at a time; smaller takes less memory.")]
Raw = Annotated[
    bool, typer.Option("--raw", help="On a terminal, send control characters of the text as they are; it obeys them.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no statistics and no progress.")]


def check_counts(**counts: int | None) -> None:
    """Refuse a count below 1, naming its flag."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise BadValueError(f"--{name.replace('_', '-')} is {count}; expected at least 1")


def kv_size(text: str | None) -> KvSize:
    """A --max-kv-size as it was written; one that is no count of tokens is a usage error."""
    if text is None or text == AUTO:
        return text
    try:
        count = int(text)
    except ValueError:
        raise BadValueError(f"--max-kv-size is {text[:80]!r}; expected a number of tokens, or auto") from None
    check_counts(max_kv_size=count)
    return count


def check_kv_format(kv_bits: int, kv_group_size: int | None) -> int:
    """The group size; refuses what no model's cache can have. Whether it divides a head is the model's affair."""
    if kv_bits not in QUANT_BITS:
        raise BadValueError(f"--kv-bits is {kv_bits}; expected 0, 4 or 8")
    if kv_bits == 0 and kv_group_size is not None:
        raise BadValueError(f"--kv-group-size is {kv_group_size}, but --kv-bits 0 does not quantize")
    check_counts(kv_group_size=kv_group_size)
    return DEFAULT_KV_GROUP_SIZE if kv_group_size is None else kv_group_size


def check_kernels(kernels: str | None = None, flag: str = "--kernels") -> None:
    """Refuse kernels, or a KVANT_KERNELS without them, that are unknown or cannot be had on this machine.

    ``flag`` is how the user named them.

    Raises:
        RuntimeError: the fused kernel is asked for and failed its self-check.
    """
    if kernels is None and not os.environ.get(VARIABLE):
        return  # nothing is asked for
    try:
        choose(kernels)
    except ValueError as error:
        raise BadValueError(str(error) if kernels is None else str(error).replace("kernels", flag, 1)) from error


def check_text(**texts: str | None) -> None:
    """Refuse text that is no Unicode, such as bytes of another encoding on the command line."""
    for name, text in texts.items():
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise BadValueError(f"{name.replace('_', ' ')} is not valid UTF-8") from None


def check_stop(stop: Sequence[str] | None) -> list[str]:
    """Refuse an empty stop string: it would end every text before it begins."""
    for text in stop or ():
        check_text(stop=text)
    if any(not text for text in stop or ()):
        raise BadValueError("--stop is empty; expected a string")
    return list(stop or ())
