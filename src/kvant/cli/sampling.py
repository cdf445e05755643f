"""The sampling flags of generate and chat, and what is made of them. Names follow mlx-lm."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any

import typer

from kvant.cli.options import BadValueError
from kvant.cli.session import Session
from kvant.engine.sampling import LogitsProcessor, Sampler, SamplingOptions

_RECENT = typer.Option(help="How many recent tokens that penalty looks at; default: 20.")

# A flag each field of SamplingOptions, with its default.
FLAGS: dict[str, Any] = {
    "temp": Annotated[float, typer.Option(help="Sampling temperature; 0 always picks the likeliest token.")],
    "top_p": Annotated[
        float, typer.Option(help="Sample from the likeliest tokens that together have this probability.")
    ],
    "min_p": Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest one.")],
    "top_k": Annotated[int, typer.Option(help="Sample from this many of the likeliest tokens; 0: all.")],
    "xtc_probability": Annotated[
        float, typer.Option(help="How often to drop all likely tokens but the least likely of them; 0: never.")
    ],
    "xtc_threshold": Annotated[
        float | None, typer.Option(help="From which probability on that takes a token for likely; default: 0.1.")
    ],
    "repetition_penalty": Annotated[float, typer.Option(help="Divide the logits of recent tokens by this; 1: off.")],
    "repetition_context_size": Annotated[int | None, _RECENT],
    "presence_penalty": Annotated[float, typer.Option(help="Subtract this from the logits of recent tokens; 0: off.")],
    "presence_context_size": Annotated[int | None, _RECENT],
    "frequency_penalty": Annotated[
        float, typer.Option(help="Subtract this from a recent token's logit once an occurrence; 0: off.")
    ],
    "frequency_context_size": Annotated[int | None, _RECENT],
    "logit_bias": Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN:BIAS", help="Add BIAS to the logit of token id TOKEN; repeatable."),
    ],
    "seed": Annotated[int | None, typer.Option(help="Seed of the random numbers; without one every run differs.")],
}


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling flags in the place of its parameter ``sampling``, which is made of them."""
    defaults = {
        option.name: None if option.default is MISSING else option.default for option in fields(SamplingOptions)
    }
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in FLAGS.items()
    ]
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        parameters += flags if parameter.name == "sampling" else [parameter]

    @wraps(command)
    def run(*arguments: Any, **values: Any) -> None:
        sampling = _options(**{name: values.pop(name) for name in FLAGS if name in values})
        command(*arguments, **values, sampling=sampling)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def build_sampling(sampling: SamplingOptions, session: Session) -> tuple[Sampler, list[LogitsProcessor]]:
    """The sampler and processors for a loaded model; a token it does not have is a usage error."""
    special: list[int] = []
    if sampling.xtc_probability:  # mlx-lm's: XTC leaves out neither the end of a line nor that of the text
        special = [*session.tokenizer.encode("\n", add_special_tokens=False), *session.tokenizer.eos_token_ids]
    try:
        return sampling.build(session.model.config.vocab_size, special)
    except ValueError as error:
        raise _of_a_flag(error) from error


def _options(logit_bias: Sequence[str] | None = None, **values: Any) -> SamplingOptions:
    """Checked sampling options; a bad value is a usage error that names its flag."""
    biases = dict(_bias(text) for text in logit_bias or ())
    try:
        return SamplingOptions(logit_bias=biases, **values)
    except ValueError as error:
        raise _of_a_flag(error) from error


def _of_a_flag(error: ValueError) -> BadValueError:
    """An error that begins with an option's name, with the flags in the place of options."""
    name, _, rest = str(error).partition(" ")
    return BadValueError(f"{_flag(name)} {re.sub(r'[a-z]+_[a-z_]+', lambda found: _flag(found[0]), rest)}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name in FLAGS else name


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise BadValueError(f"--logit-bias is {text!r}; expected TOKEN:BIAS, such as 42:-5.0") from None
