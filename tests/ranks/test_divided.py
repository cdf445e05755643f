"""Models divided over a ring on the loopback: rank 0's logits against one process's decoder.

In tensor mode sums are rounded in another order; a pipeline gives the same bits. The processes of a group
load one model after the other: starting them takes longer than all models do.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.adapters import adapter_config, save_adapter
from support.checkpoints import (
    format_of,
    llama_config,
    mistral_config,
    olmo2_config,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    smollm3_config,
    stored_by_transformers,
    write_reference,
)
from support.counts import count
from support.key_transforms import drawn_format
from support.numbers import relative_error
from support.part_runs import every_run
from support.ranks import run_script

from kvant.errors import RanksError
from kvant.models import Decoder, load_decoder
from kvant.ranks.group import connect

TOLERANCE = 1e-5  # of the largest logit, with a float cache
# A value that lies between two of a quantized cache's may be rounded to the other one after a sum in another
# order.
ROUNDED = {0: TOLERANCE, 8: 5e-3, 4: 5e-2}
HALF = 3e-2  # bfloat16 has 8 bits
Change = Callable[[dict[str, mx.array]], dict[str, mx.array]]

SCRIPT = """
import json
import sys
from dataclasses import asdict
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kvant.ranks.group import Ranks, Traffic, connect
from kvant.models import checkpoint
from kvant.ranks.stage import load_stage
from kvant.ranks.tensor import load_tensor
import mlx.core as mx
from support.part_runs import every_run

class Silent(Ranks):
    def all_sum(self, x):
        return super().all_sum(mx.zeros_like(x))

ranks = connect("ring")
of_device = checkpoint._compute_dtype
for case in json.loads(sys.argv[2]):
    folder = Path(case["folder"])
    group = Silent(ranks.group) if case["silent"] and ranks.rank == 1 else ranks
    checkpoint._compute_dtype = (lambda *_: mx.bfloat16) if case["half"] else of_device
    if case["ends"]:
        model = load_stage(folder, group, range(*[0, *case["ends"]][ranks.rank : ranks.rank + 2]))
    else:
        model = load_tensor(folder, group, adapter=folder / "adapter" if case["adapter"] else None)
    found = every_run(model, case["bits"], case["pools"], case["transforms"] is not None and folder / "tuned.json")
    cache = model.make_cache(8, kv_bits=0)
    ranks.traffic = Traffic()
    mx.eval(model.next_logits(mx.array([[3]]), cache))
    said = {**asdict(ranks.traffic), "nbytes": model.nbytes}
    biases = [layer.self_attn.qkv_bias for layer in model.layers]
    said["pairs"] = [bias and bias.pairs for bias in biases]
    said["cache"] = sum(a.nbytes for layer in cache for a in layer.layer.arrays)
    print(json.dumps(said))
    if ranks.rank == 0:
        mx.save_safetensors(str(folder / "found.safetensors"), found)
