"""--draft and --draft-model: the same text, its statistics, and the memory that was planned."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
import pytest
from support.command import QUESTION, call, refusal
from support.drafts import draft_by_chance, save_draft_model
from support.kinds import load_kind
from support.runs import Run

from kvant.cache import CacheOptions
from kvant.cache.pool import Pool
from kvant.cli.options import RunOptions
from kvant.cli.session import open_session
from kvant.engine.model_drafts import ModelDrafts, PooledDrafts
from kvant.plan import DraftModel, Settings, plan, read_folder, split_pairs

TWICE = "Say it twice: a red ball, a red ball, a red ball, a red ball."
STORY = [TWICE, "--temp", "0.5", "--seed", "3", "-m", "40"]


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_by_chance(monkeypatch, 1)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TWICE, QUESTION)))
    return str(path)


@pytest.fixture(scope="module")
def small(pocket_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with pocket's tokenizer, a shorter context and heads that groups of 32 do not divide."""
    size = json.loads((pocket_folder / "config.json").read_text())["vocab_size"]
    changes = {
        "vocab_size": size,
        "max_position_embeddings": 200,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return str(save_draft_model(tmp_path_factory.mktemp("draft") / "small", pocket_folder, **changes))


@pytest.mark.usefixtures("paying")
def test_from_the_prompt() -> None:
    plain, drafted = call("generate", *STORY), call("generate", *STORY, "--draft", "prompt")
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    assert re.search(r"^latency: \d+\.\d\d ms a token, \d\.\d\d tokens a step$", drafted.stderr, re.MULTILINE)
    assert re.search(
        r"^drafts( off)?: .*\d+ of \d+ (tokens|were) accepted, \d+ %$", drafted.stderr, re.MULTILINE
    )
    assert "median" not in drafted.stderr
    assert "draft" not in plain.stderr
    assert "median" in plain.stderr
    lines = [
        json.loads(line)
        for line in call("generate", *STORY, "--json", "--draft", "prompt").stdout.splitlines()
    ]
    assert {line["from_draft"] for line in lines} == {False, True}
    assert "from_draft" not in json.loads(call("generate", *STORY, "--json").stdout.splitlines()[0])
    chat = ["chat", "--temp", "0", "-m", "30", "--draft"]
    plain, drafted = (call(*chat, draft, stdin=f"{QUESTION}\n{QUESTION}\n") for draft in ("none", "prompt"))
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)


@pytest.mark.usefixtures("paying")
def test_from_the_models_own_head(tmp_path: Path, pocket_folder: Path, prompts: str) -> None:
    """The text is that without it; what is loaded and reserved counts in the plan. Without a head it is
    refused.
    """
    plain, drafted = call("generate", *STORY), call("generate", *STORY, "--draft", "mtp")
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    assert re.search(r"^drafts: \d+ of \d+ tokens accepted, \d+ %$", drafted.stderr, re.MULTILINE)
    together = ["generate", "--prompts-file", prompts, *STORY[1:], "--kv-bits", "0"]
    plain, drafted = call(*together), call(*together, "--draft", "mtp", "--num-draft-tokens", "2")
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    made = [json.loads(call("plan", "pocket", "--json", *flags).stdout) for flags in ([], ["--draft", "mtp"])]
    assert made[1]["bytes"]["cache"] * 4 == made[0]["bytes"]["cache"] * 5
    assert made[1]["bytes"]["weights"] > made[0]["bytes"]["weights"]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copyfile(pocket_folder / name, tmp_path / name)
    for command in (["generate", QUESTION], ["plan"]):
        error = refusal(2, *command, "--model", str(tmp_path), "--draft", "mtp")
        assert "--draft is 'mtp'; " in error
        assert "tensor model.mtp_layers.0.input_proj.weight is missing" in error
    assert "--draft is mtp; several ranks" in refusal(2, "plan", "pocket", "--draft", "mtp", "--ranks", "2")
    assert "--draft is mtp" in refusal(2, "plan", "pocket", "--draft", "mtp", "--remote")


