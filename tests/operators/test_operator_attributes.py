"""Every attribute of the operators with a value of each wrong kind: refused with nothing written, or it works."""

import inspect
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.operator_calls import BOTH, OPERATORS, OWN_WORDS, VALUES, bits_of, good_call
from support.operator_cases import same_bits

ROWS = [(operator, name) for operator in BOTH for name in inspect.signature(OPERATORS[operator]).parameters]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize(("operator", "name"), ROWS)
def test_any_value(operator: str, name: str, value: Any) -> None:
    for quant_bit, layout in ((8, 0), (4, 1), (0, 1)):
        given = good_call(operator, quant_bit, layout)
        before = bits_of(given)
        try:
            mx.eval(OPERATORS[operator](**(given | {name: value})))
        except (ValueError, TypeError) as error:
            message = str(error)
            assert all(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True)), message
            assert any(word in message for word in OWN_WORDS), message
        else:
            assert not any(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))


@pytest.mark.parametrize("flag", ["is_causal", "is_alibi"])
@pytest.mark.parametrize("value", [mx.array([True, False]), np.array([True, False]), 1, None])
def test_a_flag_is_a_bool(flag: str, value: Any) -> None:
    """An array was looked at after the cache had been written."""
    given = good_call("multi_head_cache_attention", 8, 1)
    before = bits_of(given)
    with pytest.raises(ValueError, match=f"{flag} is .*; expected True or False"):
        mx.eval(OPERATORS["multi_head_cache_attention"](**(given | {flag: value})))
    assert all(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))


def test_as_many_repetitions_as_a_result_can_hold() -> None:
    """2**31 failed in MLX after the cache had been written."""
    given = good_call("key_value_cache", 8, 1)
    before = bits_of(given)
    most = (2**31 - 1) // (2 * 7 * 2 * 8)  # B * T * K * D
    for num_repeat in (2**31, 2**63, most + 1):
        with pytest.raises(ValueError, match=f"num_repeat is {num_repeat}; expected at most {most} for this call"):
            OPERATORS["key_value_cache"](**given, num_repeat=num_repeat)
    assert all(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))
    key, _ = OPERATORS["key_value_cache"](**given, num_repeat=most)
    assert key.shape == (2, 7, 2 * most, 8)  # not computed
