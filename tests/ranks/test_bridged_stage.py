"""mlx-lm's models with their layers on several ranks: the tokens and logits of one process, bitwise."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from support.bridged import write_mlx_lm
from support.counts import count
from support.part_runs import every_run
from support.ranks import run_script

from kvant.bridge.architectures import ALLOWED, NEEDS_METAL
from kvant.bridge.folder import load_bridged
from kvant.errors import CheckpointError, ModelError
from kvant.plan import BridgedCheckpoint
from kvant.ranks.bridged_stage import load_bridged_stage
from kvant.ranks.group import Ranks

# Full and sliding layers in turns, states of linear layers, experts; in the other group layers with two
# caches or none.
FEW = count(
    ("gemma3", "qwen3_next"), ("gemma3", "qwen3_next", "nemotron_h", "deepseek_v32", "llama4_text", "gpt_oss")
)

SCRIPT = """
import json
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import kvant
import mlx.core as mx
from kvant.bridge.folder import check_bridged
from kvant.bridge.probe import Unused, leaves_of
from kvant.ranks.bridged_stage import load_bridged_stage
from kvant.ranks.group import connect
from support.part_runs import every_run

SLACK = 2**16  # tables of angles, and the like
ranks = connect("ring")

def disk_bytes():
    counted = Path("/proc/self/io")  # Linux alone
    return int(counted.read_text().split()[1]) if counted.exists() else 0

for folder, layers, bits in json.loads(sys.argv[2]):
    folder = Path(folder)
    own = range(*(part * layers // ranks.size for part in (ranks.rank, ranks.rank + 1)))
    check_bridged(folder, whole=False)  # the class is imported
    mx.clear_cache()
    held, read, done = mx.get_active_memory(), disk_bytes(), []
    part = load_bridged_stage(folder, ranks, own, lambda *layer: done.append(layer))
    assert disk_bytes() - read < part.nbytes + SLACK, (folder.name, disk_bytes() - read, part.nbytes)
    assert done == [(n + 1, len(done)) for n in range(len(done))] and len(done) >= len(own), done
    found, said = every_run(part, bits, pools=False), [part.nbytes, part.nbytes_read]
    if ranks.rank == 0:
        mx.save_safetensors(str(folder / "found.safetensors"), found)
    for width in bits:
        cache = part.make_cache(48, kv_bits=width)
        part.check_cache(cache)
        said.append(cache.nbytes)
        own = [entry for number, entry in enumerate(cache.pool.entries) if number not in part.absent_caches]
        describes = sum(not isinstance(leaf, Unused) for leaf in leaves_of(own))
        lines = [line for line in cache.describe() if " layer" in line.split(":")[0]]
        assert sum(int(line.split()[0]) for line in lines) == describes
    del cache, found
    mx.clear_cache()
    grown = mx.get_active_memory() - held
    assert grown < part.nbytes + SLACK, (folder.name, grown, part.nbytes)
    print(json.dumps(said))
"""


def write(folder: Path, name: str) -> Path:
    """A tiny model's folder."""
    write_mlx_lm(folder, name, 4 if name in ("qwen2", "gemma3") else 0)
    if name == "prism_hadamard_qwen35":  # its signs are signs
        file = str(folder / "model.safetensors")
        tensors: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
        signs = {key: mx.where(x < 0, -1.0, 1.0) for key, x in tensors.items() if key.endswith(".signs")}
        mx.eval(tensors | signs)
        mx.save_safetensors(file, tensors | signs)
    return folder


@pytest.mark.parametrize(("size", "names"), [(3, FEW), *count([], [(2, sorted(ALLOWED - NEEDS_METAL))])])
def test_as_in_one_process(tmp_path: Path, size: int, names: tuple[str, ...]) -> None:
    cases = []
    for number, name in enumerate(names):
        folder = write(tmp_path / name, name)
        try:
            layers = BridgedCheckpoint.from_folder(folder).num_layers
        except ModelError:
            assert names != FEW
            continue
        assert layers >= size
        cases.append((folder, layers, count([(8, 4, 0)[number % 3]], [8, 4, 0])))
    out = run_script(
        size, SCRIPT, str(Path(__file__).parents[1]), json.dumps(cases, default=str), timeout=count(120, 1500)
    )
    for (folder, _, bits), *lines in zip(cases, *(text.splitlines() for text in out), strict=True):
        whole, given = load_bridged(folder), mx.load(str(folder / "found.safetensors"))
        for key, logits in every_run(whole, bits, pools=False).items():
            assert mx.array_equal(given[key], logits, equal_nan=True), (folder.name, key)
        # A state of no layer, such as the last tokens' ids, is on every rank.
        more = 24 * (size - 1) if folder.name == "longcat_flash_ngram" else 0
        caches = [whole.make_cache(48, kv_bits=width).nbytes + more for width in bits]
        held = [sum(numbers) for numbers in zip(*map(json.loads, lines), strict=True)]
        assert held == [whole.nbytes, whole.nbytes_read, *caches], folder.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "llama", "llama")


class Place(Ranks):
    """A rank of a group that is not there."""

    rank, size = 1, 3  # type: ignore[assignment]


@pytest.fixture
def middle() -> Ranks:
    return Place(mx.distributed.init())


def test_what_a_rank_cannot_have(folder: Path, middle: Ranks, tmp_path: Path) -> None:
    for layers in (range(0), range(2), range(1, 4), range(2, 2), range(3, 1), range(1, 9), range(1, 3, 2)):
        with pytest.raises(ModelError, match=r"llama: rank 1 of 3 has the layers from .* of 4 in all"):
            load_bridged_stage(folder, middle, layers)
    with pytest.raises(ModelError, match=r"nanbeige: .*nanbeige cannot be dealt"):
        load_bridged_stage(write(tmp_path / "nanbeige", "nanbeige"), middle, range(1, 2))


def test_what_a_rank_holds(folder: Path, middle: Ranks) -> None:
    part = load_bridged_stage(folder, middle, range(1, 3))
    with pytest.raises(ModelError, match="llama on several machines takes one sequence at a time"):
        part.make_pool(64, sequences=2)
    assert {name.split(".")[2] for name in part.weight_names} == {"1", "2"}
    assert len(part.arrays) == len(part.weight_names)
    assert part.nbytes == part.nbytes_read == sum(array.nbytes for array in part.arrays)
    cache = part.make_cache(64, kv_bits=8)
    held = [layer.nbytes for layer in cache]
    assert held[0] == held[3] == 0 < min(held[1:3])
    window = "2 layers: 64 rows for a window of 8 tokens"
    assert cache.describe() == [f"{window}, 8 bits in groups of 32, keys rotated, 8.70 kB"]
    part.check_cache(load_bridged(folder).make_cache(64))  # of the same model


def test_a_rank_without_memory(folder: Path, middle: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a rank are to fit, not the whole model."""
    room = load_bridged_stage(folder, middle, range(1, 3)).nbytes
    for module in ("models.tensors", "ranks.bridged_stage"):
        monkeypatch.setattr(f"kvant.{module}.physical_memory", lambda: room)
    load_bridged_stage(folder, middle, range(1, 3))
    assert BridgedCheckpoint.from_folder(folder).num_layers == 4  # it can be planned
    with pytest.raises(CheckpointError, match="the tensors have"):
        load_bridged(folder)
    room -= 1
    with pytest.raises(CheckpointError, match=r"layers 1 to 2 have .*; this machine has"):
        load_bridged_stage(folder, middle, range(1, 3))
