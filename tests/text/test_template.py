"""Chat templates, which anybody may have written: bounded, and otherwise what transformers makes of them."""

import copy
import gc
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.processor_time import at_most
from support.tokenizers_made import write_tokenizer
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from kvant.engine.load import find_model
from kvant.errors import PromptError
from kvant.text import process as bounded
from kvant.text import rendering
from kvant.text.process import TextProcess
from kvant.text.prompt import render_chat
from kvant.text.template import MAX_TEMPLATE, render
from kvant.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def process() -> Iterator[TextProcess]:
    made = TextProcess()
    yield made
    made._end()


MESSAGES = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi <there>", "reasoning": "why"},
]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
HOLDER: dict[str, Any] = {"role": "user", "content": ITSELF}


ENDLESS = r"it takes longer than 0\.5 s|too much memory"
HOSTILE = [
    ("{{ 'a' * 10**10 }}", "too much memory"),
    ("{% for i in range(40) %}{{ 'a' * 10**6 }}{% endfor %}", "it writes more than 33554432 characters"),
    ("{% for i in range(10**6) %}{% endfor %}", "Range too big"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ namespace(__class__=1) }}", "a namespace cannot hold '__class__'"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{% include '/etc/passwd' %}", "no loader"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    ("{{" + "(" * 100_000, "nested too deeply"),
    ("{{ " + "-" * 30_000 + "1 }}", "nested too deeply"),
    ("{% if %}", "failed: "),
    ("{{ nothing.of.this }}", "'nothing' is undefined"),
    ("{{ raise_exception('first\nsecond') }}", "failed: first$"),
    ("{{ messages | tojson }}{{ 1 / 0 }}", "division by zero"),
    ("x" * (MAX_TEMPLATE + 1), "1048577 characters; expected at most 1048576"),
]
HOSTILE += [(LOOP, ENDLESS), ("{{ 9 ** (9 ** (9 ** 9)) }}", ENDLESS)]


@pytest.mark.parametrize(("source", "message"), HOSTILE, ids=[source[:40] for source, _ in HOSTILE])
def test_a_hostile_template(monkeypatch: Any, process: TextProcess, source: str, message: str) -> None:
    if message == ENDLESS:
        monkeypatch.setattr(bounded, "TIME_LIMIT_S", 0.5)
    with at_most(20), pytest.raises(PromptError, match=message) as caught:
        render(process, source, {"messages": [{}]})
    assert str(caught.value).isprintable()
    monkeypatch.undo()
    assert render(process, "{{ a }}", {"a": "still there"}) == "still there"


def test_memory_where_the_system_does_not_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: it is looked at."""
    monkeypatch.setattr(bounded, "ADDRESS_LIMIT", 0)
    monkeypatch.setattr(bounded, "MEMORY_LIMIT", 60_000_000)
    process = TextProcess()
    grow = "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['a' * 10**6 ~ i] %}{% endfor %}"
    with pytest.raises(PromptError, match="too much memory"):
        render(process, "{% for i in range(300) %}{% set x = 'a' * 10**4 %}{% endfor %}" + grow, {})
    assert render(process, "{{ a }}", {"a": 1}) == "1"


def test_memory_of_a_tokenizer_that_was_loaded_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It does not count: after a new start all of the process did."""
    monkeypatch.setattr(bounded, "ADDRESS_LIMIT", 0)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "llama3"))
    ids = tokenizer.encode("a")
    tokenizer._process._process.kill()
    tokenizer._process._process.wait()
    assert tokenizer.encode("a") == ids
    monkeypatch.setattr(bounded, "MEMORY_LIMIT", 20_000_000)
    slow = "{% for i in range(1500) %}{% for j in range(1500) %}{% endfor %}{% endfor %}{{ a }}"
    assert render(tokenizer._process, slow, {"a": 1}) == "1"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS])
def test_a_stack_that_is_too_small(number: signal.Signals) -> None:
    """By which signal a process ends there depends on the system."""
    process = TextProcess()
    assert render(process, "a", {}) == "a"
    threading.Timer(0.2, process._process.send_signal, [number]).start()
    with pytest.raises(PromptError, match="nested too deeply"):
        render(process, LOOP, {})


def test_the_limit_is_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no processor for longer than its limit answers once it gets one."""
    monkeypatch.setattr(bounded, "TIME_LIMIT_S", 0.3)
    process = TextProcess()
    assert render(process, "a", {}) == "a"
    process._process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, process._process.send_signal, [signal.SIGCONT]).start()
    assert render(process, "{{ a }}", {"a": 1}) == "1"
    with pytest.raises(PromptError, match=r"it takes longer than 0\.3 s"):
        render(process, LOOP, {})


def test_a_process_that_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TextProcess()
    assert render(process, "a", {}) == "a"
    process._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(bounded, "WALL_LIMIT_S", 0.3)
    with pytest.raises(PromptError, match=r"has not answered within 0\.3 s"):
        render(process, "a", {})
    monkeypatch.undo()
    assert render(process, "a", {}) == "a"


def test_the_process_ends_with_its_object_and_comes_again_when_killed() -> None:
    process = TextProcess()
    assert render(process, "a", {}) == "a"
    process._process.kill()
    process._process.wait()
    assert render(process, "{{ a }}", {"a": 1}) == "1"
    pid = process._process.pid
    del process
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_fork_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a process can tell that it is the child of a fork: by its number."""
    process = TextProcess()
    parents = process._process
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert render(process, "{{ a }}", {"a": 1}) == "1"
    assert process._process is not parents
    monkeypatch.undo()
    _, status = os.waitpid(parents.pid, 0)
    # it was not killed; it ended because its pipe is closed, which is the same here
    assert not os.WIFSIGNALED(status)


