"""``kvant plan``, and generate and chat refusing what does not fit, as their user meets them."""

import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx.utils import tree_flatten
from support.checkpoints import qwen2_config, qwen3_config, qwen3_moe_config, reference_model, save_checkpoint

import kvant
from kvant import weights
from kvant.cache import CacheOptions
from kvant.cli import fitting, main, session
from kvant.cli import plan as command
from kvant.errors import ContextError, ModelError
from kvant.machine import Device, Machine
from kvant.models import Decoder
from kvant.sizes import format_bytes
from kvant.tools.bench.shapes import SHAPES
from kvant.tools.plan import Checkpoint, Settings, plan, split_pairs


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, in this process."""
    saved, sys.argv = sys.argv, ["kvant", *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = saved
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def machine(limit_bytes: int, device: Device = "cpu") -> Machine:
    """One with this little."""
    return Machine(device, 2 * limit_bytes, limit_bytes, "a small machine")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function (bytes): this machine has no more."""

    def make(limit_bytes: int) -> None:
        for module in (command, session):
            monkeypatch.setattr(module, "this_machine", lambda device=None: machine(limit_bytes))

    return make


def ways_of(line: str) -> list[list[str]]:
    """The flags that a verdict or a refusal names."""
    return [way.split() for way in re.findall(r"--.*?(?= or --| would fit)", line)]


def test_the_table(capsys: pytest.CaptureFixture[str], pocket_folder: Path) -> None:
    made = plan(
        Checkpoint.from_folder(pocket_folder),
        max_kv_size=1000,
        settings=Settings(cache=CacheOptions(kv_bits=4)),
        device="cpu",
    )
    flags = ("--max-kv-size", "1000", "--kv-bits", "4", "--device", "cpu", "--memory", "1GB")
    code, out, err = call(capsys, "plan", "pocket", *flags)
    assert (code, err) == (0, "")
    sizes = {"weights": made.weights, "cache": made.cache, "prefill scratch": made.scratch, "total": made.total}
    for name, count in (sizes | {"process": made.process, "limit": 2**30}).items():
        assert re.search(rf"^{name} +{count:,} +[\d.]+ [kMG]B", out, re.MULTILINE), name
    assert "1000 tokens at 4 bits" in out
    assert "\nfits, " in out
    for bits in (32, 8, 4):
        assert re.search(rf"^ +{bits} bits +2048 tokens, the model's own$", out, re.MULTILINE)


def test_the_lines_add_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """If loading takes the most, its line has what it takes beyond the others."""
    config = qwen2_config(vocab_size=80_000, hidden_size=64, intermediate_size=64)
    save_checkpoint(tmp_path, config, reference_model(config))
    _, out, _ = call(capsys, "plan", str(tmp_path), "--device", "cpu", "--memory", "8GB", "--max-kv-size", "1")
    found = re.findall(r"^([a-z ]+?) +([\d,]+) +[\d.]+ ", out, re.M)
    counts = {name.strip(): int(count.replace(",", "")) for name, count in found}
    total, _ = counts.pop("total"), counts.pop("limit")
    assert sum(counts.values()) == total
    assert "loading" in counts


@pytest.mark.parametrize("memory", ["8GB", "2000MB", "24GB"])
def test_a_plan_that_fails_names_flags_that_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, memory: str
) -> None:
    """Each of them, given to the same command, is a plan that fits; if none is named, none does."""
    model = "qwen2.5-0.5b" if memory == "2000MB" else "qwen2.5-7b"
    (tmp_path / "config.json").write_text(json.dumps(_raw(model)))
    run = ["plan", str(tmp_path), "--device", "gpu", "--memory", memory, "--max-kv-size", "32768", "--kv-bits", "0"]
    code, out, _ = call(capsys, *run)
    assert code == 1
    ways = ways_of(next(line for line in out.splitlines() if line.startswith("does not fit: ")))
    assert len(ways) == {"8GB": 0, "2000MB": 2, "24GB": 2}[memory], out
    for way in ways:
        assert call(capsys, *run, *way)[0] == 0, (out, way)
    if not ways:
        assert "no context fits" in out
        assert call(capsys, *run, "--max-kv-size", "1", "--kv-bits", "4")[0] == 1