"""


@dataclass(frozen=True)
class Case:
    """A model, and the runs through it."""

    config: dict[str, Any]
    bits: Sequence[int] = (0,)  # of the caches
    pools: bool = False
    quantize: tuple[Any, ...] | None = None  # as of quantize_reference
    adapter: dict[str, Any] | None = None
    change: Change | None = None  # of the tensors before they are saved
    silent: bool = False  # rank 1 adds nothing to the sums
    half: bool = False  # activations are bfloat16, as they are on a GPU
    transforms: int | None = None  # bits of a cache with every part of a front, too; None: there is none
    ends: Sequence[int] = ()  # in a pipeline the layers up to which each rank goes; else tensor mode

    def asked(self, folder: Path) -> dict[str, Any]:
        names = ("bits", "pools", "adapter", "silent", "half", "transforms", "ends")
        return {"folder": str(folder)} | {name: getattr(self, name) for name in names}


def _large_bias(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """A constant in one pair of the second key head: only the rank that has it sees that it outweighs the
    keys.
    """
    for name, x in weights.items():
        if name.endswith("k_proj.bias"):
            bias = x.reshape(2, -1)
            bias[-1, 3] = 200.0
            weights[name] = bias.flatten()
    return weights


WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2}
UNTIED = {"tie_word_embeddings": False}
# Qwen2's smallest has 14 query heads and 2 kv heads, of 64 elements
UNEVEN = {
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 320,
    **UNTIED,
}
SPLIT = Case(qwen2_config(**WIDE), (0, 8, 4), pools=True, change=_large_bias)
SILENT = Case(qwen2_config(**WIDE), silent=True)
MOE = qwen3_moe_config()
OLMO2 = Case(olmo2_config(num_key_value_heads=2), pools=True)
# The last two layers have a window, which rank 0 has none of.
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
LAYERS = Case(qwen2_config(num_hidden_layers=4, **WINDOWS), (0, 8, 4), pools=True)
UNEVEN_CASE = Case(llama_config(**UNEVEN), quantize=(4, 32, "affine"))
DORA = Case(llama_config(), adapter=adapter_config(kind="dora"))
# v and down finer than the rest, o in floating point
MIXED = dict.fromkeys(("v_proj", "down_proj"), format_of(8, 64)) | {"o_proj": False}
LORA_MOE = Case(MOE, adapter=adapter_config())

CASES: dict[int, dict[str, Case]] = {
    2: {
        "qwen2": SPLIT,
        "llama": Case(llama_config(**UNTIED), pools=True),
        "silent": SILENT,
        "qwen3": Case(qwen3_config(vocab_size=301, **UNTIED), transforms=0),
        "mistral, window": Case(mistral_config(sliding_window=8), (0, 8), pools=True),
        "smollm3": Case(smollm3_config(num_key_value_heads=1), transforms=48),
        "olmo2": OLMO2,
        "olmo2, bfloat16": Case(olmo2_config(), half=True),
        "moe": Case(MOE, change=lambda weights: stored_by_transformers(weights, "each")),
        "moe, 4 bits": Case(MOE, quantize=(4, 32, "affine")),
        "3 bits": Case(llama_config(), quantize=(3, 32, "affine")),
        "mxfp4": Case(llama_config(**UNTIED), quantize=(4, 32, "mxfp4")),
        "mixed": Case(llama_config(), quantize=(3, 32, "affine", MIXED)),
        "lora": Case(qwen3_config(**WIDE), adapter=adapter_config()),
        "lora, 4 bits": Case(llama_config(), quantize=(4, 64, "affine"), adapter=adapter_config()),
        "dora": DORA,
        "lora, moe": LORA_MOE,
        "pipeline": replace(LAYERS, ends=[1, 4], transforms=48),
        "pipeline, moe": Case(
            qwen3_moe_config(num_hidden_layers=3, **UNTIED), (0, 8), pools=True, ends=[2, 3]
        ),
    },
    3: {"uneven": UNEVEN_CASE, "dora": DORA, "pipeline": replace(LAYERS, ends=[2, 3, 4])},
}
if count(False, True):
    CASES[2] |= {
        "moe, joined": Case(MOE, change=lambda weights: stored_by_transformers(weights, "joined")),
        "nvfp4": Case(qwen2_config(**WIDE), quantize=(4, 16, "nvfp4")),
    }
    CASES[2] |= {
        f"{kind}, {bits} bits": Case(config, (0, 8, 4), pools=True, quantize=(bits, group, "affine"))
        for kind, config in (("qwen2", qwen2_config(**WIDE)), ("olmo2", olmo2_config()), ("moe", MOE))
        for bits, group in ((2, 32), (4, 64), (5, 32), (6, 64), (8, 32))
    }
    CASES[3] |= {"qwen2": SPLIT, "moe": Case(MOE), "lora, moe": LORA_MOE, "silent": SILENT, "olmo2": OLMO2}
    CASES[4] = {
        "qwen2": SPLIT,
        "moe": Case(MOE, (0, 8)),
        "olmo2": OLMO2,
        "uneven": replace(UNEVEN_CASE, quantize=None),
    }
EVERY = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


@dataclass
class Run:
    """What the ranks said of a case, by rank, and where it is."""

    folder: Path
    said: list[dict[str, Any]] = field(default_factory=list)

    def alone(self) -> Decoder:
        adapter = self.folder / "adapter"
        return load_decoder(self.folder, adapter=adapter if adapter.exists() else None)


def _make(folder: Path, case: Case) -> Run:
    """The model's folder."""
    _, reference = write_reference(folder, case.config, *(case.quantize or ()))
    if case.change is not None:
        weights = case.change(dict(tree_flatten(reference.parameters())))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    if case.adapter is not None:
        save_adapter(folder / "adapter", case.adapter, reference)
    run = Run(folder)
    if case.transforms is not None:
        drawn_format(run.alone(), case.transforms).write(folder / "tuned.json")
    return run


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], Run]:
    """Every case that a selected test asks for, on its ranks: a group for each number of them."""
    calls = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and "[" in item.name
    ]
    selected = {(call["ranks"], call["name"]) for call in calls}
    found = {}
    for ranks in CASES:
        cases = {name: case for name, case in CASES[ranks].items() if (ranks, name) in selected}
        if not cases:
            continue
        root = tmp_path_factory.mktemp(f"ranks-{ranks}")
        made = [_make(root / str(number), case) for number, case in enumerate(cases.values())]
        asked = [case.asked(run.folder) for case, run in zip(cases.values(), made, strict=True)]
        outputs = run_script(ranks, SCRIPT, str(Path(__file__).parents[1]), json.dumps(asked))
        for name, run, *said in zip(cases, made, *(out.splitlines() for out in outputs), strict=True):
            run.said = [json.loads(line) for line in said]
            found[ranks, name] = run
    return found


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_logits(
    runs: dict[tuple[int, str], Run], ranks: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through caches and pools of every width, against the same run in one process."""
    run, case = runs[ranks, name], CASES[ranks][name]
    given = mx.load(str(run.folder / "found.safetensors"))
    if case.half:
        monkeypatch.setattr("kvant.models.checkpoint._compute_dtype", lambda *_: mx.bfloat16)
    model = run.alone()
    expected = every_run(
        model, case.bits, case.pools, case.transforms is not None and run.folder / "tuned.json"
    )
    assert given.keys() == expected.keys()
    for key, logits in expected.items():
        error = relative_error(given[key], logits)
        if case.silent:  # what the comparison is worth
            assert error > 0.1
        else:
            bits = 0 if key in ("whole", "states") else int(key.split()[1])
            bits = 4 if key.endswith("tuned") and case.transforms else bits
            if case.ends:
                assert mx.array_equal(given[key], logits), key
            assert error < (HALF if case.half else ROUNDED[bits]), key
            assert given[key].dtype == logits.dtype == model.dtype


@pytest.mark.parametrize(("ranks", "name"), EVERY)
def test_what_a_token_sends(runs: dict[tuple[int, str], Run], ranks: int, name: str) -> None:
    """Two sums of the stream a layer; OLMo 2's two sums of squares together; the logits of a head stored
    by itself.
    """
    run, case = runs[ranks, name], CASES[ranks][name]
    config, item = case.config, 2 if case.half else 4
    layers, is_olmo2 = config["num_hidden_layers"], config["model_type"] == "olmo2"
    widest = 0 if config["tie_word_embeddings"] else -(-config["vocab_size"] // ranks)
    sums = layers * (3 if is_olmo2 else 2) + (widest > 0)
    nbytes = item * (layers * 2 * config["hidden_size"] + ranks * widest) + layers * is_olmo2 * 2 * 4
    counts = {"sums": sums, "messages": 0, "bytes": nbytes}
    if case.ends:  # the stream goes to the next rank, and back to the first
        counts = {"sums": 0, "messages": 2, "bytes": 2 * item * config["hidden_size"]}
        assert sum(said["nbytes"] for said in run.said) == run.alone().nbytes
    for said in run.said[: 1 if case.silent else None]:  # the silent rank's sums are counted elsewhere
        assert said.items() >= counts.items()


@pytest.mark.parametrize(("ranks", "name", "heads"), [(2, "qwen2", 2), (2, "smollm3", 1), (3, "uneven", 2)])
def test_a_ranks_cache(runs: dict[tuple[int, str], Run], ranks: int, name: str, heads: int) -> None:
    """It is a part of one process's until ranks are more than kv heads."""
    run = runs[ranks, name]
    whole = sum(a.nbytes for layer in run.alone().make_cache(8, kv_bits=0) for a in layer.layer.arrays)
    assert [said["cache"] for said in run.said] == [whole // min(ranks, heads)] * ranks


@pytest.mark.parametrize(("ranks", "name"), [(2, "qwen2")])
def test_a_ranks_cache_leaves_the_same_biases_out(
    runs: dict[tuple[int, str], Run], ranks: int, name: str
) -> None:
    """The last rank's keys alone say which."""
    run = runs[ranks, name]
    alone = [list(layer.self_attn.qkv_bias.pairs) for layer in run.alone().layers]  # type: ignore[union-attr]
    assert alone == [[3]] * 2
    assert [said["pairs"] for said in run.said] == [alone] * 2


def test_no_ring() -> None:
    with pytest.raises(RanksError, match="back end 'ring' does not start"):
        connect("ring")
