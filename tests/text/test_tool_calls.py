"""Conversations go through a model's template, and its calls come back: as transformers and mlx-lm do it."""

import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tool_parsers import gemma4, glm47, json_tools, kimi_k2, minimax_m2, mistral, qwen3_coder
from support.counts import count
from support.tokenizers_made import loaded, make_tokenizer, write_tokenizer
from transformers import AutoTokenizer

from kvant.text.answer_parts import AnswerParts
from kvant.text.call_form import schemas, to_json
from kvant.text.stream import CallPart, TextPart
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import Harmony, Hermes, Mistral, MistralArgs, QwenCoder, tool_format

# Chat templates that write messages, tools and calls as the published families do, and little else.
TEMPLATES = {
    path.stem: path.read_text("utf-8")
    for path in (Path(__file__).parents[1] / "data/chat_templates").iterdir()
}
# The tokenizer of support.tokenizers_made, where its name is another.
TOKENIZERS = {"qwen3_coder": "qwen3", "mistral_args": "mistral"}
FORMS = {name: name for name in ("qwen3_coder", "llama3", "mistral", "mistral_args")}
FORMS |= {"qwen2": "hermes", "qwen3": "hermes"}
VALUES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": ["integer", "null", "string"]}},
    "place": {"type": "object", "properties": {"city": {"type": "string"}, "at": {"type": "object"}}},
    "maybe": {"type": ["string", "null"]},
    "one": {"enum": ["a", "b", 3]},
}
PARAMETERS = {"type": "object", "properties": VALUES, "required": ["text"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "Well?"}
QUESTION = {"role": "user", "content": "  What's the weather in Zürich? \U0001f326️ 天气\n"}
ANSWER = {"role": "assistant", "content": "Sunny, 21°.\n", "reasoning_content": "let me see"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [{"role": "system", "content": 'Be "brief" & <kind>.  '}, QUESTION, ANSWER, QUESTION, ANSWER],
    [ANSWER],
    [{"role": "user", "content": None}],
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"tools": [TOOL, TOOL], "add_generation_prompt": True, "date_string": "1 Jan 2030"},
    {"tools": []},
    {"continue_final_message": True},
]


def made(folder: Path, family: str) -> Path:
    """A folder with a family's template, and the tokens of thinking where it has them."""
    extra = {"extra_special_tokens": ["<think>", "</think>"]} if family == "qwen3" else {}
    return write_tokenizer(folder, TOKENIZERS.get(family, family), chat_template=TEMPLATES[family], **extra)


@pytest.fixture(scope="module", params=FORMS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Tokenizer, Any]:
    """A family, kvant's tokenizer of it, and transformers'."""
    folder = made(tmp_path_factory.mktemp("tools") / request.param, request.param)
    return request.param, loaded(folder), AutoTokenizer.from_pretrained(folder)


