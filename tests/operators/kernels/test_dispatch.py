"""Which path attention takes, and that both give the same: on a machine whose GPU is stubs or the host's
Metal run.

The kernel's own numbers are held against the oracle elsewhere. Nothing here runs on a GPU.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.metal_host import host_pytest_skip
from support.operator_cases import QuantizedTally
from support.pmx_cases import Call, plain_case
from support.runs import Run

from kvant.cache import QuantizedKVCache
from kvant.models import Decoder
from kvant.operators import dispatch
from kvant.operators.kernels import launch

pytestmark = host_pytest_skip


DEVICES = [(mx.cpu, True, True, None), (mx.gpu, True, False, "metal"), (mx.gpu, False, True, "cuda")]


@pytest.mark.parametrize(("device", "metal", "cuda", "expected"), [*DEVICES, (mx.gpu, False, False, None)])
def test_the_device_decides(
    monkeypatch: pytest.MonkeyPatch, device: mx.DeviceType, metal: bool, cuda: bool, expected: str | None
) -> None:
    monkeypatch.delenv("KVANT_KERNELS", raising=False)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    assert dispatch.resolve() == expected
    assert dispatch.resolve("unfused") is None
    if expected is not None:
        assert dispatch.resolve("fused") == expected
        return
    with pytest.raises(ValueError, match=r"kernels is 'fused'; .* not a GPU"):
        QuantizedKVCache(4, 2, 64, kernels="fused")


def test_a_word_wins_over_the_device(checked_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument's over the variable's; one that is unknown is named."""
    for variable, word, backend in (
        (None, None, "metal"),
        ("", None, "metal"),
        ("unfused", None, None),
        ("fused", None, "metal"),
        ("unfused", "fused", "metal"),
        ("Fused", "unfused", None),
    ):
        if variable is not None:
            monkeypatch.setenv("KVANT_KERNELS", variable)
        assert QuantizedKVCache(4, 2, 64, kernels=word).layer.backend == backend
    with pytest.raises(ValueError, match="kernels is 'fast'; expected 'unfused' or 'fused'"):
        QuantizedKVCache(4, 2, 64, kernels="fast")
    with pytest.raises(ValueError, match="KVANT_KERNELS is 'Fused'; expected 'unfused' or 'fused'"):
        QuantizedKVCache(4, 2, 64)


# ---- PMX's operator --------------------------------------------------------------------------------------------------


def pmx_call(
    bits: int, kernels: str | None, *, S: int = 2, layout: int = 1, layers: int = 1, **changes: Any
) -> Call:
    """Two sequences of 37 cached tokens in a cache for three, poisoned elsewhere. Products are rounded to
    float32.
    """
    case = plain_case(bits, 37, S, batch=2, max_rows=(3, 50), head_dim=64, ratio=3, **changes)
    spec = case.spec._replace(quant_group=16, num_layer=layers, cache_layout=layout)
    call = Call(replace(case, spec=spec))
    call.more = {} if kernels is None else {"kernels": kernels}
    return call


@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize(
    "changes", [{}, {"is_alibi": True}, {"mask": "float", "mask_rank": 4, "mask_padding": 7}]
)
def test_the_operator_is_the_oracle_s_either_way(
    launches: list[Any], bits: int, changes: dict[str, Any]
) -> None:
    for kernels in ("unfused", "fused", None):
        call = pmx_call(bits, kernels, **changes)
        result = call.run()
        call.check_stored(QuantizedTally())
        call.check_result(result)
        expected = [*(["append"] if bits else []), "attend", "combine"]
        assert [name for name, _ in launches] == ([] if kernels == "unfused" else expected)
        launches.clear()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": 0}, "cache_layout 0 with num_layer 1"),
        ({"layers": 2}, "cache_layout 1 with num_layer 2"),
        ({"S": 9}, "9 new tokens"),
    ],
)
def test_a_call_it_does_not_take(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    for word, variable in (("fused", "unfused"), (None, "fused")):
        monkeypatch.setenv("KVANT_KERNELS", variable)
        call = pmx_call(8, word, **options)
        before = mx.array(call.mx_cache)
        with pytest.raises(ValueError, match=f"does not take {said}"):
            call.run()
        assert mx.array_equal(call.mx_cache, before).item()
    monkeypatch.delenv("KVANT_KERNELS")
    call = pmx_call(8, None, **options)
    call.check_result(call.run())
    assert not launches


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "split"), [(8, True), (8, False), (4, True), (0, True)])
def test_generation_is_the_same_either_way(
    pocket: tuple[Decoder, Any], heldout_ids: list[int], launches: list[Any], bits: int, split: bool
) -> None:
    """A prompt whose last chunk has three tokens, then single ones. It is longer than an exact tail."""
    model, _ = pocket
    prompt, options = heldout_ids[:197], {"kv_bits": bits, "bias_split": split}

    def generated(kernels: str | None) -> list[int]:
        cache = model.make_cache(300, **options, kernels=kernels)
        return [token for token, _ in Run(model, prompt, cache, prefill_step_size=97, max_tokens=6)]

    unfused = generated("unfused")
    assert not launches
    assert len(set(unfused)) > 2
    assert generated(None) == unfused
    a_layer = {0: 2, 8: 3, 4: 4}[bits]  # 4 bits have an exact tail
    assert len(launches) == a_layer * len(model.layers) * 6  # a chunk and five tokens


def test_the_kernel_is_given_the_cache_itself(launches: list[Any]) -> None:
    """A slice or a view that outlived a step would make MLX copy the whole buffer; small constants are
    made once.
    """
    cache = QuantizedKVCache(64, 2, 64)
    seen = []
    for _ in range(3):
        launches.clear()
        query, key = mx.random.normal((1, 4, 1, 64)), mx.random.normal((1, 2, 1, 64))
        mx.eval(cache.multi_head_cache_attention(query, key, key))
        inputs = dict(zip(launch.INPUTS["attend"], launches[1][1], strict=True))
        assert inputs["cache"] is cache.layer.arrays[0]
        assert inputs["scale"] is cache.layer.arrays[1]
        seen.append([inputs[name] for name in ("mask", "key_bias", "pairs", "rotation", "slopes")])
    for again in seen[1:]:
        assert all(mine is first for mine, first in zip(again, seen[0], strict=True))
