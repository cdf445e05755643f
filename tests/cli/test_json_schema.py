"""``kvant generate --json-schema``: answers of the embedded model, which would never write JSON by itself."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from support.command import call, refusal

from kvant.installation import install_command

SCHEMA = {
    "type": "object",
    "required": ["name", "legs"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
}


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "animal.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


def _check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "flags",
    [
        ["--temp", "0"],
        ["--temp", "1.5"],
        ["--ignore-chat-template"],
        ["--draft", "prompt"],
        ["--deterministic"],
    ],
    ids=" ".join,
)
def test_an_answer_satisfies_the_schema(schema: str, flags: list[str]) -> None:
    done = call("generate", "Name an animal.", "-q", "--json-schema", schema, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    _check(done.stdout)


def test_several_answers_and_a_file_of_prompts(schema: str, tmp_path: Path) -> None:
    done = call("generate", "Hi", "-q", "--json-schema", schema, "--n", "3", "--temp", "1", "--seed", "1")
    answers = [line for line in done.stdout.splitlines() if line]
    assert len({*answers}) == 3
    (tmp_path / "prompts").write_text('{"prompt": "A duck."}\n{"prompt": "A bear.", "temp": 1.0}\n')
    file = str(tmp_path / "prompts")
    done = call("generate", "-q", "--prompts-file", file, "--json", "--json-schema", schema)
    answers += [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert len(answers) == 5
    for answer in answers:
        _check(answer)


def test_a_format_that_no_grammar_enforces_is_named(tmp_path: Path) -> None:
    (tmp_path / "path.json").write_text('{"type": "string", "format": "path", "maxLength": 4}')
    done = call("generate", "Hi", "--json-schema", str(tmp_path / "path.json"))
    assert done.returncode == 0
    assert "these formats are not enforced: 'path'" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "a JSON list; expected an object"),
        ('{"type": "object", "type": "string"}', "'type' is there twice"),
        ('{"not": {}}', "not"),
        ('{"type": "nonsense"}', "nonsense"),
        (json.dumps({"enum": ["x" * 70_000]}), "expected at most 65536"),
    ],
)
def test_a_schema_that_cannot_be_used(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_text(content)
    error = refusal(2, "generate", "Hi", "--json-schema", str(path))
    assert "--json-schema" in error
    assert words in error


def test_flags_that_it_cannot_be_used_with(schema: str) -> None:
    for flags in (["--ignore-eos"], ["--prefill-response", "{"]):
        error = refusal(2, "generate", "Hi", "--json-schema", schema, *flags)
        assert flags[0] in error
        assert "--json-schema" in error


def test_without_the_library_the_command_that_installs_it_is_named(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = refusal(1, "generate", "Hi", "--json-schema", schema)
    assert error.endswith(
        f"--json-schema needs llguidance, which is not installed; {install_command('serve')}"
    )
