"""What every command that runs a model does first: load it, reserve its cache, say what was reserved."""

import gc
import sys
import time
from dataclasses import dataclass

import mlx.core as mx

from kvant.cache import QuantizedKVCache
from kvant.cli.fitting import plan_that_fits
from kvant.cli.options import BadValueError, KvSize
from kvant.cli.progress import LateProgress
from kvant.engine.load import find_adapter, find_model, load_folder
from kvant.errors import ContextError
from kvant.models import Decoder
from kvant.sizes import format_bytes
from kvant.text.process import TextProcess
from kvant.text.tokenizer import Tokenizer
from kvant.tools.machine import default_device, this_machine
from kvant.tools.plan import Checkpoint, Settings, split_pairs


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model with its reserved cache."""

    model: Decoder
    tokenizer: Tokenizer
    cache: list[QuantizedKVCache]
    load_s: float

    @property
    def cache_bytes(self) -> int:
        """Bytes reserved in all layers; they never change."""
        return sum(layer.nbytes for layer in self.cache)

    def describe_cache(self) -> str:
        """The reservation in a line."""
        first = self.cache[0]
        kind = f"{first.quant_bit} bits in groups of {first.quant_group}" if first.quant_bit else f"{self.model.dtype}"
        return (
            f"{first.max_seq_len} tokens reserved, {kind.removeprefix('mlx.core.')}, {format_bytes(self.cache_bytes)}"
        )


def open_session(
    model_name: str,
    settings: Settings,
    *,
    adapter_path: str | None = None,
    max_kv_size: KvSize,
    kernels: str | None = None,
    wired: bool,
    quiet: bool,
    process: TextProcess | None = None,
) -> Session:
    """Plan the memory, load a model and reserve its cache; the reservation is printed before the first token.

    Args:
        model_name: a model folder or name.
        settings: of the cache and of reading the prompt.
        adapter_path: the folder of an adapter for it.
        max_kv_size: tokens to reserve, "auto" for as many as fit, None for the default.
        kernels: "unfused" or "fused"; None: what the device has.
        wired: keep the planned memory resident.
        quiet: print nothing.
        process: for the tokenizer, where one was started already.

    Raises:
        ModelError: a model or adapter that cannot be loaded.
        ContextError: more tokens asked for than the model's context, or a plan that does not fit into this machine.
        BadValueError: a group size that does not divide the model's head dimension, a format that a kernel asked for
            does not take, or memory that cannot be wired.
    """
    started = time.perf_counter()
    folder = find_model(model_name)
    checkpoint = Checkpoint.from_folder(folder)
    if adapter_path is not None:
        checkpoint = checkpoint.adapted(find_adapter(adapter_path))
    machine = this_machine()
    planned = plan_that_fits(checkpoint, settings, max_kv_size, machine)
    if wired:
        wire(planned.total)
    with LateProgress("loading", quiet=quiet) as progress:
        model, tokenizer = load_folder(folder, progress.update, adapter_path=adapter_path, process=process)
    gc.freeze()  # what was loaded stays: it is not gone through again between tokens
    # Only the weights say how much of their biases stays out of the cache: what was planned before was a guess of it.
    planned = plan_that_fits(checkpoint, settings, max_kv_size, machine, split_pairs(model))
    try:
        cache = model.make_cache(
            planned.max_kv_size,
            quant_bit=settings.kv_bits,
            quant_group=settings.kv_group_size,
            bias_split=settings.kv_bias_split,
            kernels=kernels,
        )
    except ContextError:
        raise
    except ValueError as error:  # the format itself was looked at with the plan
        raise BadValueError(
            f"--kv-bits {settings.kv_bits} --kv-group-size {settings.kv_group_size}: {error}"
        ) from error
    session = Session(model, tokenizer, cache, time.perf_counter() - started)
    if not quiet:
        print(f"cache: {session.describe_cache()}", file=sys.stderr)
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