def rendered(tokenizer: Any, conversation: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """The text; None where the template or the tokenizer refuses the conversation."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    except Exception:
        return None


def test_text_and_ids_are_transformers(pair: tuple[str, Tokenizer, Any]) -> None:
    _, ours, reference = pair
    agreed = 0
    for conversation, options in product(CONVERSATIONS, OPTIONS):
        before = json.dumps([conversation, options])
        expected = rendered(reference, conversation, options)
        assert rendered(ours, conversation, options) == expected
        assert json.dumps([conversation, options]) == before  # nothing of the caller's is changed
        if expected is not None:
            agreed += 1
            ids = reference.apply_chat_template(conversation, return_dict=False, **options)
            assert ours.apply_chat_template(conversation, **options) == ids
            assert ours.encode(expected, add_special_tokens=False) == ids
    assert agreed >= 10


def test_roles_of_the_models_own_are_variables(tmp_path: Path) -> None:
    source = "{{ image_token }}{{ boi_token }}{{ eos_token }}{{ video_token is defined }}"
    extra = {"boi_token": "<boi>"}
    folder = write_tokenizer(
        tmp_path, "qwen2", chat_template=source, image_token="<image>", extra_special_tokens=extra
    )
    texts = [rendered(each, [USER], {}) for each in (loaded(folder), AutoTokenizer.from_pretrained(folder))]
    assert texts == ["<image><boi><|im_end|>False"] * 2


def some_text(rng: random.Random) -> str:
    return "".join(
        rng.choices(
            [*"a é\U0001f326\"\\\n}]{'1", "[ARGS]", "</tool_call>", "<tool_call>"], k=rng.randrange(1, 8)
        )
    )


def some_arguments(rng: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {
        "text": some_text(rng),
        "count": rng.randrange(-(10**20), 10**20),
        "ratio": rng.choice([0.5, -1e-7, 3, 1e22]),
        "exact": rng.random() < 0.5,
        "list": [rng.choice([1, None, some_text(rng)]) for _ in range(rng.randrange(4))],
        "place": {"city": some_text(rng), "at": {"x": [{}, some_text(rng)]}},
        "maybe": rng.choice([None, some_text(rng)]),
        "one": rng.choice(["a", 3]),
    }
    kept = [name for name in given if name == "text" or rng.random() < 0.5]
    rng.shuffle(kept)
    return {name: given[name] for name in kept}


def test_the_form_is_the_templates_own(pair: tuple[str, Tokenizer, Any]) -> None:
    family, tokenizer, _ = pair
    form = tool_format(tokenizer)
    assert form is not None
    assert form.name == FORMS[family]
    assert (form.writing is None) is (family == "qwen3_coder")
    if form.writing is None:
        return
    # What a grammar would write begins as the template begins it.
    writing = form.writing
    said = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "look_up", "arguments": {"text": "x"}},
    }
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [said]}]
    begun = f'{writing.begin}{writing.before_name}look_up{writing.before_arguments}{{"text": "x'
    assert begun in tokenizer.apply_chat_template(messages, [TOOL], tokenize=False)


def test_calls_come_back_from_the_template(pair: tuple[str, Tokenizer, Any]) -> None:
    """An answer, its parts as a client sends them back, the template's text: the same answer is read from
    it.
    """
    family, tokenizer, reference = pair
    form = tool_format(tokenizer)
    assert form is not None
    rng = random.Random(family)
    for _ in range(count(15, 500)):
        given = [some_arguments(rng) for _ in range(rng.randrange(1, 4) if form.several else 1)]
        # whitespace at the ends of a value's text, and what follows a value, are its marks
        if family == "qwen3_coder":
            given = [{**each, "text": f"x{each['text']}x"} for each in given]
        named = [{"name": "look_up", "arguments": each} for each in given]
        calls = [{"id": f"abcdefgh{n}", "type": "function", "function": each} for n, each in enumerate(named)]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": "r"} for call in calls
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
        if family in ("qwen2", "qwen3", "qwen3_coder", "mistral_args"):
            answer["content"] = "Let me see."
        if family == "qwen3":
            answer["reasoning_content"] = "hm"
        messages = [USER, answer, *results]
        text = tokenizer.apply_chat_template(messages, [TOOL], tokenize=False)
        assert text == reference.apply_chat_template(messages, tools=[TOOL], tokenize=False)
        prompt = tokenizer.apply_chat_template([USER], [TOOL], tokenize=False, add_generation_prompt=True)
        answered = tokenizer.apply_chat_template(messages[:2], [TOOL], tokenize=False)
        assert text.startswith(answered)
        splitter = AnswerParts(tokenizer, prompt, [TOOL], form)
        said = answered[len(prompt) :].rstrip().removesuffix(tokenizer.eos_token)
        parts = [*splitter.add(said), *splitter.finish()]
        found = [json.loads(part.arguments) for part in parts if isinstance(part, CallPart)]
        assert found == given
        assert [list(each) for each in found] == [list(each) for each in given]  # in their order
        texts = [(part.text, part.thinking) for part in parts if isinstance(part, TextPart)]
        expected = [("hm", True)] if family == "qwen3" else []
        assert texts == expected + ([("Let me see.", False)] if answer["content"] else [])


def test_valid_calls_are_those_of_mlx_lm() -> None:
    rng = random.Random(5)
    tools = schemas([TOOL])
    for _ in range(count(200, 5000)):
        given = some_arguments(rng)
        called = json.dumps({"name": "look_up", "arguments": given}, ensure_ascii=rng.random() < 0.5)
        (ours,) = Hermes().calls(f"<tool_call>\n{called}\n</tool_call>", tools)
        theirs = json_tools.parse_tool_call(called)
        assert ours == (theirs["name"], theirs["arguments"])
        text = f"[TOOL_CALLS] [{called}, {called}]"
        theirs = mistral.parse_tool_call(text.removeprefix("[TOOL_CALLS]"))
        assert Mistral().calls(text, tools) == [(each["name"], each["arguments"]) for each in theirs]
        text = f"look_up[ARGS]{json.dumps(given)}"
        theirs = mistral.parse_tool_call(text)
        assert MistralArgs().calls(f"[TOOL_CALLS]{text}", tools) == [(theirs["name"], theirs["arguments"])]
        # Their reader of Qwen3-Coder's form loses long integers, and makes numbers of strings that may be
        # null.
        plain = {key: value for key, value in given.items() if key not in ("count", "ratio", "maybe", "one")}
        plain["text"] = f"x{given['text']}x"
        shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in plain.items()}
        written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
        text = f"<function=look_up>\n{written}</function>"
        theirs = qwen3_coder.parse_tool_call(text, [TOOL])
        assert QwenCoder().calls(f"<tool_call>\n{text}\n</tool_call>", tools) == [
            (theirs["name"], theirs["arguments"])
        ]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
        ({"type": "integer"}, "12345678901234567891", 12345678901234567891),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "[1, None, 'it\\'s', \"a\\n\\x01\"]", [1, None, "it's", "a\n\x01"]),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "number"}, "2", 2),
        ({"type": "integer"}, "2.5", "2.5"),
        ({"type": 5, "enum": 5, "anyOf": {}, "$ref": ["#/$defs/n"]}, "[5]", [5]),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({}, "5", "5"),
        ({}, "[5]", [5]),
    ],
)
def test_values_of_qwen3_coder(schema: dict[str, Any], text: str, value: Any) -> None:
    """By the schema, as the form does not say. A value that fits in no way is text."""
    defs = {"n": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/n"}]}}
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": defs}
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    call = f"<tool_call><function=t><parameter=v>{text}</parameter></function></tool_call>"
    ((_, arguments),) = QwenCoder().calls(call, schemas([tool]))
    assert arguments == {"v": value}
    assert type(arguments["v"]) is type(value)


def test_a_form_that_is_not_known(tmp_path: Path, pocket: tuple[object, Tokenizer]) -> None:
    """Nothing is guessed: of a template without tools, of none, and of one that writes calls in a form of
    its own.
    """
    without = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tool_format(make_tokenizer(tmp_path / "no", "qwen2", chat_template=without)) is None
    assert tool_format(make_tokenizer(tmp_path / "none", "qwen2")) is None
    other = TEMPLATES["qwen2"].replace("tool_call>", "a_call>")
    assert tool_format(make_tokenizer(tmp_path / "other", "qwen2", chat_template=other)) is None
    # what is between the marks is known
    seed = TEMPLATES["qwen3_coder"].replace("tool_call>", "seed:tool_call>")
    assert tool_format(make_tokenizer(tmp_path / "seed", "qwen2", chat_template=seed)) is None
    assert isinstance(tool_format(pocket[1]), Hermes)


ARGUMENTS = "{% for k, v in c.function.arguments.items() %}KEY{{ k }}VALUE{{ v if v is string else v | tojson }}END{% endfor %}"
WRITTEN = {  # as the templates of GLM 4.5, MiniMax M2, DeepSeek V3 and V3.1 write calls
    "glm": (
        "\n<tool_call>{{ c.function.name }}\n"
        + ARGUMENTS.replace("KEY", "<arg_key>")
        .replace("VALUE", "</arg_key>\n<arg_value>")
        .replace("END", "</arg_value>\n")
        + "</tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n'
        + ARGUMENTS.replace("KEY", '<parameter name="')
        .replace("VALUE", '">')
        .replace("END", "</parameter>\n")
        + "</invoke>\n</minimax:tool_call>"
    ),
    "deepseek": (
        "{{ '<MARKcallsBARbegin><MARKcallBARbegin>function<MARKsep>' + c.function.name + '\n```json\n' "
        "+ c.function.arguments + '\n```<MARKcallBARend><MARKcallsBARend>' }}"
    ),
    "deepseek_v31": (
        "{{ '<MARKcallsBARbegin><MARKcallBARbegin>' + c.function.name + '<MARKsep>' + c.function.arguments "
        "+ '<MARKcallBARend><MARKcallsBARend>' }}"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "gemma4": (
        "<|tool_call>call:{{ c.function.name }}{{ '{' }}"
        + "{% for k, v in c.function.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:"
        + "{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}{% endfor %}"
        + "{{ '}' }}<tool_call|>"
    ),
    "harmony": (
        " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>"
    ),
}


PARSERS: dict[str, Any] = {"glm": glm47, "minimax": minimax_m2, "kimi": kimi_k2, "gemma4": gemma4}


@pytest.mark.parametrize("name", WRITTEN)
def test_forms_between_marks(tmp_path: Path, name: str) -> None:
    """The form is found in the template, and what mlx-lm's parser reads of a call is what is read here."""
    written = WRITTEN[name].replace("MARK", "\uff5ctool\u2581").replace("BAR", "\u2581")
    written = re.sub("(begin|end|sep)>", "\\1\uff5c>", written) if "deepseek" in name else written
    template = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or "
        "[] %}" + written + "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = make_tokenizer(tmp_path, "qwen2", chat_template=template)
    form = tool_format(tokenizer)
    assert form is not None
    assert form.name == name.removesuffix("_v31")
    given: dict[str, Any] = {"text": 'a "b": {c:', "count": 3}
    arguments = to_json(given) if form.text_arguments else given
    call = {
        "id": form.call_id("abcdefghi", "note", 2),
        "type": "function",
        "function": {"name": "note", "arguments": arguments},
    }
    tool = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}}}}}  # fmt: skip
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = str(tokenizer.apply_chat_template(asked, [tool], tokenize=False)).partition("[assistant]")[2]
    assert form.calls(text.strip(), schemas([tool])) == [("note", given)]
    if (parser := PARSERS.get(name)) is not None:
        body = text.partition(parser.tool_call_start)[2].partition(parser.tool_call_end)[0]
        theirs: Any = parser.parse_tool_call(body, [tool])
        theirs = theirs[0] if isinstance(theirs, list) else theirs
        assert (theirs["name"], theirs["arguments"]) == ("note", given)