def test_threads(process: TextProcess) -> None:
    texts = ["x" * 100_000 + str(number) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: render(process, "{{ a }}", {"a": text}), texts)) == texts
    broken = json.loads('"\\ud800 a\\u2028b\\n"')
    assert render(process, "{{ a }}", {"a": broken}) == broken


def test_no_modules_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jinja2", "json", "datetime", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert render(TextProcess(), "{{ a }}", {"a": 1}) == "1"
    assert not (tmp_path / "executed").exists()


def test_the_environment_is_transformers() -> None:
    ours, theirs = rendering.environment(), chat_template_utils._compile_jinja_template("").environment
    for name in ("filters", "globals", "tests"):
        assert getattr(ours, name).keys() == getattr(theirs, name).keys(), name
    for name in ("filters", "tests"):
        given, expected = getattr(ours, name), getattr(theirs, name)
        assert {key for key in given if given[key] is not expected[key]} <= {"tojson"}
    flags = (
        "trim_blocks",
        "lstrip_blocks",
        "keep_trailing_newline",
        "autoescape",
        "undefined",
        "finalize",
        "policies",
    )
    assert [getattr(ours, flag) for flag in flags] == [getattr(theirs, flag) for flag in flags]
    tags = [
        {tag for extension in made.extensions.values() for tag in extension.tags} for made in (ours, theirs)
    ]
    assert tags[0] == tags[1] == {"generation", "break", "continue"}
    assert isinstance(ours, chat_template_utils.ImmutableSandboxedEnvironment)


TEMPLATES = [
    "{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}\n",
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ messages | tojson(separators=(',', "
    "':')) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor "
    "%}",
    "{% set n = namespace(a=1, self=2) %}{% for i in range(3) %}{% set n.a = n.a * 2 %}{% endfor %}{{ [n.a, "
    "n.self] }}",
    "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{% endfor %}{{ "
    "x }}",
    "{{ dict(a=1) }}{{ dict.fromkeys([1, 2], 3) }}{{ strftime_now('%Y') }}",
    "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[0].content) }}{{ messages[1].reasoning_content }}",
    "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ documents }}{{ custom.a "
    "}}",
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{{ t | tojson(sort_keys=true) }}{% endfor %}{% "
    "endif %}",
    "{{ '\U0001f600 \u00fc' }}{{ messages[0].content.split('l')[-1].upper() }}{{ '%s-%d' | format('a', 3) }}",
]


def weather(
    city: str, days: int = 1, units: Literal["C", "F"] | None = None, where: list[str] | None = None
) -> str:
    """The weather.

    Args:
        city: where
            it is
        days: how many (choices: [1, 2])
        units: of temperature
        where: more places
    """
    return city


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(find_model("pocket"))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True, "custom": {"a": [1, 2.5, None]}},
    {"tools": [weather], "documents": [{"a": 1}]},
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_every_option_is_transformers(pocket: tuple[Any, Any], reference: Any, source: str) -> None:
    for given in OPTIONS:
        options = {"chat_template": source, "custom": {}, "tokenize": False} | given
        assert pocket[1].apply_chat_template(MESSAGES, **options) == reference.apply_chat_template(
            MESSAGES, **options
        )


def test_conversations_tokens_and_beginnings_of_answers(pocket: tuple[Any, Any], reference: Any) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image"}]}]
    shown = "{{ messages[0].content | tojson }}"
    for conversation, options in [
        (MESSAGES, {"continue_final_message": True, "tokenize": False}),
        (blocks, {"continue_final_message": True, "tokenize": False, "chat_template": shown}),
        ([{"role": "user", "content": "a  "}], {"continue_final_message": True, "tokenize": False}),
        (MESSAGES, {"tokenize": True, "return_dict": False}),
        ([MESSAGES, MESSAGES[:1]], {"tokenize": False}),
        ([MESSAGES, MESSAGES[:1]], {"tokenize": True, "return_dict": False}),
        (
            [{**MESSAGES[0], "tool_calls": None, "n": np.int64(3)}],
            {"tokenize": False, "chat_template": "{{messages}}"},
        ),
    ]:
        expected = reference.apply_chat_template(conversation, **options)
        assert pocket[1].apply_chat_template(conversation, **options) == expected, options


@pytest.mark.parametrize(
    ("conversation", "options", "message"),
    [
        ([], {}, "conversation is empty"),
        (["hello"], {}, "conversation has a str; expected messages"),
        ([HOLDER], {}, "contains itself"),
        ([MESSAGES[0] | {"content": None}], {"continue_final_message": True}, "no text to continue"),
        (MESSAGES, {"continue_final_message": True, "add_generation_prompt": True}, "expected one of them"),
        (MESSAGES, {"continue_final_message": True, "chat_template": "x"}, "does not keep the last message"),
        (MESSAGES, {"tools": [3]}, "a tool is a int"),
        *[(MESSAGES, {name: True}, f"{name} is not supported")
          for name in ("sanitize_control_tokens", "return_assistant_tokens_mask", "return_dict", "padding")],
        (MESSAGES, {"tools": [lambda a: a]}, "tool '<lambda>': .*it has no docstring"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_applied(
    pocket: tuple[Any, Any], conversation: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pocket[1].apply_chat_template(conversation, **options)


def test_copies_are_bounded_too(pocket: tuple[Any, Any]) -> None:
    tokenizer = copy.deepcopy(pocket[1])
    tokenizer.chat_template = "{{ 'a' * 10**10 }}"
    with pytest.raises(PromptError, match=r"^the chat template failed: it needs too much memory$"):
        render_chat(tokenizer, MESSAGES)
