"""``--draft-model`` of generate, chat and plan: the same text, the memory that was planned, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.command import QUESTION, call
from support.drafts import save_draft_model
from support.kinds import load_kind

from kvant.cache import CacheOptions
from kvant.cli.options import RunOptions
from kvant.cli.session import open_session
from kvant.engine.drafted_run import DraftedRun
from kvant.engine.model_drafts import ModelDrafts
from kvant.tools.plan import DraftModel, Settings, plan, read_folder, split_pairs


@pytest.fixture(scope="module")
def small(pocket_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with pocket's tokenizer, a shorter context and heads that groups of 32 do not divide."""
    size = json.loads((pocket_folder / "config.json").read_text())["vocab_size"]
    changes = {"vocab_size": size, "max_position_embeddings": 200, "num_attention_heads": 4, "num_key_value_heads": 2}
    return str(save_draft_model(tmp_path_factory.mktemp("draft") / "small", pocket_folder, **changes))


def test_generate_and_chat(small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("-m", "24", "--seed", "5")
    plain = call("generate", *options, QUESTION)
    drafted = call("generate", "--draft-model", small, "--num-draft-tokens", "2", *options, QUESTION)
    assert drafted.returncode == 0
    assert drafted.stdout == plain.stdout
    assert f"draft model: {small}, 200 tokens reserved, " in drafted.stderr
    assert "tokens a step" in drafted.stderr
    settings = tmp_path / "config.toml"
    settings.write_text('draft-model = "pocket"\nnum-draft-tokens = 7\n')
    monkeypatch.setenv("KVANT_CONFIG", str(settings))
    said = call("chat", "-m", "24", "--seed", "5", stdin=QUESTION)
    assert said.returncode == 0
    assert said.stdout == plain.stdout
    for other in (("--draft", "prompt"), ("--draft", "none"), ("--deterministic",)):
        done = call("generate", *other, "-m", "2", "Hi")  # the file's is not meant beside it
        assert done.returncode == 0
        assert "draft model" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--draft-model", "pocket", "--num-draft-tokens", "0"), 2, "--num-draft-tokens is 0; expected 1 to 7"),
        (("--draft-model", "pocket", "--num-draft-tokens", "8"), 2, "--num-draft-tokens is 8; expected 1 to 7"),
        (("--num-draft-tokens", "3"), 2, "--num-draft-tokens is 3, which has no effect without --draft-model"),
        (
            ("--draft-model", "pocket", "--draft", "prompt"),
            2,
            "--draft is prompt, and --draft-model drafts: expected one",
        ),
        (
            ("--draft-model", "pocket", "--deterministic"),
            2,
            "--draft-model is pocket; beside --deterministic it is not supported",
        ),
        (("--draft-model", "./nowhere"), 1, "model './nowhere' is not a folder"),
    ],
)
def test_refused(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = call("generate", *arguments, "-m", "2", "Hi")
    assert done.returncode == code
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert not done.stdout


def test_another_tokenizer(tmp_path: Path) -> None:
    """Refused before a weight is read."""
    load_kind("qwen2", tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    done = call("generate", "--draft-model", str(tmp_path / "other"), "Hi")
    assert done.returncode == 1
    assert "the draft model's tokenizer differs: token 0 is '<unk>' there and " in done.stderr


def test_side_by_side(small: str, tmp_path: Path) -> None:
    """Several answers to a prompt, and the prompts of a file: the same texts, and a line of the second pool."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Once upon a time"}\n')
    for what in (("--n", "2", QUESTION), ("--prompts-file", str(tmp_path / "prompts.jsonl"))):
        plain = call("generate", "-m", "20", "--seed", "5", "--kv-bits", "0", *what)
        drafted = call("generate", "-m", "20", "--seed", "5", "--kv-bits", "0", "--draft-model", small, *what)
        assert drafted.returncode == plain.returncode == 0
        assert drafted.stdout == plain.stdout
        assert f"draft model: {small}, 256 tokens reserved, " in drafted.stderr
        assert "draft" in drafted.stderr.split("reserved")[-1]  # what they did


def test_what_is_planned_is_reserved(small: str) -> None:
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    session = open_session(RunOptions(draft_model=small, kv_bits=4, quiet=True))
    made = session.plan(None)
    drafts = session.drafts
    assert session.draft_model is not None
    assert isinstance(drafts, ModelDrafts)
    assert drafts.cache is not None
    assert made.draft_weights == session.draft_model.nbytes
    assert made.draft_cache == drafts.cache.nbytes
    assert {layer.kv_bits for layer in drafts.cache.layers} == {4}  # type: ignore[attr-defined]
    assert drafts.cache.groups == [16]
    ids = [n % 900 + 30 for n in range(190)]
    list(DraftedRun(session.model, ids, session.cache, drafts=drafts, max_tokens=12))
    assert mx.get_peak_memory() - base <= made.arrays
    assert drafts.cache.nbytes == made.draft_cache


def test_the_plan(small: str, pocket_folder: Path) -> None:
    settings = Settings(draft_model=DraftModel(read_folder(Path(small))))
    alone = plan(read_folder(pocket_folder), max_kv_size=512, device="cpu")
    made = plan(read_folder(pocket_folder), max_kv_size=512, settings=settings, device="cpu")
    own = plan(
        read_folder(Path(small)), max_kv_size=200, settings=Settings(cache=CacheOptions(kv_group_size=16)), device="cpu"
    )
    assert (made.draft_weights, made.draft_cache) == (own.weights, own.cache)
    assert made.arrays >= alone.arrays + own.weights + own.cache
    pool = plan(read_folder(pocket_folder), max_kv_size=512, settings=replace(settings, sequences=4), device="cpu")
    loaded = kvant.load(small)[0]
    beside = kvant.load("pocket")[0].make_pool(4 * 512, sequences=4, max_seq_len=512)
    reserved = ModelDrafts(model=loaded, vocab_size=1280).beside_pool(beside).pool.nbytes
    assert 0.95 * pool.draft_cache < reserved <= pool.draft_cache  # a part of the biases is a guess before it is loaded
    known = DraftModel(read_folder(Path(small)), tuple(split_pairs(loaded)))
    settings = Settings(draft_model=known, sequences=4)
    pool = plan(read_folder(pocket_folder), max_kv_size=512, settings=settings, device="cpu")
    assert pool.draft_cache == reserved
    said = json.loads(call("plan", "--draft-model", small, "--max-kv-size", "512", "--device", "cpu", "--json").stdout)
    assert said["draft_model"] == small
    assert (
        said["bytes"] | {"draft_weights": own.weights, "draft_cache": own.cache, "arrays": made.arrays} == said["bytes"]
    )
    shown = call("plan", "--draft-model", small, "--max-kv-size", "512", "--memory", "250MB", "--device", "cpu").stdout
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert f"{own.weights:,}" in rows["draft weights"]
    assert f"{own.cache:,}" in rows["draft cache"]
    refused = call("plan", "--draft-model", small, "--ranks", "2")
    assert refused.returncode == 2
    assert "several ranks draft from prompt and answer alone" in " ".join(refused.stderr.replace("│", " ").split())
