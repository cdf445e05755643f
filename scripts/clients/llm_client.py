"""The command llm with a model at kvant serve: text, a schema, a tool, and its log of the conversation."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, STORY, URL, WEATHER, Animal, main

FOLDER = Path(tempfile.mkdtemp(prefix="kvant-llm-"))
COMMAND = [str(Path(sys.executable).parent / "llm")]
(FOLDER / "extra-openai-models.yaml").write_text(
    f"- model_id: fox\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  supports_tools: true\n  "
    f"supports_schema: true\n"
)
(FOLDER / "tool.py").write_text(
    'def weather(city: str) -> str:\n    "Weather of a city."\n    return "sunny"\n'
)


def run(*arguments):
    environment = os.environ | {"LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": "any"}
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def check_text():
    streamed = run("-m", "fox", STORY, "-o", "temperature", "0", "-o", "max_tokens", "40")
    assert "Pip" in streamed
    assert (
        run("-m", "fox", STORY, "-o", "temperature", "0", "-o", "max_tokens", "40", "--no-stream") == streamed
    )


def check_conversation():
    assert run("-c", "And then?", "-o", "max_tokens", "20")
    assert json.loads(run("logs", "--json", "-n", "1"))[0]["prompt"] == "And then?"


def check_schema():
    schema = json.dumps(Animal.model_json_schema() | {"additionalProperties": False})
    assert Animal.model_validate_json(run("-m", "fox", STORY, "--schema", schema, "--no-stream"))


def check_tools_are_offered():
    """The command leaves the choice to the model, which knows no tools: an answer in words is one, too."""
    said = run("-m", "fox", WEATHER, "--functions", str(FOLDER / "tool.py"), "-o", "max_tokens", "100")
    assert said.strip()


main(globals())