@pytest.mark.parametrize("ends", ["<think>\n", "<think>\n\n</think>\n\n", "<tool", "[x]<", ""])
def test_a_prompt_that_begins_the_answer_hides_no_calls(tmp_path: Path, ends: str) -> None:
    """As QwQ's, whose <think> and the history's <tool_call> begin with the same character."""
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}"
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson '
        "}}}\n</tool_call>"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + ends
        + "{% endif %}"
    )
    tokenizer = make_tokenizer(tmp_path, "qwen2", chat_template=template)
    assert isinstance(tool_format(tokenizer), Hermes)


CALLED = '{"text": "<|message|>", "count": 3}'
HARMONY = {  # what gpt-oss writes behind <|start|>assistant, and what is thought and said
    f" to=functions.note<|channel|>commentary json<|message|>{CALLED}<|call|>": [],
    f"<|channel|>commentary to=functions.note <|constrain|>json<|message|>{CALLED}": [],
    f"<|channel|>analysis to=functions.note code<|message|>{CALLED}": [],
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.note <|constrain|>json<|message|>{CALLED}<|call|>":
    ["Hm.", "I look."],
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.note<|channel|>commentary"
    f"<|message|>{CALLED}": ["Hm."],
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 7, 500])
def test_calls_of_gpt_oss(tmp_path: Path, size: int) -> None:
    marks = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
    tokenizer = make_tokenizer(tmp_path, "qwen2", extra_special_tokens=marks)
    tool = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}
    for text, said in HARMONY.items():
        splitter = AnswerParts(tokenizer, "<|start|>assistant", [tool], Harmony())
        parts = [part for at in range(0, len(text), size) for part in splitter.add(text[at : at + size])]
        parts += splitter.finish()
        assert parts.pop() == CallPart("note", to_json(json.loads(CALLED))), text
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        assert "".join(texts) == "".join(said)
    for text in (
        "<|channel|>commentary to=functions.other <|message|>{}",
        " to=functions.note and so on",
        " to=x",
    ):
        splitter = AnswerParts(tokenizer, "<|start|>assistant", [tool], Harmony())
        told = [*splitter.add(text), *splitter.finish()]
        assert all(isinstance(part, TextPart) for part in told)
        assert "".join(part.text for part in told if isinstance(part, TextPart)) == text
    splitter = AnswerParts(tokenizer, "<|start|>assistant", [tool], Harmony())
    # what is no call is not held back for ever
    assert splitter.add("It goes to=functions.note, " + "as I said. " * 60)
