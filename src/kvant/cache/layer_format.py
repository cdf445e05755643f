"""The format of a layer's stored tokens, which two caches must share to exchange tokens."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import mlx.core as mx

from kvant.operators.exact_rows import SINKS, SLACK, TAIL_ROWS, TAIL_WINDOW
from kvant.operators.key_transform import VALUES
from kvant.operators.packing import PACKINGS
from kvant.operators.quantization import FITTED_BITS, QUANT_BITS, quantized_dtype

DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I8": mx.int8,
    "U8": mx.uint8,
    "I32": mx.int32,
    "U32": mx.uint32,
    "I64": mx.int64,
}
FLOAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
KEY_WORDS = {"norms": "balanced by norms", "center": "centered", "balance": "balanced", "rotate": "rotated"}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KINDS = ("quantized", "chunks", "state")  # in files
# Names in files of version 1: PMX's, and an older one.
FILE_WORDS = {"kv_bits": "quant_bit", "kv_group_size": "quant_group", "transform_name": "front"}
MAX_NUMBER = 2**24  # of heads, widths and tokens: far above any model's

Stored = tuple[str, tuple[int, ...]]  # an array's dtype, by its name in safetensors, and its shape
Arrays = list[mx.array | None]  # of one state


@dataclass(frozen=True, slots=True)
class State:
    """A linear or convolution layer's state: arrays that are replaced at every step.

    Attributes:
        nbytes: bytes of all its arrays.
        shapes: dtype and shape of each; None: the model leaves it empty.
    """

    nbytes: int
    shapes: tuple[Stored | None, ...]

    def check(self, arrays: Arrays) -> None:
        """Raise a ValueError unless arrays match; they may be smaller until enough tokens were read."""
        for number, (array, expected) in enumerate(zip(arrays, self.shapes, strict=True)):
            if array is None or expected is None:
                continue
            dtype, (_, *most) = expected
            fits = len(array.shape) == 1 + len(most) and all(map(operator.le, array.shape[1:], most))
            if DTYPE_NAMES[array.dtype] != dtype or array.shape[0] != 1 or not fits:
                shape = f"{DTYPE_NAMES[array.dtype]} {tuple(array.shape)}"
                raise ValueError(f"array {number} of a state is {shape}; expected {dtype} {(1, *most)}")


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """A layer's format. Sizes count elements; windows count tokens.

    Attributes:
        kind: "quantized", also at 0 bits; "chunks", Llama 4's; "state", of a linear layer.
        num_kv_heads, head_dim, value_head_dim: of its tokens.
        kv_bits, value_bits, kv_group_size: 0 without quantization. ``value_bits`` default to ``kv_bits``.
        dtype, scale_dtype: of the stored arrays, by their names in safetensors; "" without scales.
        window: how many of the last tokens a query sees; None: all.
        slack: tokens before the window that a sequence may still go back to.
        split_pairs: the rotary pairs of the bias split; None: keys and values include their biases.
        state: each array of a state; None: not computed yet.
        shared: other layers of a bridged model read the tokens that this one fetched.
        transform_name: of the keys' :class:`kvant.operators.key_transform.KeyTransform`; "": none.
        tail_dtype: of the exact tail's rows (:mod:`kvant.operators.exact_rows`); "": no tail.
    """

    kind: str
    num_kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    kv_bits: int = 0
    value_bits: int = field(default=-1, kw_only=True)
    kv_group_size: int = 0
    dtype: str = ""
    scale_dtype: str = ""
    window: int | None = None
    slack: int = 0
    split_pairs: tuple[int, ...] | None = None
    state: tuple[Stored | None, ...] = ()
    shared: bool = False
    transform_name: str = ""
    tail_dtype: str = ""

    def __post_init__(self) -> None:
        if self.value_bits < 0:
            object.__setattr__(self, "value_bits", self.kv_bits)

    @classmethod
    def of_rows(
        cls,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int,
        kv_bits: int,
        kv_group_size: int,
        dtype: str,
        *,
        window: int | None,
        max_seq_len: int,
        value_bits: int = -1,
        scale_dtype: str = "F16",
        has_tail: bool = False,
        **others: Any,
    ) -> "LayerFormat":
        """Return the format of a layer with rows for up to ``max_seq_len`` tokens; 0 bits store ``dtype``.

        ``has_tail``: give it an exact tail of 16-bit floats if it quantizes.
        """
        seen = narrow_window(window, max_seq_len)
        value_bits = kv_bits if value_bits < 0 or not value_head_dim else value_bits
        return cls(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            kv_bits=kv_bits,
            value_bits=value_bits,
            kv_group_size=kv_group_size if kv_bits else 0,
            dtype=stored_dtype(kv_bits, value_bits) if kv_bits else dtype,
            scale_dtype=scale_dtype if kv_bits else "",
            window=seen,
            slack=0 if seen is None else SLACK,
            # bfloat16 has float32's range, so no key becomes infinite, and a CPU converts it fast.
            tail_dtype=(dtype if dtype == "F16" else "BF16") if has_tail and kv_bits else "",
            **{"kind": "quantized"} | others,
        )

    @classmethod
    def from_json(cls, raw: object) -> "LayerFormat":
        """Parse the result of :meth:`as_json`, checking every field."""
        names = {field.name: FILE_WORDS.get(field.name, field.name) for field in fields(cls)}
        # Old files lack the key transform and the tail, and have value bits only if they differ.
        if isinstance(raw, dict):
            absent = {"value_bits": raw.get(FILE_WORDS["kv_bits"]), "tail_dtype": ""}
            raw = {FILE_WORDS["transform_name"]: "", **absent} | raw
        if not isinstance(raw, dict) or raw.keys() != {*names.values(), "keep"}:
            raise ValueError(
                "a layer's format has other fields than " + ", ".join(sorted([*names.values(), "keep"]))
            )
        if raw["keep"] != 0:
            raise ValueError(f"keep is {_shown(raw['keep'])}; expected 0: windows keep no first tokens")
        raw = {name: raw[word] for name, word in names.items()}
        for name in (
            "num_kv_heads",
            "head_dim",
            "value_head_dim",
            "kv_bits",
            "value_bits",
            "kv_group_size",
            "slack",
        ):
            check_number(name, raw[name])
        if raw["window"] is not None:
            check_number("window", raw["window"], 1)
        choices = {"kind": KINDS, "dtype": ("", *DTYPES), "scale_dtype": ("", "F16", "F32")}
        choices["tail_dtype"] = ("", "F16", "BF16")
        for name, allowed in choices.items():
            if raw[name] not in allowed:
                raise ValueError(
                    f"{name} is {_shown(raw[name])}; expected one of {', '.join(filter(None, allowed))}"
                )
        if not isinstance(raw["transform_name"], str):
            raise ValueError(f"front is {_shown(raw['transform_name'])}; expected text")
        pairs = raw["split_pairs"]
        if pairs is not None:
            pairs = check_numbers("split_pairs", pairs)
            if sorted(set(pairs)) != list(pairs) or (pairs and pairs[-1] >= raw["head_dim"] // 2):
                raise ValueError(
                    f"split_pairs is {_shown(pairs)}; expected ascending numbers of rotary pairs"
                )
        if not isinstance(raw["state"], list) or type(raw["shared"]) is not bool:
            raise ValueError(f"state is {_shown(raw['state'])}; expected a list, and shared a bool")
        made = cls(**raw | {"split_pairs": pairs, "state": tuple(map(parse_stored, raw["state"]))})
        made._check()
        return made

    def _check(self) -> None:
        """Raise a ValueError if fields contradict each other."""
        if not self.has_tokens:
            if self != LayerFormat("state", state=self.state):
                raise ValueError(f"a layer of kind {self.kind!r} has fields of another kind")
            return
        if self.value_bits not in (PACKINGS if self.kv_bits else (0,)):
            raise ValueError(f"a layer of {self.kv_bits} bits of keys and {self.value_bits} of values")
        if self.kv_bits not in QUANT_BITS or not self.num_kv_heads or not self.head_dim:
            raise ValueError(
                f"a layer of {self.kv_bits} bits, {self.num_kv_heads} kv heads of {self.head_dim}"
            )
        widths = (self.head_dim, self.value_head_dim)
        if self.kv_bits and (not self.kv_group_size or any(width % self.kv_group_size for width in widths)):
            raise ValueError(
                f"kv_group_size is {self.kv_group_size}; expected a divisor of {widths[0]} and {widths[1]}"
            )
        if self.tail_dtype and not self.kv_bits:
            raise ValueError("a layer that is not quantized has an exact tail")
        if bool(self.kv_bits) != bool(self.scale_dtype) or bool(self.kv_bits) != bool(self.kv_group_size):
            raise ValueError(f"a layer of {self.kv_bits} bits with scales {self.scale_dtype!r}")
        allowed = [stored_dtype(self.kv_bits, self.value_bits)] if self.kv_bits else ["F32", "F16", "BF16"]
        if self.dtype not in allowed:
            raise ValueError(
                f"dtype is {self.dtype!r} at {self.kv_bits} bits; expected {' or '.join(allowed)}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        plain = {"transform_name": "", "value_bits": self.kv_bits, "tail_dtype": ""}
        values = {name: value for name, value in asdict(self).items() if plain.get(name, ...) != value}
        return {"keep": 0} | {FILE_WORDS.get(name, name): value for name, value in values.items()}

    @property
    def bits(self) -> tuple[int, int]:
        """Return the bits of keys and of values."""
        return self.kv_bits, self.value_bits

    @property
    def bit_operands(self) -> dict[str, Any]:
        """Return the bits by the operators' (PMX's) names."""
        return {"quant_bit": self.kv_bits, "value_bit": self.value_bits}

    @property
    def operands(self) -> dict[str, Any]:
        """Return the bits and the group by the operators' names."""
        return self.bit_operands | {"quant_group": self.kv_group_size}

    @property
    def has_tokens(self) -> bool:
        """Return whether the layer stores rows for each token, not one state."""
        return self.kind != "state"

    def first(self, length: int, written: int) -> int:
        """Return the first token still stored of ``length``, if at most ``written`` tokens were written."""
        return 0 if self.window is None else min(length, max(0, written - self.window - self.slack))

    def rows(self, length: int, written: int) -> int:
        """Return how many tokens are still stored."""
        return length - self.first(length, written)

    def arrays(self, rows: int) -> dict[str, Stored]:
        """Return the arrays that store ``rows`` tokens of one sequence, by name."""
        sides = 2
        parts = [(self.head_dim, self.kv_bits)]
        if (self.value_head_dim, self.value_bits) != parts[0]:
            sides = 1
            parts.append((self.value_head_dim, self.value_bits))
        shape = (sides, self.num_kv_heads, rows)
        width = sum(width for width, _ in parts)
        row = sum(width * bits for width, bits in parts) // 8 if self.kv_bits else width
        stored: dict[str, Stored] = {"cache": (self.dtype, (*shape, row))}
        if self.kv_bits:
            stored["scale"] = (self.scale_dtype, (*shape, width // self.kv_group_size))
        return stored

    def tail(self, rows: int) -> list[Stored]:
        """Return the array that stores ``rows`` exact rows of the tail; empty without a tail."""
        if not self.tail_dtype:
            return []
        floats = replace(self, kv_bits=0, value_bits=0, dtype=self.tail_dtype)
        return [floats.arrays(rows)["cache"]]

    def tail_pages(self, pages: int) -> list[Stored]:
        """Return the array that stores the tails of ``pages`` sequences; empty without a tail."""
        return self.tail(pages * TAIL_ROWS)

    @property
    def transform_arrays(self) -> list[Stored]:
        """Return the arrays of its key transform, without the bias split."""
        components = self.transform_name.partition(":")[0].split("+")
        count = sum(component in components for component in ("center", "balance"))
        return [("F32", (self.num_kv_heads, 1, self.head_dim))] * count

    def tables(self) -> dict[str, Stored]:
        """Return the arrays of split-off biases, by name."""
        if self.split_pairs is None:
            return {}
        heads = self.num_kv_heads
        return {
            "key_bias": ("F32", (heads, 2, len(self.split_pairs))),
            "value_bias": ("F32", (heads, self.head_dim)),
        }


def describe_formats(formats: Sequence[LayerFormat]) -> str:
    """Describe in words how layers store keys and values; "" if none does."""
    rows = [each for each in formats if each.has_tokens]
    floats = ["/".join(sorted({each.dtype for each in rows if not each.kv_bits}))] if rows else []
    kinds = sorted({(each.kv_bits, each.value_bits) for each in rows if each.kv_bits})
    groups = sorted({each.kv_group_size for each in rows} - {0})
    if not kinds:
        return FLOAT_NAMES.get(floats[0], floats[0]) if floats else ""
    alike = " and ".join(str(keys) for keys, values in kinds if keys == values)
    mixed = [f"{keys}-bit keys and {values}-bit values" for keys, values in kinds if keys != values]
    text = ", ".join([*([f"{alike} bits"] if alike else []), *mixed])
    text += f" in groups of {' or '.join(map(str, groups))}"
    text += "".join(f" and {FLOAT_NAMES.get(each, each)}" for each in floats if each)
    fitted = ["scales fitted"] if any(FITTED_BITS in kind for kind in kinds) else []
    transforms = Counter(each.transform_name.partition(":")[0] for each in rows)
    changes = [
        describe_transform(name) + ("" if count == len(rows) else f" in {count} of {len(rows)} layers")
        for name, count in sorted(transforms.items())
        if name
    ]
    with_tail = sum(bool(each.tail_dtype) for each in rows)
    tails = [f"first {SINKS} and last {TAIL_WINDOW} tokens exact"] if with_tail else []
    if with_tail not in (0, len(rows)):
        tails = [f"{tails[0]} in {with_tail} of {len(rows)} layers"]
    return ", ".join([text, *fitted, *changes, *tails])


def describe_transform(name: str) -> str:
    """Describe in words what a key transform does, such as "keys and values rotated"."""
    components = [component for component in name.split("+") if component != VALUES]
    changes = "+".join(KEY_WORDS.get(component, component) for component in components)
    if VALUES not in name:
        return f"keys {changes}"
    if components == ["rotate"]:
        return "keys and values rotated"
    return f"keys {changes}, values rotated" if components else "values rotated"


def stored_of(arrays: Iterable[mx.array | None]) -> tuple[Stored | None, ...]:
    """Return the dtypes and shapes of arrays."""
    return tuple(None if array is None else (DTYPE_NAMES[array.dtype], array.shape) for array in arrays)


def narrow_window(window: int | None, max_seq_len: int) -> int | None:
    """Return a layer's window, or None if sequences of ``max_seq_len`` tokens never outgrow it."""
    return window if window is not None and window < max_seq_len else None


def stored_bytes(stored: Stored) -> int:
    """Return the bytes of an array."""
    dtype, shape = stored
    return DTYPES[dtype].size * math.prod(shape)


def array_bytes(array: mx.array) -> bytes | memoryview:
    """Return the contents of an array."""
    if not array.size:
        return b""
    return memoryview(mx.view(mx.contiguous(array).reshape(-1), mx.uint8))  # type: ignore[arg-type]


def as_array(data: bytearray, stored: Stored) -> mx.array:
    """Return the array with these contents, which must have its size."""
    dtype, shape = stored
    if not data:
        return mx.zeros(shape, DTYPES[dtype])
    array = mx.array(memoryview(data))  # type: ignore[arg-type]
    return array.view(DTYPES[dtype]).reshape(shape)


def stored_dtype(kv_bits: int, value_bits: int = 0) -> str:
    """Return the dtype of quantized keys and values."""
    return DTYPE_NAMES[quantized_dtype(kv_bits, value_bits)]


def check_number(name: str, value: object, least: int = 0, most: int = MAX_NUMBER) -> int:
    """Return the value if it is an int in the range; otherwise raise a ValueError."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {_shown(value)}; expected an int from {least} to {most}")
    return value


def check_numbers(name: str, value: object, least: int = 0, most: int = MAX_NUMBER) -> tuple[int, ...]:
    """Return a list of ints in the range; otherwise raise a ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_shown(value)}; expected a list")
    return tuple(check_number(f"{name}[{i}]", number, least, most) for i, number in enumerate(value))


def parse_stored(raw: object) -> Stored | None:
    """Parse a dtype and a shape from JSON, or None."""
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != 2 or raw[0] not in DTYPES:
        raise ValueError(f"an array of a state is {_shown(raw)}; expected a dtype and a shape")
    return raw[0], check_numbers("shape", raw[1])


def _shown(value: object) -> str:
    return repr(value)[:80]


def difference(stored: LayerFormat, ours: LayerFormat, stored_reserved: int, reserved: int) -> str | None:
    """Return the field in which a snapshot's layer differs from ours, with both values, or None if it fits.

    A layer has no window if its reservation is inside it.
    """
    ignored: tuple[str, ...] = ("tail_dtype",)  # the quantized rows are complete without it
    if stored.kind == ours.kind == "state" and len(stored.state) == len(ours.state):
        ignored = ("state", "tail_dtype")
    elif _inside(stored, stored_reserved, ours) or _inside(ours, reserved, stored):
        ignored = ("window", "slack", "tail_dtype")
    expected = asdict(ours)
    for name, value in asdict(stored).items():
        if name not in ignored and value != expected[name]:
            hint = ""
            if name == "transform_name" and stored.kv_bits:
                other = "another kv_format" if value else "kv_format pmx"
                hint = f" (it was written with {other}, or by an older kvant)"
            return f"{name} is {_shown(value)}; expected {_shown(expected[name])}{hint}"
    return None


def _inside(whole: LayerFormat, reserved: int, other: LayerFormat) -> bool:
    """Return whether a layer stores every token because its reservation is inside the other's window."""
    return whole.window is None and other.window is not None and reserved <= other.window
