"""kvant's models in the ``llm`` command, through the entry point that is installed."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import llm
import pytest
from click.testing import CliRunner
from llm.cli import cli

from kvant import generate
from kvant.engine.conversation import Conversation
from kvant.engine.sampling import read_model_sampling
from kvant.models import Decoder
from kvant.text.thinking import Marks, Thinking
from kvant.weights.lock import DEFAULT_BRANCH, Lock, write_lock
from kvant.weights.snapshot import measure
from kvant_llm import model as model_module
from kvant_llm import register_models

Pocket = tuple[Decoder, Any]
MODEL = "kvant/pocket"
QUESTION = "Tell me a story about a fox named Pip."
GREEDY = ("-o", "temperature", "0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llm's own."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    return tmp_path


def call(*arguments: str, stdin: str = "", code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(cli, arguments, input=stdin)
    assert done.exit_code == code, done.stderr
    return done.stdout, done.stderr


def logs() -> list[dict[str, Any]]:
    return list(json.loads(call("logs", "--json", "-n", "0")[0]))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    model_module._idle.clear()
    model_module._loaded.clear()


def _answer(pocket: Pocket, messages: list[dict[str, str]], max_tokens: int = 2048) -> tuple[str, int]:
    """The greedy answer, and the tokens of the prompt."""
    model, tokenizer = pocket
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return generate(model, tokenizer, ids, max_tokens=max_tokens), len(ids)


def _pull(folder: Path, repository: str, commit: str, model: Path) -> None:
    snapshot = folder / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    names = [path.name for path in model.iterdir() if path.suffix in (".json", ".safetensors", ".jinja")]
    for name in names:
        shutil.copy(model / name, snapshot)
    write_lock(
        Lock(
            repository, {DEFAULT_BRANCH: commit}, {commit: {name: measure(snapshot, name) for name in names}}
        )
    )


LIST = """
import sys, llm
names = [model.model_id for model in llm.get_models() if model.model_id.startswith("kvant/")]
print(names, sorted({name.partition(".")[0] for name in sys.modules} & {"mlx", "kvant", "transformers"}))
from kvant.weights import pulled
import kvant
print([model.references for model in pulled()], kvant.load.__name__)
print(llm.get_model("kvant/somebody/some-model").prompt("Hello!", temperature=0).text().strip())
"""


def test_pulled_models_are_listed_without_mlx_and_run(
    folder: Path, pocket: Pocket, pocket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    _pull(folder, "somebody/some-model", "a" * 40, pocket_folder)
    text, _ = _answer(pocket, [{"role": "user", "content": "Hello!"}])
    listed = "['kvant/pocket', 'kvant/somebody/some-model'] []\n[('somebody/some-model',)] load"
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{listed}\n{text.strip()}\n", "")


def test_a_record_that_cannot_be_read_hides_no_other_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    (folder / "kvant" / "weights").mkdir(parents=True)
    (folder / "kvant" / "weights" / "a--b.json").write_text("{}")
    assert "kvant: kvant/pocket" in call("models")[0].splitlines()
    (message,) = caplog.messages
    assert message.startswith("kvant: ")
    assert "not a lock that kvant wrote" in message


@pytest.mark.usefixtures("folder")
def test_a_question_a_system_prompt_and_a_conversation(pocket: Pocket) -> None:
    said: list[dict[str, str]] = [{"role": "system", "content": "You are Bo."}]
    expected = []
    for arguments in (("-m", MODEL, "-s", "You are Bo.", "Hello!"), ("-c", "Who is Pip?")):
        said.append({"role": "user", "content": arguments[-1]})
        model_module._idle.clear()  # as in another process
        text, prompt_tokens = _answer(pocket, said)
        assert call(*arguments, *GREEDY)[0] == text.strip() + "\n"
        said.append({"role": "assistant", "content": text})
        expected.append((prompt_tokens, {"finish_reason": "stop"}))
    assert [(entry["input_tokens"], entry["response_json"]) for entry in logs()] == expected


@pytest.mark.usefixtures("folder")
def test_a_chat_feeds_only_what_is_new(pocket: Pocket) -> None:
    questions = ["Hello!", QUESTION, "Thanks!"]
    shown, _ = call(
        "chat", "-m", MODEL, *GREEDY, "-o", "max_tokens", "40", stdin="\n".join([*questions, "exit", ""])
    )
    said: list[dict[str, str]] = []
    held = 0
    for question, entry in zip(questions, logs(), strict=True):
        said.append({"role": "user", "content": question})
        text, prompt_tokens = _answer(pocket, said, 40)
        said.append({"role": "assistant", "content": text})
        assert text.strip() in shown
        assert entry["input_tokens"] == prompt_tokens
        cached = json.loads(entry["token_details"] or '{"cached_tokens": 0}')["cached_tokens"]
        assert cached >= held  # what the last turn held
        held = prompt_tokens + entry["output_tokens"] - 1
    assert held > 100


@pytest.mark.usefixtures("folder")
def test_errors_are_a_line() -> None:
    for option, value, message in (
        ("temperature", "-1", "temperature is -1.0"),
        ("kv_bits", "3", "kv_bits is 3"),
    ):
        shown, errors = call("-m", MODEL, "Hello there, who are you?", "-o", option, value, code=1)
        assert (shown, errors.count("\n")) == ("", 1)
        assert errors.startswith(f"Error: {message}; expected")


@pytest.fixture
def model() -> Any:
    found: list[Any] = []
    register_models(found.append)
    assert found[0].model_id == MODEL
    return found[0]


def test_it_streams_and_draws_by_seed(model: Any) -> None:
    assert len(list(model.prompt(QUESTION, temperature=0, max_tokens=40))) > 20
    options = {"temperature": 1.5, "max_tokens": 40}
    first, second, other = (model.prompt(QUESTION, seed=seed, **options).text() for seed in (1, 1, 2))
    assert first == second != other
    assert "Pip" not in model.prompt(QUESTION, temperature=0, stop="Pip", max_tokens=40).text()


def test_the_authors_own_sampling_is_the_default(model: Any, pocket_folder: Path) -> None:
    of_the_model = read_model_sampling(pocket_folder)
    assert of_the_model["temp"] > 0
    said = {"temperature": of_the_model.pop("temp")} | of_the_model
    texts = [
        model.prompt(QUESTION, seed=3, max_tokens=40, **each).text()
        for each in ({}, said, {"temperature": 3.0})
    ]
    assert texts[0] == texts[1] != texts[2]


def test_two_answers_at_once(model: Any) -> None:
    asked = [{"prompt": question, "temperature": 0, "max_tokens": 50} for question in (QUESTION, "Hello!")]
    alone = [model.prompt(**each).text() for each in asked]
    together = zip_longest(*(model.prompt(**each) for each in asked), fillvalue="")
    assert ["".join(pieces) for pieces in zip(*together, strict=True)] == alone


def test_what_was_cut_or_left_out_is_said(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    response = model.prompt(QUESTION, temperature=0, max_tokens=5)
    assert response.text()
    assert response.response_json == {"finish_reason": "length"}
    assert response.usage().output == 5
    assert caplog.messages.pop() == "kvant: the answer was cut at max_tokens, 5"
    conversation = model.conversation()
    for _ in range(3):
        conversation.prompt(QUESTION, temperature=0, max_kv_size=120, max_tokens=60).text()
    assert "kvant: the context is full; 2 of the oldest messages were left out" in caplog.messages


@pytest.mark.parametrize("others", [[], ["--no-stream"]])
@pytest.mark.usefixtures("folder")
def test_a_note_has_a_line_of_its_own(others: list[str]) -> None:
    """Also in a terminal, which shows both streams."""
    command = [sys.executable, "-m", "llm", "-m", MODEL, QUESTION, *GREEDY, "-o", "max_tokens", "5", *others]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert "kvant: the answer was cut at max_tokens, 5" in lines
    assert len(lines) == 2 + (not others)
    assert sum(bool(line) for line in lines) == 2


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], str]]:
    found: list[tuple[list[Any], str]] = []
    send = Conversation.send
    monkeypatch.setattr(
        Conversation,
        "send",
        lambda self, text, **own: found.append((self.messages, text)) or send(self, text, **own),
    )
    return found


def test_thinking_is_told_from_the_answer(
    model: Any, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here everything up to the first full stop is."""
    monkeypatch.setattr(Conversation, "thinking", lambda self: Thinking(Marks(("<t>",), "."), "<t>"))
    conversation = model.conversation()
    response = conversation.prompt(QUESTION, temperature=0, max_tokens=60)
    thought = "".join(event.chunk for event in response.stream_events() if event.type == "reasoning")
    assert thought
    assert "." not in thought
    assert response.text().strip()
    assert not response.text().startswith(thought)
    conversation.prompt("Thanks!", temperature=0, max_tokens=9).text()
    messages, question = sent[-1]
    assert question == "Thanks!"
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1] == {"role": "assistant", "content": response.text(), "reasoning_content": thought}


def test_a_system_prompt_of_a_later_turn_counts(model: Any, sent: list[Any]) -> None:
    """llm itself leaves it out of the messages."""
    conversation = model.conversation()
    for system in (None, "Be brief.", "Be long."):
        conversation.prompt("Hello!", system=system, temperature=0, max_tokens=9).text()
    systems = [[each["content"] for each in messages if each["role"] == "system"] for messages, _ in sent]
    assert systems == [[], ["Be brief."], ["Be long."]]
    assert [len(messages) for messages, _ in sent] == [0, 3, 5]


def test_what_it_cannot_read_is_refused(model: Any) -> None:
    image = llm.Attachment(type="image/png", content=b"")
    for messages, message in (
        ([llm.user("Hello"), llm.assistant("Yes?")], "the assistant's; expected the user's"),
        ([llm.user("Hello", image)], "AttachmentPart; kvant takes text"),
        ([], "the prompt is empty"),
    ):
        with pytest.raises(llm.ModelError, match=message):
            model.prompt(messages=messages).text()