def test_from_a_model(small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("-m", "24", "--seed", "5")
    plain = call("generate", *options, QUESTION)
    drafted = call("generate", "--draft-model", small, "--num-draft-tokens", "2", *options, QUESTION)
    assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
    assert f"draft model: {small}, 200 tokens reserved, " in drafted.stderr
    assert "tokens a step" in drafted.stderr
    (tmp_path / "config.toml").write_text('draft-model = "pocket"\nnum-draft-tokens = 7\n')
    monkeypatch.setenv("KVANT_CONFIG", str(tmp_path / "config.toml"))
    said = call("chat", *options, stdin=QUESTION)
    assert (said.returncode, said.stdout) == (0, plain.stdout)


@pytest.mark.usefixtures("paying")
def test_side_by_side(prompts: str, small: str) -> None:
    """Drafts are counted for all answers: once, behind what else is said of all."""
    for flags in (["--prompts-file", prompts, *STORY[1:]], [*STORY, "--n", "2"]):
        plain, drafted, by_model = (
            call("generate", *flags, "--kv-bits", "0", *more)
            for more in ([], ["--draft", "prompt"], ["--draft-model", small])
        )
        assert (drafted.returncode, drafted.stdout, by_model.stdout) == (0, plain.stdout, plain.stdout)
        assert re.search(r"drafts( off)?: .*\d+ of \d+ (tokens|were) accepted", drafted.stderr)
        (counted,) = re.findall(r"^(.*)\n\d\.\d\d tokens a step", drafted.stderr, re.MULTILINE)
        assert re.match("together|generated", counted)
        assert "draft" not in plain.stderr
        assert f"draft model: {small}, 256 tokens reserved, " in by_model.stderr


def test_refused_before_anything_is_said_of_answers(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bridged model's pool refuses them."""
    monkeypatch.setattr(Pool, "takes_back", False)
    for flags in (["--prompts-file", prompts, *STORY[1:]], [*STORY, "--n", "2"]):
        assert "--draft is 'prompt'; drafts for several sequences" in refusal(
            2, "generate", *flags, "--draft", "prompt"
        )


def test_another_tokenizer_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    load_kind("qwen2", tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    error = refusal(1, "generate", "--draft-model", str(tmp_path / "other"), "Hi")
    assert "the draft model's tokenizer differs: token 0 is '<unk>' there and " in error


@pytest.mark.parametrize(
    ("default", "flags"),
    [
        ('draft = "prompt"', ["--deterministic"]),
        ('draft-model = "pocket"', ["--deterministic"]),
        ('draft-model = "pocket"', ["--draft", "none"]),
    ],
)
def test_a_default_counts_for_nothing_beside(
    default: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text(default)
    monkeypatch.setenv("KVANT_CONFIG", str(tmp_path / "config.toml"))
    assert "tokens a step" in call("generate", QUESTION, "-m", "3").stderr
    done = call("generate", QUESTION, "-m", "3", *flags)
    assert done.returncode == 0
    assert "draft" not in done.stderr


@pytest.mark.usefixtures("paying")
def test_what_is_planned_is_reserved(small: str) -> None:
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    session = open_session(RunOptions(draft_model=small, kv_bits=4, quiet=True))
    made, drafts = session.plan(), session.drafts
    assert session.draft_model is not None
    assert isinstance(drafts, PooledDrafts)
    assert (made.draft_weights, made.draft_cache) == (session.draft_model.nbytes, drafts.pool.nbytes)
    assert {(own.kv_bits, own.kv_group_size) for own in drafts.pool.formats} == {(4, 16)}
    ids = [n % 900 + 30 for n in range(190)]
    list(Run(session.model, ids, session.cache, drafts=drafts, max_tokens=12))
    assert mx.get_peak_memory() - base <= made.arrays
    assert drafts.pool.nbytes == made.draft_cache


def test_the_plan(small: str, pocket_folder: Path) -> None:
    model, draft = read_folder(pocket_folder), read_folder(Path(small))
    settings = Settings(draft_model=DraftModel(draft))
    alone = plan(model, max_kv_size=512, device="cpu")
    made = plan(model, max_kv_size=512, settings=settings, device="cpu")
    own = plan(draft, max_kv_size=200, settings=Settings(cache=CacheOptions(kv_group_size=16)), device="cpu")
    assert (made.draft_weights, made.draft_cache) == (own.weights, own.cache)
    assert made.arrays >= alone.arrays + own.weights + own.cache
    loaded = kvant.load(small)[0]
    beside = kvant.load("pocket")[0].make_pool(4 * 512, sequences=4, max_seq_len=512)
    reserved = ModelDrafts(model=loaded).for_pool(beside).pool.nbytes
    guessed, known = (
        plan(model, max_kv_size=512, settings=replace(settings, sequences=4, draft_model=each), device="cpu")
        for each in (DraftModel(draft), DraftModel(draft, tuple(split_pairs(loaded))))
    )
    assert 0.95 * guessed.draft_cache < reserved == known.draft_cache <= guessed.draft_cache
    run = ["plan", "--draft-model", small, "--max-kv-size", "512", "--device", "cpu"]
    said = json.loads(call(*run, "--json").stdout)
    assert said["draft_model"] == small
    expected = {"draft_weights": own.weights, "draft_cache": own.cache, "arrays": made.arrays}
    assert said["bytes"] | expected == said["bytes"]
    rows = {line.split("  ")[0]: line for line in call(*run, "--memory", "250MB").stdout.splitlines()}
    assert f"{own.weights:,}" in rows["draft weights"]
    assert f"{own.cache:,}" in rows["draft cache"]
