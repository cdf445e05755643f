"""Layers of experts: in every way that they are computed and stored, and what of them a token reads.

test_golden.py has transformers' logits, test_formats.py mlx-lm's in every format, test_adapter.py adapters.
"""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.adapters import adapted_reference, adapter_config, save_adapter
from support.checkpoints import (
    qwen3_moe_config,
    reference_model,
    save_checkpoint,
    stored_by_transformers,
    write_reference,
)
from support.counts import count, half
from support.hostile import one_line
from support.numbers import relative_error

from kvant.errors import CheckpointError
from kvant.models import load_decoder
from kvant.models import mlp as mlp_module
from kvant.models.matrix import DenseMatrix, Linear
from kvant.models.mlp import Experts, takes_turns
from kvant.models.quantization import Quantization
from kvant.plan import Checkpoint, plan
from kvant.tools.bench.adapters import MLXLM
from kvant.tools.bench.engines import EngineSpec

TOLERANCE = 1e-4  # of the largest number
IDS = [(7 + 31 * i) % 300 for i in range(160)]
LAYERS = "model.layers"
# and from where on cores share
WAYS = ((takes_turns, 10**9), (lambda rows, experts: False, 10**9), (takes_turns, 1))


@pytest.mark.parametrize(
    ("numbers", "normalized", "form"),
    half([(8, 2), (5, 5), (3, 1), (20, 3)], [True, False], ["dense", "quantized", "adapted"]),
)
def test_every_way_to_compute_them_is_mlx_lms(
    tmp_path: Path, numbers: tuple[int, int], normalized: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few rows, with sorted rows through one product (as on a GPU), and through one expert after the
    other.
    """
    sizes = {"num_experts": numbers[0], "num_experts_per_tok": numbers[1], "norm_topk_prob": normalized}
    config, formats = qwen3_moe_config(**sizes, mlp_only_layers=[]), () if form == "dense" else (8, 32)
    (folder, own), (_, reference) = (write_reference(tmp_path / "model", config, *formats) for _ in range(2))
    adapter = None
    if form == "adapted":
        adapter = save_adapter(tmp_path / "adapter", adapter_config(), own)
        reference = adapted_reference(reference, adapter)
    model = load_decoder(folder, adapter=adapter)
    both = [IDS[i : i + count(40, 150)] for i in (0, 3)]
    for ids in ([[5]], [IDS[:3], IDS[3:6]], [[7] * 64], both):  # of one token other experts have no row
        expected = reference(mx.array(ids))
        for turns, parallel in WAYS:
            monkeypatch.setattr(mlp_module, "takes_turns", turns)
            monkeypatch.setattr(mlp_module, "PARALLEL_ELEMENTS", parallel)
            assert relative_error(model(mx.array(ids)), expected) < TOLERANCE


def test_the_softmax_is_in_float32() -> None:
    """In float16 a sum of 4,096 ones ends at 2,048."""
    router = Linear((DenseMatrix(mx.zeros((4, 4096), mx.float16)),))
    _, shares = Experts(router, router, router, 2, False).route(mx.ones((1, 4), mx.float16))
    assert shares.dtype == mx.float16
    assert shares.tolist() == [[1 / 4096] * 2]


@pytest.fixture(scope="module")
def weights() -> dict[str, mx.array]:
    """A checkpoint of mlx-lm's with experts in the second layer."""
    return dict(tree_flatten(reference_model(qwen3_moe_config()).parameters()))


@pytest.mark.parametrize("way", ["each", "joined"])
def test_every_way_to_store_them_is_the_same(tmp_path: Path, weights: dict[str, mx.array], way: str) -> None:
    config, stored = qwen3_moe_config(), stored_by_transformers(weights, way)
    stacked = load_decoder(save_checkpoint(tmp_path / "stacked", config, weights))
    del config["num_experts"]
    for name in ("num_experts", "num_local_experts"):
        folder = save_checkpoint(tmp_path / name, config | {name: 8}, stored)
        other = load_decoder(folder)
        assert mx.array_equal(stacked(mx.array([IDS])), other(mx.array([IDS])))
        assert other.nbytes == stacked.nbytes == plan(Checkpoint.from_folder(folder), max_kv_size=8).weights


EXPERTS = f"{LAYERS}.1.mlp.experts"
WRONG: list[tuple[str, dict[str, mx.array | None], str]] = [
    *(
        ("each", {f"{EXPERTS}.{n}.up_proj.weight": None}, f"{EXPERTS}.{n}.up_proj.weight is missing")
        for n in (0, 3)
    ),
    (
        "each",
        {f"{EXPERTS}.7.down_proj.weight": mx.ones((128, 127))},
        r"7.down_proj.weight has shape \(128, 127\)",
    ),
    (
        "each",
        {f"{EXPERTS}.7.down_proj.weight": mx.ones((128, 128), mx.int32)},
        "7.down_proj.weight has dtype I32",
    ),
    (
        "each",
        {f"{EXPERTS}.8.up_proj.weight": mx.ones((128, 128))},
        rf"unexpected tensor {EXPERTS}.8.up_proj.weight",
    ),
    (
        "each",
        {f"{EXPERTS}.7.up_proj.scales": mx.ones((128, 4))},
        rf"unexpected tensor {EXPERTS}.7.up_proj.scales",
    ),
    (
        "each",
        {f"{EXPERTS}.gate_up_proj": mx.ones((8, 256, 128))},
        rf"unexpected tensor {EXPERTS}.0.gate_proj.weight",
    ),
    ("joined", {f"{EXPERTS}.down_proj": None}, "mlp.switch_mlp.down_proj.weight is missing"),
    (
        "joined",
        {f"{EXPERTS}.gate_up_proj": mx.ones((8, 128, 128))},
        r"gate_up_proj has shape .* \(8, 256, 128\)",
    ),
    ("joined", {f"{EXPERTS}.down_proj": mx.ones((7, 128, 128))}, r"down_proj has shape \(7, 128, 128\)"),
    (
        "joined",
        {f"{LAYERS}.0.mlp.experts.down_proj": mx.ones((8, 128, 128))},
        "unexpected tensor .*0.mlp.experts",
    ),
]


@pytest.mark.parametrize(("way", "changes", "message"), WRONG)
def test_what_is_missing_or_wrong_is_named(
    tmp_path: Path, weights: dict[str, mx.array], way: str, changes: dict[str, mx.array | None], message: str
) -> None:
    stored = stored_by_transformers(weights, way) | changes
    folder = save_checkpoint(
        tmp_path, qwen3_moe_config(), {name: x for name, x in stored.items() if x is not None}
    )
    with one_line(CheckpointError, message):
        load_decoder(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantized", [(), (4, 64)])
def test_a_token_reads_few_of_them(tmp_path: Path, tied: bool, quantized: tuple[int, ...]) -> None:
    """All are held. Of 2 layers' experts, 2 of 8 are read; of an untied embedding one row."""
    config = qwen3_moe_config(mlp_only_layers=[], tie_word_embeddings=tied)
    model = load_decoder(write_reference(tmp_path, config, *quantized)[0])
    row = 128 // 2 + 2 * 2 * 4 if quantized else 128 * 4
    assert model.nbytes - model.nbytes_read == 2 * 3 * 8 * 128 * row * 6 // 8 + (0 if tied else 300 * row)
    planned = plan(Checkpoint.from_folder(tmp_path), max_kv_size=8, device="cpu")
    assert (planned.weights, planned.weights_read) == (model.nbytes, model.nbytes_read)


def test_the_benchmark_gives_mlx_lm_what_transformers_5_does_not_save(
    tmp_path: Path, weights: dict[str, mx.array]
) -> None:
    """The number of experts, and which layers have them; and what of them a step reads is what it is in
    kvant.
    """
    config = qwen3_moe_config(num_local_experts=8)
    del config["num_experts"], config["decoder_sparse_step"]
    folder = save_checkpoint(tmp_path / "each", config, stored_by_transformers(weights, "each"))
    theirs, ours = MLXLM(EngineSpec("mlx-lm", kv_bits=0), folder, 512), load_decoder(folder)
    heads = 2 * 4 * 32 * 4  # kvant holds the weight of a head's norm once for each head
    assert theirs.weight_bytes == (ours.nbytes - heads, ours.nbytes_read - heads)
    assert relative_error(theirs._model(mx.array([IDS]))[0], ours(mx.array([IDS]))[0]) < TOLERANCE


def test_as_if_converted_the_router_has_its_own_bits() -> None:
    checkpoint = Checkpoint.from_facts(qwen3_moe_config(torch_dtype="bfloat16")).quantized(4, 32)
    assert checkpoint.config.quantization_of(f"{LAYERS}.1.mlp.gate") == Quantization(8, 64)
    assert checkpoint.config.quantization_of(f"{LAYERS}.1.mlp.switch_mlp.up_proj") == Quantization(4, 32)
    narrow = Checkpoint.from_facts(qwen3_moe_config(hidden_size=96, head_dim=32)).quantized(4, 32)
    assert narrow.config.quantization_of(f"{LAYERS}.1.mlp.gate") is None
