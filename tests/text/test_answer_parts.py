"""Thinking, text and tool calls are told apart whatever the pieces: nothing half, nothing lost."""

import json
import random
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.counts import count
from support.processor_time import at_most
from support.tokenizers_made import make_tokenizer

from kvant.text.answer_parts import AnswerParts
from kvant.text.call_form import ToolFormat, to_json
from kvant.text.stream import AnswerPart, CallPart, TextPart, TextStream
from kvant.text.thinking import HARMONY, HARMONY_TOKENS, Marks, marks_of
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import (
    DeepSeek,
    Gemma4,
    Glm,
    Harmony,
    Hermes,
    Kimi,
    Llama3,
    MiniMax,
    Mistral,
    MistralArgs,
    QwenCoder,
)

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {**WEATHER, "required": ["city"]}}},
    {"type": "function", "function": {"name": "my/now.v2"}},
    {"type": "function", "function": {"name": "now"}},
]
ROME = CallPart("weather", '{"city":"Rome"}')
NOW = CallPart("now", "{}")
HERMES_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
GLM_ROME = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = (
    f"<\uff5ctool\u2581{words}\uff5c>"
    for words in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
DEEPSEEK = (
    f'{CALLS_BEGIN}{CALL_BEGIN}function{SEP}weather\n```json\n{{"city": "Rome"}}\n```{CALL_END}\n'
    f"{CALL_BEGIN}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
)
DEEPSEEK_V31 = f'{CALLS_BEGIN}{CALL_BEGIN}weather{SEP}{{"city": "Rome"}}{CALL_END}{CALL_BEGIN}now{SEP}{{}}{CALL_END}{CALLS_END}'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CODER_ROME = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
)
BARE_ROME = CODER_ROME.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
BARE_NOW = "<function=now>\n</function>"
LLAMA_ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
MISTRAL_ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_CALLS = KIMI_CALL.format("weather:0", '{"city": "Rome"}') + KIMI_CALL.format("now:1", "{}")
KIMI = f"<|tool_calls_section_begin|>{KIMI_CALLS}<|tool_calls_section_end|>"
GEMMA_ROME = '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>'
CALLS = {"hermes": HERMES_ROME, "qwen3_coder": CODER_ROME, "llama3": f"<|python_tag|>{LLAMA_ROME}",
         "mistral": f"[TOOL_CALLS] [{MISTRAL_ROME}]",
         "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'}  # fmt: skip
# A form, an answer, and its parts: text, ("thinking", text), or a call.
CASES: list[tuple[ToolFormat, str, list[Any]]] = [
    (Hermes(), HERMES_ROME, [ROME]),
    (Hermes(), f"Let me see.\n{HERMES_ROME}\n{HERMES_NOW}\n", ["Let me see.", ROME, NOW]),
    (Hermes(), f"{HERMES_ROME}\n\nThat was it. \n", [ROME, "That was it. \n"]),
    (Hermes(), f"<think>\nSo {HERMES_NOW}?\n</think>\n\n{HERMES_ROME}", [("thinking", f"So {HERMES_NOW}?"), ROME]),
    (Hermes(), HERMES_ROME.replace("Rome", "</tool_call> } \\\" {"),
     [CallPart("weather", '{"city":"</tool_call> } \\" {"}')]),
    (Hermes(), HERMES_ROME.replace("Rome", "a\nb\\u00e9"), [CallPart("weather", '{"city":"a\\nbé"}')]),
    (Hermes(), HERMES_ROME.removesuffix("\n</tool_call>"), [ROME]),  # ended without the mark
    (Hermes(), HERMES_ROME[:-5], [ROME]),
    (Hermes(), HERMES_ROME[:-17], [HERMES_ROME[:-17]]),  # inside the object
    (Hermes(), "The mark <tool_call> begins a call; </tool_call> ends it.", None),
    (Hermes(), f"<tool_call> {HERMES_ROME}", ["<tool_call>", ROME]),
    (Hermes(), f"{HERMES_ROME[:-13]} and {HERMES_NOW}", [f"{HERMES_ROME[:-13]} and", NOW]),
    (Hermes(), "a < b <tool", None),
    (Hermes(), " \n ", None),
    (Hermes(), "", []),
    (Hermes(), '<tool_call>{"name": "now", "arguments": ' + '{"a": ' * 100, None),
    # Calls that are none: each is text.
    (Hermes(), HERMES_ROME.replace("weather", "wether"), None),
    (Hermes(), HERMES_ROME.replace('"weather"', "5"), None),
    # its client says so
    (Hermes(), HERMES_ROME.replace('"city"', '"town"'), [CallPart("weather", '{"town":"Rome"}')]),
    # not held against the schema
    (Hermes(), HERMES_ROME.replace('"Rome"', "1"), [CallPart("weather", '{"city":1}')]),
    (Hermes(), HERMES_ROME.replace('{"city": "Rome"}', "[1, 2]"), None),
    (Hermes(), HERMES_ROME.replace('"Rome"', '"Rome", "days": NaN'), None),
    (Hermes(), HERMES_ROME.replace("Rome", "\\ud800"), None),  # half of a character
    (Hermes(), HERMES_ROME.replace('"Rome"', '"Rome",'), None),
    (Hermes(), HERMES_ROME.replace('{"city": "Rome"}', '{"city": "Rome"}, "more": 1'), None),
    (Hermes(), "<tool_call>\n[1, 2]\n</tool_call>", None),
    # A call that is quoted in another one's arguments, right or not, is no call.
    (Hermes(), HERMES_ROME.replace('"city": "Rome"', f'"x": {json.dumps(HERMES_NOW)}'),
     [CallPart("weather", to_json({"x": HERMES_NOW}))]),
    (QwenCoder(), CODER_ROME, [ROME]),
    (QwenCoder(), f"Yes.\n\n{CODER_ROME}\n{CODER_ROME}", ["Yes.", ROME, ROME]),
    (QwenCoder(), CODER_ROME.removesuffix("\n</tool_call>"), [ROME]),
    (QwenCoder(), CODER_ROME[:-20], None),
    (QwenCoder(), CODER_ROME.replace("Rome", "12"), [CallPart("weather", '{"city":"12"}')]),
    (QwenCoder(), CODER_ROME.replace("Rome", "a\n\n<parameter>\n</parameter> b\n"),
     [CallPart("weather", '{"city":"a\\n\\n<parameter>\\n</parameter> b\\n"}')]),
    (QwenCoder(), CODER_ROME.replace("</function>", "<parameter=days>\n 3\n</parameter>\n</function>"),
     [CallPart("weather", '{"city":"Rome","days":3}')]),
    (QwenCoder(), CODER_ROME.replace("</function>", "<parameter=days>\nthree\n</parameter>\n</function>"),
     [CallPart("weather", '{"city":"Rome","days":"three"}')]),
    (QwenCoder(), CODER_ROME.replace("</function>", "<parameter=city>\nBari\n</parameter>\n</function>"), None),
    (QwenCoder(), CODER_ROME.replace("<parameter=city>", "so <parameter=city>"), None),
    (QwenCoder(), "<tool_call><function=now></function></tool_call>", [NOW]),
    (QwenCoder(), "<tool_call><function=my/now.v2></function></tool_call>", [CallPart("my/now.v2", "{}")]),
    (Hermes(), HERMES_NOW.replace('"now"', '"my/now.v2"'), [CallPart("my/now.v2", "{}")]),
    (QwenCoder(), f"<tool_call>\n{HERMES_ROME}", None),
    # Without the mark before it: of a known tool, at the start of a line.
    (QwenCoder(), BARE_ROME, [ROME]),
    (QwenCoder(), f"\n\n{BARE_ROME}\n</tool_call>", [ROME]),
    (QwenCoder(), f"{BARE_ROME}\n</tool_", [ROME]),
    (QwenCoder(), f"Yes.\n{BARE_ROME}\n</tool_call>\nSo.", ["Yes.", ROME, "So."]),
    (QwenCoder(), f"{BARE_ROME}\n{BARE_NOW}\n{CODER_ROME}{BARE_NOW}", [ROME, NOW, ROME, NOW]),
    (QwenCoder(), f"{BARE_NOW} So <tool_call>", [NOW, "So <tool_call>"]),
    (QwenCoder(), f"<think>\n{BARE_NOW}\n</think>\n{BARE_ROME}", [("thinking", BARE_NOW), ROME]),
    (QwenCoder(), BARE_ROME.replace("Rome", "a\n</function>\nb\n</parameter>\nc"),
     [CallPart("weather", '{"city":"a\\n</function>\\nb\\n</parameter>\\nc"}')]),
    (QwenCoder(), f"It is {BARE_ROME}", None),
    (QwenCoder(), f"Yes.\n {BARE_ROME}", None),
    (QwenCoder(), f"Yes.\n{BARE_ROME.replace('weather', 'wether')}", None),
    (QwenCoder(), f"<function=wea\n{BARE_NOW}", ["<function=wea", NOW]),
    (QwenCoder(), "<function=weather> takes a city.", None),
    (QwenCoder(), BARE_ROME[:-5], None),
    (QwenCoder(), "Yes.\n<function=weath", None),
    # Without the mark behind it: another call follows.
    (QwenCoder(), f"<tool_call>\n{BARE_ROME}\n{CODER_ROME}", [ROME, ROME]),
    (QwenCoder(), f"<tool_call>\n{BARE_ROME}\n{BARE_NOW}\n</tool_call>", [ROME, NOW]),
    (QwenCoder(), f"<tool_call>\n{BARE_ROME}\nSo.", None),
    (Hermes(), f"{HERMES_ROME[:-13]}\n{HERMES_NOW}", [ROME, NOW]),
    (Hermes(), f"{HERMES_ROME[:-13]}\n<tool_c", [ROME, "<tool_c"]),
    (Llama3(), LLAMA_ROME, [ROME]),
    (Llama3(), f"\n <|python_tag|>{LLAMA_ROME}", [ROME]),
    (Llama3(), f"See: <|python_tag|>{LLAMA_ROME}", ["See:", ROME]),
    (Llama3(), LLAMA_ROME.replace('{"name"', '{"type": "function", "name"'), [ROME]),
    # one call is all that its template can say
    (Llama3(), f"{LLAMA_ROME}; {LLAMA_ROME}", [ROME, f"; {LLAMA_ROME}"]),
    (Llama3(), f"See: {LLAMA_ROME}", None),
    (Llama3(), '<|python_tag|>brave_search.call(query="Rome")', None),
    (Llama3(), '{"name": "Ann", "age": 4}', None),
    (Llama3(), "{", None),
    (Mistral(), f"[TOOL_CALLS] [{MISTRAL_ROME}]", [ROME]),
    (Mistral(), f'[TOOL_CALLS][{MISTRAL_ROME[:-1]}, "id": "abcdefghi"}}, {MISTRAL_ROME}] ', [ROME, ROME]),
    (Mistral(), f"[TOOL_CALLS] [{MISTRAL_ROME}", None),
    (Mistral(), f"[TOOL_CALLS] [{MISTRAL_ROME}, 1]", None),
    (Mistral(), "[TOOL_CALLS] [1, 2] [TOOL_CALLS] []", None),
    (MistralArgs(), 'Yes.[TOOL_CALLS]weather[ARGS]{"city": '
                    '"Rome"}[TOOL_CALLS]now[ARGS]{}', ["Yes.", ROME, NOW]),
    (MistralArgs(), '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}', [ROME]),
    (MistralArgs(), '[TOOL_CALLS]my/now.v2[ARGS]{}', [CallPart("my/now.v2", "{}")]),
    (MistralArgs(), '[TOOL_CALLS] weather [ARGS]{"city": "Rome"}', None),
    (MistralArgs(), "[TOOL_CALLS]weather", None),
    (MistralArgs(), "[TOOL_CALLS]weather[ARGS] 5", None),
    (MistralArgs(), '[TOOL_CALLS]weather[ARGS]{"city"', None),
    (Glm(), GLM_ROME, [ROME]),
    (Glm(), f"Yes.\n{GLM_ROME}\n{GLM_ROME}", ["Yes.", ROME, ROME]),
    (Glm(), GLM_ROME.replace("</tool_call>", "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
     [CallPart("weather", '{"city":"Rome","days":3}')]),
    (Glm(), GLM_ROME.removesuffix("</tool_call>"), [ROME]),
    (Glm(), "<tool_call>now</tool_call>", [NOW]),
    (Glm(), GLM_ROME.replace("weather", "wether"), None),
    (Glm(), GLM_ROME.replace("</tool_call>", "so</tool_call>"), None),
    (Glm(), f"<tool_call>{HERMES_ROME}", None),
    (MiniMax(), MINIMAX, [ROME, NOW]),
    (MiniMax(), f"Yes. {MINIMAX} And {MINIMAX}", ["Yes.", ROME, NOW, "And", ROME, NOW]),
    (MiniMax(), MINIMAX.replace("</invoke>\n<", "</invoke>\nso <"), None),
    (MiniMax(), MINIMAX.replace('name="city"', 'nam="city"'), None),
    (DeepSeek(), DEEPSEEK, [ROME, NOW]),
    (DeepSeek(), DEEPSEEK.removesuffix(CALLS_END), [ROME, NOW]),
    (DeepSeek(), DEEPSEEK_V31, [ROME, NOW]),
    (DeepSeek(), DEEPSEEK.replace('"Rome"}', '"Rome"'), None),
    (Kimi(), KIMI, [ROME, NOW]),
    (Kimi(), f"Yes. {KIMI} So.", ["Yes.", ROME, NOW, "So."]),
    (Kimi(), KIMI.replace("functions.now:1", "my/now.v2:12"), [ROME, CallPart("my/now.v2", "{}")]),
    (Kimi(), KIMI.replace("functions.now:1", "call_1"), None),  # no name
    (Kimi(), KIMI.replace('"Rome"}', '"Rome"'), None),
    (Gemma4(), GEMMA_ROME, [ROME]),
    (Gemma4(), f"Yes.{GEMMA_ROME}{GEMMA_ROME} So.", ["Yes.", ROME, ROME, "So."]),
    (Gemma4(), GEMMA_ROME.replace("Rome", '{"a": [b:'), [CallPart("weather", '{"city":"{\\"a\\": [b:"}')]),
    (Gemma4(), '<|tool_call>call:now{a:[1,{b:<|"|>x<|"|>,c-d:true}],e:null}<tool_call|>',
     [CallPart("now", '{"a":[1,{"b":"x","c-d":true}],"e":null}')]),
    (Gemma4(), GEMMA_ROME.replace('<|"|>}', "}"), None),
    (Gemma4(), GEMMA_ROME.replace("call:", ""), None),
    (Harmony(), ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', [ROME]),
    (Harmony(), 'So. <|channel|>commentary to=functions.now <|message|>{} and', ["So.", NOW, "and"]),
    (Harmony(), '<|channel|>commentary to=functions.now <|message|>', None),
    (Harmony(), '<|channel|>commentary to=browser.open <|message|>{}', None),
]  # fmt: skip
THINK = Marks(("<think>",), "</think>")
CHANNEL = Marks(("<|channel>thought",), "<channel|>")
# Of Ministral 3, MiniMax M3, Seed-OSS and Apertus: each mark is a token.
TOKENS = [("[THINK]", "[/THINK]"), ("<mm:think>", "</mm:think>"), ("<seed:think>", "</seed:think>"),
          ("<|inner_prefix|>", "<|inner_suffix|>")]  # fmt: skip
BRACKETS, MINIMAX_M3, *_ = PAIRS = [
    Marks((start,), end, (end,) if start == "<mm:think>" else ()) for start, end in TOKENS
]
# Marks, the end of the prompt, the model's text, its thinking, its answer.
THINKING = [
    (THINK, "assistant\n", "<think>\nlet me "
                           "see\n\nyes\n</think>\n\nSunny.\n", "let me see\n\nyes", "Sunny.\n"),
    (THINK, "assistant\n", "\n <think>a</think>b", "a", "b"),
    (THINK, "assistant\n<think>\n", "let me see\n</think>\n\nSunny.", "let me see", "Sunny."),
    (THINK, "assistant\n<think>\n\n</think>\n\n", "Sunny.", "", "Sunny."),
    (THINK, "assistant\n", "Sunny.", "", "Sunny."),
    (THINK, "assistant\n", "  Sunny <think> and </think>.", "", "  Sunny <think> and </think>."),
    (THINK, "<think> in the question\nassistant\n", "No.", "", "No."),
    (THINK, "assistant\n", "<think>a < b </thin k\n", "a < b </thin k", ""),
    (THINK, "assistant\n", "<think>a</thi", "a</thi", ""),
    (THINK, "assistant\n", "<thin", "", "<thin"),
    (THINK, "assistant\n", "<think>\n\n</think>\n\nSunny.", "", "Sunny."),
    (THINK, "assistant\n", "<think>a</think>\n<think>b</think>\nSunny.", "ab", "Sunny."),
    (CHANNEL, "<|turn>model\n", "<|channel>thought\nhm\n<channel|>Sunny.", "hm", "Sunny."),
    (HARMONY, "<|start|>assistant",
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Sunny.", "hm", "Sunny."),
    (HARMONY, "<|start|>assistant", "<|channel|>final<|message|>Sunny.", "", "Sunny."),
    *((marks, "x", f"{marks.starts[0]}a [b]\n\nc{marks.end}Sunny.", "a [b]\n\nc", "Sunny.") for marks in PAIRS),
    *((marks, f"x{marks.starts[0]}", f"hm{marks.end}\n\nSunny.", "hm", "Sunny.") for marks in PAIRS),
    (BRACKETS, "[/INST]", "The mark [THINK] begins it.", "", "The mark [THINK] begins it."),
    (MINIMAX_M3, "x", "</mm:think>Sunny </mm:think>.", "", "Sunny </mm:think>."),  # it did not think
    (THINK, "x", "</think>Sunny.", "", "</think>Sunny."),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One with marks of thinking."""
    folder = tmp_path_factory.mktemp("parts")
    return make_tokenizer(folder, "qwen3", extra_special_tokens=["<think>", "</think>"])


@pytest.fixture(scope="module")
def thinkers(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[Marks, Tokenizer]:
    """Tokenizers with each family's marks of thinking."""
    made = {THINK: tokenizer}
    several = [(CHANNEL, ["<|channel>", "<channel|>"]), (HARMONY, [*HARMONY_TOKENS])]
    for marks, tokens in [*several, *((marks, [marks.starts[0], marks.end]) for marks in PAIRS)]:
        folder = tmp_path_factory.mktemp("thinker")
        made[marks] = make_tokenizer(folder, "qwen3", extra_special_tokens=tokens)
        assert marks_of(made[marks]) == marks
    return made


def joined(parts: list[AnswerPart]) -> list[Any]:
    """Parts, with the pieces of a text put together, in the form of CASES."""
    found: list[Any] = []
    for is_text, run in groupby(
        parts, lambda part: (isinstance(part, TextPart), getattr(part, "thinking", False))
    ):
        pieces = list(run)
        if not is_text[0]:
            found += pieces
            continue
        assert all(part.text for part in pieces)
        text = "".join(part.text for part in pieces)
        found.append(("thinking", text) if is_text[1] else text)
    return found


def split(splitter: AnswerParts, text: str, sizes: random.Random | None) -> list[AnswerPart]:
    """The parts of a text that comes in pieces; of one character each without ``sizes``."""
    parts: list[AnswerPart] = []
    place = 0
    while place < len(text):
        size = 1 if sizes is None else sizes.randrange(1, 12)
        parts += splitter.add(text[place : place + size])
        place += size
    return [*parts, *splitter.finish()]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_pieces_of_any_size(
    tokenizer: Tokenizer, form: ToolFormat, text: str, expected: list[Any] | None
) -> None:
    """None: the answer is text as it is."""
    expected = ([text] if text else []) if expected is None else expected
    for seed in range(12):
        splitter = AnswerParts(tokenizer, "assistant\n", TOOLS, form)
        pieces = random.Random(seed) if seed else None
        assert joined(split(splitter, text, pieces)) == expected, seed
    whole = AnswerParts(tokenizer, "assistant\n", TOOLS, form)
    assert joined([*whole.add(text), *whole.finish()]) == expected


@pytest.mark.parametrize(("marks", "prompt", "text", "thinking", "answer"), THINKING)
def test_thinking_in_pieces_of_any_size(
    thinkers: dict[Marks, Tokenizer], marks: Marks, prompt: str, text: str, thinking: str, answer: str
) -> None:
    for seed in range(30):
        parts = split(AnswerParts(thinkers[marks], prompt), text, random.Random(seed) if seed else None)
        found = [part for part in parts if isinstance(part, TextPart)]
        assert "".join(part.text for part in found if part.thinking) == thinking
        assert "".join(part.text for part in found if not part.thinking) == answer


@pytest.mark.parametrize(
    "form", [Hermes(), QwenCoder(), Llama3(), Mistral(), MistralArgs()], ids=lambda form: form.name
)
def test_random_answers(tokenizer: Tokenizer, form: ToolFormat) -> None:
    rng = random.Random(form.name)
    call = CALLS[form.name]
    bare = [f"\n{BARE_ROME}", f"{BARE_NOW}\n</tool_call>"] if form.head else []
    marks = [
        *form.starts,
        *bare,
        "</tool_call>",
        "{",
        '{"name": ',
        "[ARGS]",
        "<function=",
        "</function>",
        '"',
        "}",
    ]
    words = [" ", "\n", "so ", "a < b", "[", "\\", "é", "<think>", "</think>", ""]

    def piece() -> str:
        wrong = call.replace("weather", rng.choice(["wether", "now", ""]))
        word = (rng.choice(words) for _ in range(3))
        return rng.choice([call, call[: rng.randrange(len(call))], wrong, rng.choice(marks), *word])

    called = plain = 0
    for _ in range(count(300, 10_000)):
        text = "".join(piece() for _ in range(rng.randrange(9)))
        text = f"<think>{text}</think>\n{text}" if rng.random() < 0.2 else text
        whole = AnswerParts(tokenizer, "", TOOLS, form)
        expected = joined([*whole.add(text), *whole.finish()])
        assert joined(split(AnswerParts(tokenizer, "", TOOLS, form), text, rng)) == expected, text
        found = [part for part in expected if isinstance(part, CallPart)]
        # A value of Qwen3-Coder's form goes on to the mark that ends it, whatever begins in it.
        assert form.name == "qwen3_coder" or all(part.arguments == ROME.arguments for part in found)
        called += bool(found)
        if not found and "<think>" not in text:
            assert expected == ([text] if text else []), text
            plain += 1
    assert min(called, plain) > 50


def test_what_is_certain_comes_at_once(tokenizer: Tokenizer) -> None:
    splitter = AnswerParts(tokenizer, "assistant\n", TOOLS, Hermes())
    assert splitter.add("Let me") == [TextPart("Let me")]
    assert splitter.add(" see. ") == [TextPart(" see.")]
    assert splitter.add("a <to") == [TextPart(" a")]
    assert splitter.add("o> b\n<tool_call>") == [TextPart(" <too> b")]
    assert splitter.add('\n{"name": "now", "arguments": {}') == []
    assert splitter.add("}\n</tool_") == []
    assert splitter.add("call>\n") == [NOW]
    assert splitter.add("<tool_call> is a mark") == [TextPart("<tool_call>"), TextPart(" is a mark")]
    assert splitter.add('\n<tool_call>\n{"nam') == []
    assert splitter.add("ing") == [TextPart("\n<tool_call>\n{"), TextPart('"naming')]
    assert splitter.finish() == []
    splitter = AnswerParts(tokenizer, "assistant\n", TOOLS, QwenCoder())
    assert splitter.add("<func") == []
    assert joined(splitter.add("tion=w>, <function=weather>.")) == ["<function=w>, <function=weather>."]
    assert splitter.add("\n<function=weather") == []
    assert joined(splitter.add("> takes a city")) == ["\n<function=weather> takes a city"]
    assert splitter.add(f"\n{BARE_NOW}\n") == []
    assert splitter.add("</tool_call>") == [NOW]
    splitter = AnswerParts(tokenizer, "assistant\n")
    assert splitter.add("<think>") == []
    assert splitter.add("one") == [TextPart("one", True)]
    assert splitter.add("\n") == []
    assert splitter.add("two </") == [TextPart("\ntwo ", True)]
    assert splitter.add("think>\n\nSun") == [TextPart("Sun")]


@pytest.mark.parametrize("form", [Hermes(), Llama3(), Mistral(), MistralArgs()], ids=lambda form: form.name)
def test_a_forced_call_that_is_cut_anywhere_is_no_text(tokenizer: Tokenizer, form: ToolFormat) -> None:
    thought, text = "<think>hm</think>", f"\n\n{CALLS[form.name]}"
    calls = []
    for end in range(len(text) + 1):
        splitter = AnswerParts(tokenizer, "assistant\n", TOOLS, form, only_calls=True)
        said, *calls = joined([*splitter.add(thought + text[:end]), *splitter.finish()])
        assert said == ("thinking", "hm")
        assert calls in ([], [ROME])  # of some forms a call is whole before its end mark
    assert calls == [ROME]


@pytest.mark.parametrize(
    ("form", "begun", "more"),
    [
        (Hermes(), "<tool_call>", "    "),
        (Hermes(), HERMES_ROME.removesuffix("</tool_call>"), "\n\n\n\n"),
        (QwenCoder(), CODER_ROME.removesuffix("</tool_call>"), "    "),
        (QwenCoder(), "<tool_call><function=", "name"),
    ],
)
def test_a_call_that_goes_on_without_end(
    tokenizer: Tokenizer, form: ToolFormat, begun: str, more: str
) -> None:
    """The server's loop reads it token by token: 16,000 tokens of blanks once took it 34 s."""
    parts = AnswerParts(tokenizer, "", TOOLS, form)
    with at_most(3):
        parts.add(begun)
        for _ in range(10_000):
            parts.add(more)
        parts.finish()


def test_a_text_that_is_no_call_comes_before_it_ends(tokenizer: Tokenizer) -> None:
    splitter = AnswerParts(tokenizer, "assistant\n", TOOLS, Llama3())
    assert splitter.add('{"nam') == []
    assert joined(splitter.add('es": ["An')) == ['{"names": ["An']
    assert splitter.add('n"') == [TextPart('n"')]


@pytest.mark.parametrize("form", [None, Hermes()])
def test_without_tools_all_is_text_at_once(tokenizer: Tokenizer, form: ToolFormat | None) -> None:
    splitter = AnswerParts(tokenizer, "assistant\n<think>\n", (), form)
    assert splitter.add("hm</think>\n\n") == [TextPart("hm", True)]
    assert splitter.add(f"{HERMES_ROME} \n") == [TextPart(f"{HERMES_ROME} \n")]
    assert splitter.finish() == []


def test_marks_of_a_template_alone(tmp_path: Path, thinkers: dict[Marks, Tokenizer]) -> None:
    """As of Olmo 3, whose vocabulary has no such tokens. A family's own marks come before them."""
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    for folder, templates in (("one", template), ("two", [{"name": "tool_use", "template": template}])):
        tokenizer = make_tokenizer(tmp_path / folder, "olmo2", chat_template=templates)
        assert marks_of(tokenizer) == THINK
        splitter = AnswerParts(tokenizer, "x<think>")
        assert [*splitter.add("hm</think>Sunny."), *splitter.finish()] == [
            TextPart("hm", True),
            TextPart("Sunny."),
        ]
    assert marks_of(make_tokenizer(tmp_path / "none", "olmo2")) is None
    both = make_tokenizer(
        tmp_path / "both", "qwen3", extra_special_tokens=["<think>", "</think>", *TOKENS[1]]
    )
    assert marks_of(both) == MINIMAX_M3
    thinkers[HARMONY].chat_template = template
    assert marks_of(thinkers[HARMONY]) == HARMONY


def test_without_marks_of_thinking(pocket: tuple[object, Tokenizer]) -> None:
    assert marks_of(pocket[1]) is None
    splitter = AnswerParts(pocket[1], "assistant\n", TOOLS, Hermes())
    assert joined([*splitter.add(f"<think>a</think>{HERMES_ROME}"), *splitter.finish()]) == [
        "<think>a</think>",
        ROME,
    ]


@pytest.mark.parametrize(
    ("family", "form", "tokens"),
    [
        ("qwen3", Hermes(), ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
        ("llama3", Llama3(), ["<|python_tag|>"]),
        ("mistral", Mistral(), ["[TOOL_CALLS]"]),
    ],
)
def test_marks_that_are_special_tokens(
    tmp_path: Path, family: str, form: ToolFormat, tokens: list[str]
) -> None:
    made = make_tokenizer(tmp_path, family, extra_special_tokens=tokens)
    ids = made.encode(f"Yes.{CALLS[form.name]}", add_special_tokens=False)
    assert made.convert_tokens_to_ids(form.starts[0]) in ids
    stream = TextStream(made, splitter=AnswerParts(made, "assistant\n", TOOLS, form))
    parts = [part for token in ids for part in stream.add(token)]
    assert joined([*parts, *stream.finish()]) == ["Yes.", ROME]


def test_text_that_may_begin_a_stop_string_comes_before_a_call(pocket: Any) -> None:
    ids = pocket[1].encode(f"Yes{CALLS['hermes']}", add_special_tokens=False)
    stream = TextStream(pocket[1], ["Yesterday"], AnswerParts(pocket[1], "assistant\n", TOOLS, Hermes()))
    parts = [part for token in ids for part in stream.add(token)]
    assert joined([*parts, *stream.finish()]) == ["Yes", ROME]
    assert stream.stop is None


def test_stop_strings_are_looked_for_in_what_is_said(pocket: Any) -> None:
    """Thinking counts only up to the first text, even if that text is held back."""
    steps: list[list[AnswerPart]] = [
        [],
        [TextPart("stop", thinking=True)],
        [TextPart("st")],
        [TextPart("a", True)],
    ]
    steps += [[TextPart("op")], [TextPart("b")]]
    rest = iter(steps)
    splitter: Any = SimpleNamespace(add=lambda text: next(rest))
    stream = TextStream(pocket[1], ["stop"], splitter)
    found = [(stream.add(5), stream.is_thinking, stream.stop) for _ in steps]
    thought = [[], steps[1], [], steps[3], [], []]
    states = [(None, None), (True, None), (False, None), (False, None), (False, "stop"), (False, "stop")]
    assert found == [(parts, *state) for parts, state in zip(thought, states, strict=True)]