def test_a_format_that_the_model_cannot_have_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Groups of 32 do not divide heads of 80."""
    config = qwen3_config(head_dim=80)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for memory, expected in (("8GB", 0), ("100MB", 1)):
        code, out, _ = call(capsys, "plan", str(tmp_path), "--kv-bits", "0", "--device", "cpu", "--memory", memory)
        assert code == expected
        assert " 32 bits " in out
        assert " 8 bits " not in out
    assert call(capsys, "plan", str(tmp_path))[0] == 2


def test_experts_that_are_held_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config := qwen3_moe_config(), reference_model(config))
    made = plan(Checkpoint.from_folder(tmp_path), max_kv_size=100, device="cpu")
    flags = ("plan", str(tmp_path), "--max-kv-size", "100", "--device", "cpu", "--memory", "1GB")
    _, out, _ = call(capsys, *flags)
    words = " ".join(out.split())
    assert f"32 bits, untied; a token reads {format_bytes(made.weights_read)}, 2 of 8 experts" in words
    sizes = json.loads(call(capsys, *flags, "--json")[1])["bytes"]
    assert sizes["weights_read"] == made.weights_read < made.weights == sizes["weights"]


def test_json_and_the_exit_code_of_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "plan", "--device", "cpu", "--memory", "150MB", "--json")
    record = json.loads(out)
    assert (code, err, record["fits"]) == (1, "", False)
    assert record["bytes"]["total"] > 150 * 2**20 == record["machine"]["limit_bytes"]
    assert record["max_kv_size"] == 2048
    assert [found["tokens"] for found in record["longest_context"]] == [0, 0, 0]


def test_a_mac_that_is_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_raw("qwen2.5-7b")))
    fits = []
    for memory, bits in product(("8GB", "16 GiB"), ((), ("--weight-bits", "4"))):
        code, out, _ = call(capsys, "plan", str(tmp_path), "--device", "gpu", "--memory", memory, "--json", *bits)
        record = json.loads(out)
        fits.append(code == 0)
        assert record["machine"]["limit_bytes"] == int(memory.split("G")[0]) * 2**30 * 2 // 3
        assert record["bytes"]["process"] == 0
    assert fits == [False, True, False, True]


def _raw(name: str) -> dict[str, Any]:
    return asdict(SHAPES[name]) | {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16"}


def test_a_listed_model_that_was_not_pulled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = SimpleNamespace(
        config=_raw("qwen2.5-0.5b"), files=(SimpleNamespace(name="model.safetensors", bytes=None),)
    )

    def find(name: str) -> Path:
        raise ModelError(f"{name} is not here")

    monkeypatch.setattr(command, "find_model", find)
    monkeypatch.setattr(weights, "known_models", lambda: {"listed": listed})
    code, out, _ = call(capsys, "plan", "listed", "--json", "--device", "cpu", "--memory", "8GB")
    assert code == 0
    assert json.loads(out)["bytes"]["weights"] > 494_000_000 * 4
    code, out, err = call(capsys, "plan", "unlisted")
    assert (code, out) == (1, "")
    assert "unlisted is not here" in err


def test_remote(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raw = qwen2_config()
    del raw["tie_word_embeddings"]
    untied = Checkpoint.from_facts(raw | {"tie_word_embeddings": False}).stored_bytes
    sizes = {"config.json": 500, "a.safetensors": untied - 3000, "b.safetensors": 4000, "tokenizer.json": 10**9}
    asked = []
    monkeypatch.setattr(weights, "remote_facts", lambda text: (asked.append(text), (raw, sizes))[1])
    code, out, _ = call(capsys, "plan", "owner/model@main", "--remote", "--json", "--device", "gpu", "--memory", "8GB")
    assert (code, asked) == (0, ["owner/model@main"])
    assert json.loads(out)["bytes"]["weights"] == Checkpoint.from_facts(raw, untied).loading(on_cpu=False).held


def test_generate_refuses_before_it_loads(capsys: pytest.CaptureFixture[str], small: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "load_folder", lambda *_: pytest.fail("the weights were loaded"))
    checkpoint = Checkpoint.from_folder(Path(kvant.__file__).parent / "pocket")
    limit = plan(checkpoint, max_kv_size=900, device="cpu").total
    small(limit)
    for arguments in (["generate", "Hello", "--max-kv-size", "2048"], ["chat", "--max-kv-size", "2048"]):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (1, "")
        found = re.fullmatch(
            r"kvant: error: 2048 tokens need [\d.]+ MB \(weights 12\.35 MB, cache 2\.36 MB, prefill scratch [\d.]+ MB, "
            rf"the process [\d.]+ MB\); there are {format_bytes(limit)} \(a small machine\); "
            r"--max-kv-size (\d+)( or --kv-bits 4)? would fit\n",
            err,
        )
        assert found, err
    tokens = int(found[1])
    totals = [plan(checkpoint, max_kv_size=n, device="cpu").total for n in (tokens, tokens + 1)]
    assert totals[0] <= limit < totals[1]


def test_nothing_fits() -> None:
    with pytest.raises(ContextError, match="no context fits"):
        fitting.plan_that_fits(Checkpoint.from_facts(_raw("qwen2.5-0.5b")), Settings(), "auto", machine(10**9))


def test_auto_reserves_the_longest_that_fits(
    capsys: pytest.CaptureFixture[str], small: Any, pocket_folder: Path, pocket: tuple[Decoder, Any]
) -> None:
    small(10**10)
    code, _, err = call(capsys, "generate", "Hello", "-m", "2", "--max-kv-size", "auto")
    assert code == 0
    assert "cache: 2048 tokens reserved" in err
    checkpoint = Checkpoint.from_folder(pocket_folder)
    small(plan(checkpoint, max_kv_size=700, device="cpu").total)
    code, _, err = call(capsys, "generate", "Hello", "-m", "2", "--max-kv-size", "auto")
    assert code == 0
    reserved = int(re.findall(r"^cache: (\d+) tokens reserved", err, re.MULTILINE)[0])
    assert reserved >= 700
    pairs = split_pairs(pocket[0])
    most, *totals = (
        plan(checkpoint, max_kv_size=tokens, device="cpu", split_pairs=split).total
        for tokens, split in ((700, None), (reserved, pairs), (reserved + 1, pairs))
    )
    assert totals[0] <= most < totals[1]


def test_memory_is_wired_when_it_is_asked_for_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []
    monkeypatch.setattr(session.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(session, "default_device", lambda: "gpu")
    monkeypatch.setattr(session.mx, "set_wired_limit", wired.append)
    monkeypatch.setattr(session, "this_machine", lambda: machine(10**10))
    for asked in (False, True):
        opened = session.open_session(session.RunOptions(max_kv_size="50", wired=asked, quiet=True))
        assert opened.cache[0].max_seq_len == 50
        assert len(wired) == asked
    planned = plan(Checkpoint.from_folder(Path(kvant.__file__).parent / "pocket"), max_kv_size=50, device="cpu")
    assert wired == [planned.total]


def test_an_adapter_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapters.safetensors").write_bytes(bytes(1000))
    without, with_it = (
        json.loads(call(capsys, "plan", "--json", "--device", "cpu", *flags)[1])["bytes"]["weights"]
        for flags in ([], ["--adapter-path", str(tmp_path)])
    )
    assert with_it == without + 3000


def test_what_is_planned_is_what_generate_reserves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the byte, where no bias decides of tables."""
    config = qwen3_config(vocab_size=1280)
    folder = save_checkpoint(tmp_path / "model", config, reference_model(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(kvant.__file__).parent / "pocket" / name, folder)
    for flags in (["--kv-bits", "4"], ["--max-kv-size", "auto"], ["--max-kv-size", "33", "--kv-group-size", "8"]):
        made = json.loads(call(capsys, "plan", str(folder), "--json", *flags)[1])
        code, _, err = call(capsys, "generate", "Hello", "--model", str(folder), "-m", "1", *flags)
        assert code == 0, err
        line = f"cache: {made['max_kv_size']} tokens reserved, {made['kv_bits']} bits in groups of"
        assert err.startswith(f"{line} {made['kv_group_size']}, {format_bytes(made['bytes']['cache'])}\n")


def test_what_the_weights_split_off_is_planned_again_once_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: Any
) -> None:
    """Large biases in every rotary pair: their tables are many times what was guessed from config.json."""
    config = qwen2_config(vocab_size=1280)
    model = reference_model(config)
    model.load_weights([(k, 1e4 * v) for k, v in tree_flatten(model.parameters()) if k.endswith("k_proj.bias")], False)
    folder = save_checkpoint(tmp_path / "model", config, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(kvant.__file__).parent / "pocket" / name, folder)
    checkpoint, settings = Checkpoint.from_folder(folder), Settings(prefill_step_size=8)
    guessed, known = (
        plan(checkpoint, max_kv_size=1024, settings=settings, device="cpu", split_pairs=pairs)
        for pairs in (None, [config["hidden_size"] // config["num_attention_heads"] // 2] * 2)
    )
    small((guessed.total + known.total) // 2)
    run = ["generate", "Hello", "--model", str(folder), "-m", "1", "--prefill-step-size", "8"]
    code, out, err = call(capsys, *run)
    assert (code, out) == (1, "")
    flag = re.search("; --max-kv-size [0-9]+", err)
    assert f"1024 tokens need {format_bytes(known.total)}" in err
    assert flag is not None
    for flags in (flag[0].split()[1:], ["--max-kv-size", "auto"]):
        code, _, err = call(capsys, *run, *flags)
        assert code == 0, err
        assert err.startswith(f"cache: {flag[0].split()[2]} tokens reserved")


def test_a_config_alone_says_no_less_than_its_files_would(tmp_path: Path) -> None:
    """Without files a head counts as untied, as with a config.json from the hub."""
    raw = _raw("qwen2.5-0.5b")
    del raw["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert Checkpoint.from_folder(tmp_path) == Checkpoint.from_facts(raw)
    assert not Checkpoint.from_folder(tmp_path).tied
    (tmp_path / "model-00001-of-00001.safetensors").touch()
    os.truncate(tmp_path / "model-00001-of-00001.safetensors", 988_097_824)
    (tmp_path / "consolidated.safetensors").touch()  # the same weights in another format, which are not read
    os.truncate(tmp_path / "consolidated.safetensors", 988_097_824)
    assert Checkpoint.from_folder(tmp_path).tied
