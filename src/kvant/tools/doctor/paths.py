"""The path of every operator on this machine, and the reason."""

from dataclasses import dataclass

from kvant.engine.step import should_compile
from kvant.operators.dispatch import choose
from kvant.operators.kernels.attend import MAX_NEW_TOKENS

UNFUSED = "unfused"


@dataclass(frozen=True, slots=True)
class OperatorPath:
    """``path`` is fused, unfused, or none if a requested kernel failed its self-check; a step is compiled or not."""

    operator: str
    path: str
    reason: str


def operator_paths() -> list[OperatorPath]:
    """The paths of all operators.

    Raises:
        ValueError: KVANT_KERNELS is unknown, or asks for what cannot run here.
    """
    try:
        choice = choose()
        path, reason = UNFUSED if choice.backend is None else f"fused ({choice.backend})", choice.reason
    except RuntimeError as error:  # the kernel is asked for, and failed its self-check
        path, reason = "none", str(error)
    more = f"the kernel is for few queries; more than {MAX_NEW_TOKENS} are a product with dequantized keys and values"
    return [
        OperatorPath(f"MultiHeadCacheAttention, 1 to {MAX_NEW_TOKENS} new tokens", path, reason),
        OperatorPath("MultiHeadCacheAttention, more", UNFUSED, more),
        OperatorPath("KeyValueCache", UNFUSED, "it returns dequantized keys and values, which the kernel never makes"),
        OperatorPath("quantize, of appended tokens", path, "goes with attention's"),
        OperatorPath("quantize, dequantize", UNFUSED, "functions of their own have no kernel"),
        _step(),
    ]


def _step() -> OperatorPath:
    if should_compile():
        return OperatorPath("decode step", "compiled", "on a GPU the step takes less time than building it")
    return OperatorPath(
        "decode step",
        "not compiled",
        "on a CPU it is built while the last one runs; compiled it would read more tokens",
    )
