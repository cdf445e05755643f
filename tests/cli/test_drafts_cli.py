"""--draft: the same text, its statistics, and where it is refused."""

import json
import re
from pathlib import Path

import pytest
from support.command import QUESTION, call
from support.drafts import draft_by_chance

from kvant.cache.pool import Pool
from kvant.engine.drafting.choice import StepCosts


@pytest.fixture
def paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft seems to pay."""
    monkeypatch.setattr(StepCosts, "is_known", True)
    monkeypatch.setattr(StepCosts, "get", lambda costs, num_tokens: 1.0)


TWICE = "Say it twice: a red ball, a red ball, a red ball, a red ball."
STORY = [TWICE, "--temp", "0.5", "--seed", "3", "-m", "40"]


@pytest.mark.usefixtures("paying")
def test_generate() -> None:
    plain, drafted = call("generate", *STORY), call("generate", *STORY, "--draft", "prompt")
    assert drafted.returncode == 0
    assert drafted.stdout == plain.stdout
    assert re.search(r"^latency: \d+\.\d\d ms a token, \d\.\d\d tokens a step$", drafted.stderr, re.MULTILINE)
    assert re.search(r"^drafts( off)?: .*\d+ of \d+ (tokens|were) accepted, \d+ %$", drafted.stderr, re.MULTILINE)
    assert "median" not in drafted.stderr
    assert "draft" not in plain.stderr
    assert "median" in plain.stderr


@pytest.mark.usefixtures("paying")
def test_json_says_which_tokens_were_drafted() -> None:
    lines = [json.loads(line) for line in call("generate", *STORY, "--json", "--draft", "prompt").stdout.splitlines()]
    assert {line["from_draft"] for line in lines} == {False, True}
    assert "from_draft" not in json.loads(call("generate", *STORY, "--json").stdout.splitlines()[0])


@pytest.mark.usefixtures("paying")
def test_chat() -> None:
    said = f"{QUESTION}\n{QUESTION}\n"
    plain, drafted = (
        call("chat", "--temp", "0", "-m", "30", "--draft", draft, stdin=said) for draft in ("none", "prompt")
    )
    assert drafted.returncode == 0
    assert drafted.stdout == plain.stdout


def test_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_by_chance(monkeypatch, 1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TWICE, QUESTION)))
    for flags in (["--prompts-file", str(prompts), *STORY[1:]], [*STORY, "--n", "2"]):
        plain, drafted = (call("generate", *flags, "--kv-bits", "0", *more) for more in ([], ["--draft", "prompt"]))
        assert (drafted.returncode, drafted.stdout) == (0, plain.stdout)
        assert re.search(r"drafts( off)?: .*\d+ of \d+ (tokens|were) accepted", drafted.stderr)
        # Drafts are counted for all answers: once, behind what else is said of all.
        (counted,) = re.findall(r"^(.*)\n\d\.\d\d tokens a step", drafted.stderr, re.MULTILINE)
        assert re.match("together|generated", counted)
        assert "draft" not in plain.stderr


def test_refused_before_anything_is_said_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bridged model's pool refuses them."""
    monkeypatch.setattr(Pool, "takes_back", False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TWICE}))
    for flags in (["--prompts-file", str(prompts), *STORY[1:]], [*STORY, "--n", "2"]):
        done = call("generate", *flags, "--draft", "prompt")
        assert (done.returncode, done.stdout) == (2, "")
        assert "--draft is 'prompt'; side by side" in done.stderr
        assert "generated" not in done.stderr


def test_a_default_counts_for_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text('draft = "prompt"\n')
    monkeypatch.setenv("KVANT_CONFIG", str(path))
    assert "tokens a step" in call("generate", QUESTION, "-m", "3").stderr
    done = call("generate", QUESTION, "-m", "3", "--deterministic")
    assert done.returncode == 0
    assert "draft" not in done.stderr
