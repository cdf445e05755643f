"""Grammars by themselves: what they let through is right, the rest is refused, and compiling one has an
end.
"""

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from support.counts import count
from support.grammars import accepts, allowed, closing, draw, spelled
from support.processor_time import at_most
from support.schemas import problem, random_root
from support.tokenizers_made import loaded, write_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from kvant.errors import GrammarError
from kvant.text import grammar as grammar_module
from kvant.text.answer_parts import AnswerParts
from kvant.text.call_form import ToolFormat
from kvant.text.grammar import Grammars, build_tool_grammar
from kvant.text.grammar_source import FORMATS
from kvant.text.stream import CallPart, TextPart
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import Hermes, Llama3, Mistral, MistralArgs, QwenCoder

PADDING = 20  # ids of the model that the tokenizer does not have
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


@pytest.fixture(scope="module")
def pocket_grammars(pocket: tuple[Any, Tokenizer]) -> Grammars:
    return Grammars(pocket[1], len(pocket[1]) + PADDING)


def _made(folder: Path, family: str, marks: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of a family with further tokens; tokenizer.json alone has them."""
    write_tokenizer(folder, family)
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.add_tokens([AddedToken(mark, special=mark.startswith("["), normalized=False) for mark in marks])
    library.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return loaded(folder)


@pytest.mark.parametrize("family", ["pocket", "qwen2", "llama3", "mistral", "llama2"])
def test_random_schemas(pocket: tuple[Any, Tokenizer], tmp_path: Path, family: str) -> None:
    tokenizer = pocket[1] if family == "pocket" else _made(tmp_path, family, MARKS)
    grammars = Grammars(tokenizer, len(tokenizer) + PADDING)
    for seed in range(count(40, 3000) if family == "pocket" else count(6, 300)):
        rng = random.Random(seed)
        schema = random_root(rng)
        tokens = draw(grammars.compile("json_schema", schema), rng, closing(tokenizer))
        assert tokens is not None, f"{schema}: an answer without end"
        text = tokenizer.decode(tokens)
        wrong = problem(json.loads(text), schema)
        assert wrong is None, f"{schema}: {text}: {wrong}"
        compact = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
        # numbers may be written in other ways
        assert len(text.replace(" ", "")) >= len(compact.replace(" ", "")) - 8
        assert not set(tokens) & set(tokenizer.mark_ids)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_tokens_that_are_no_text(tmp_path: Path, family: str) -> None:
    tokenizer = _made(tmp_path, family, MARKS)
    tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, 1}
    grammars = Grammars(tokenizer, len(tokenizer) + PADDING)
    grammar = grammars.compile("json_schema", {"type": "string"})
    assert grammar.eos_tokens == tokenizer.eos_token_ids
    matcher = grammar.matcher()
    assert len(matcher.mask()) == len(tokenizer) + PADDING
    for token in tokenizer.encode('"ab c', add_special_tokens=False):
        if tokenizer.decode([token]):
            matcher.take(token)
    inside = set(allowed(matcher.mask()))
    assert len(inside) > 300
    padding = range(len(tokenizer), len(tokenizer) + PADDING)
    assert not inside & {*tokenizer.mark_ids, *tokenizer.eos_token_ids, *padding}
    assert set(tokenizer.convert_tokens_to_ids(MARKS)) <= set(tokenizer.mark_ids)
    matcher.take(tokenizer.convert_tokens_to_ids('"'))
    assert set(allowed(matcher.mask())) == grammar.eos_tokens


def test_spaces_that_were_added_are_text(tmp_path: Path) -> None:
    tokenizer = _made(tmp_path, "qwen2", ["    ", "<x>"])
    assert tokenizer.convert_tokens_to_ids("    ") not in tokenizer.mark_ids
    assert tokenizer.convert_tokens_to_ids("<x>") in tokenizer.mark_ids
    grammar = Grammars(tokenizer, len(tokenizer)).compile("regex", "a {1,9}b")
    spaced = [tokenizer.convert_tokens_to_ids(piece) for piece in ("a", "    ", "b")]
    assert accepts(grammar, spaced)


@pytest.mark.parametrize(
    ("kind", "source", "texts", "refused"),
    [
        ("json_object", "", ['{}', '{"a":[1,{"b":null}]}'], ["[]", '{"a": 1}', "{", '{"a":01}', '{"a":"\t"}', ""]),
        ("json_schema", True, ["3", '"x"', "[]"], ["x", "[ ]"]),
        ("json_schema", {}, ["3", '{"a":1}'], ["nul"]),
        ("json_schema", '{"type": "integer", "x-guidance": {"whitespace_flexible": '
                        'true}}', ["3"], [" 3", "3 "]),
        ("json_schema", {"type": "number", "exclusiveMinimum": 9, "maximum": 9.5}, ["9.1", "9.5"], ["9", "9.0", "9.6"]),
        ("json_schema", {"type": "number", "minimum": -2, "exclusiveMaximum": -1}, ["-1.5", "-2"], ["-1", "-1.0"]),
        ("json_schema", {"properties": {"enum": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}}},
         ['{"enum":1.2}'], ['{"enum":1}']),
        # Other properties than those that are listed only where the schema says so, or has parts in several
        # places.
        ("json_schema", {"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
        ("json_schema", {"properties": {"a": {"properties": {"b": {}}}}}, ['{"a":{"b":1}}', "3"], ['{"a":{"c":1}}']),
        ("json_schema", {"type": "object", "properties": {}, "additionalProperties": True}, ['{"a":1}'], ["1"]),
        ("json_schema", {"type": "object", "properties": {}, "required": ["a"]}, ['{"a":1}'], ["{}"]),
        ("json_schema", {"type": "object", "properties": {"a": {}}, "anyOf": [{"properties": {"b": {"type": "null"}}}]},
         ['{"a":1,"b":null}'], ['{"b":1}']),
        ("json_schema", {"type": "object", "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
         ['{"a":1,"b":null}'], ["[]"]),
        ("json_schema", {"enum": [{"exclusiveMinimum": 1}]}, ['{"exclusiveMinimum":1}'], ['{"minimum":1}']),
        # A listed name in another spelling would be the same name, with the schema of others.
        ("json_schema", {"properties": {"a": {"const": 0}}, "required": ["a"], "additionalProperties": {"const": 1}},
         ['{"a":0}', '{"a":0,"b":1}'], [r'{"a":0,"\u0061":1}', '{"a":0,"a":1}']),
        ("json_schema", {"patternProperties": {"^é$": {"type": "null"}}, "additionalProperties": {"const": 1}},
         ['{"é":null,"b":1}'], [r'{"é":null,"\u00e9":1}']),
        ("json_schema", {"type": "object", "properties": {"t": {"type": "string"}}}, [r'{"t":"\u001b"}'], []),
        ("json_schema", {"type": "object", "additionalProperties": {"const": 1}, "required": ["a"], "minProperties": 2},
         ['{"a":1,"b":1}'], ['{"a":1}', '{"a":1,"a":1}']),
        ("json_schema", {"type": "object", "additionalProperties": {"const": 1}, "minProperties": 1},
         ['{"a":1}'], ["{}"]),
        ("json_schema", {"properties": {"a": {"enum": ["\x1b", "\x7f"]}}, "required": ["a"]},
         [r'{"a":"\u001b"}', r'{"a":"\u007f"}'], ['{"a":"\x7f"}']),
        ("json_schema", {"const": 1, "default": 2**63, "examples": [2**64]}, ["1"], ["2"]),
        ("json_schema", {"enum": [2**62, 10**18]}, [str(2**62), str(10**18)], [str(2**62 + 1)]),
        # Formats hold where they are known; any other is an annotation, as the specification says.
        ("json_schema", {"type": "string", "format": "date"}, ['"2026-11-30"'], ['"2026-11-31"', '"x"']),
        ("json_schema", {"type": "string", "format": "path", "maxLength": 4}, ['"/tmp"'], ['"/home"']),
        ("json_schema", {"format": "uri-reference"}, ['"../x"', "3"], ["x"]),
        ("json_schema", {"properties": {"format": {"const": "path"}}, "required": ["format"]},
         ['{"format":"path"}'], ['{"format":"x"}']),
        ("json_schema", {"enum": [{"format": "path"}]}, ['{"format":"path"}'], ["{}"]),
        ("regex", r"[a-c]+/\d{2}", ["ab/12", "c/00"], ["/12", "ab/1", "ab/123", "xab/12"]),
        ("regex", "", [""], ["a"]),
        ("regex", "é🦊?", ["é", "é🦊"], ["e", "🦊"]),
        ("grammar", 'start: "a" start "b" |', ["", "ab", "aabb"], ["a", "aab", "abab"]),
        ("grammar", 'start: x "!"\nx[max_tokens=2]: /a*/', ["!", "a!"], ["b!"]),
    ],
)  # fmt: skip
def test_what_it_lets_through(
    pocket: tuple[Any, Tokenizer], pocket_grammars: Grammars, kind: Any, source: Any, texts: Any, refused: Any
) -> None:
    tokenizer = pocket[1]
    grammar = pocket_grammars.compile(kind, source)
    for text in [*texts, *refused]:
        for tokens in (tokenizer.encode(text, add_special_tokens=False), spelled(tokenizer, text)):
            assert accepts(grammar, tokens) is (text in texts), text


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"x-guidance": {"lenient": True}, "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"not": {}}, "not"),
        ("json_schema", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf .*not supported$"),
        ("json_schema", {"$ref": "http://example.com/x"}, "http://example.com/x"),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json_schema", {"type": "string", "format": 3}, "got 3"),
        ("json_schema", {"patternProperties": {"^a": {}}, "minProperties": 2}, "minProperties is 2"),
        ("json_schema", {"type": "object", "required": ["a"], "minProperties": 3}, "minProperties is 3.*at "
                                                                                   "most 2"),
        ("json_schema", {"allOf": [{"minProperties": 2}, {"additionalProperties": {}}]}, "minProperties is "
                                                                                         "2"),
        ("json_schema", {"const": [{"a": 2**53 + 1}]}, "9007199254740993, which cannot be represented exactly"),
        ("json_schema", {"enum": [10**400]}, "cannot be represented exactly"),
        ("json_schema", {"properties": {"a": {"const": "\x7f"}}, "additionalProperties": {}}, "control character"),
        ("json_schema", {"required": ["a"], "additionalProperties": {"enum": [["\x1b"]]}}, "control character"),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text satisfies it"),
        ("json_schema", {"type": "object", "required": "é" * 80}, "llguidance failed: "),
        ("regex", r"[^\x00-\x{10FFFF}]", "no text satisfies it"),
        ("grammar", 'start: A\nA: "a" & "b"', "no text satisfies it"),
        ("json_schema", {"properties": {f"p{i}": {} for i in range(800)}}, "max is"),
        ("json_schema", reduce(lambda made, _: {"items": made}, range(2000), {}), "nested"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", False, "expected an object"),
        ("json_schema", {"description": "x" * 70_000}, "65536"),
        ("regex", "(a", "unclosed group"),
        ("regex", "é" * 11_000, "65536"),
        ("grammar", "", "no start rule"),
        ("grammar", '{"grammars": []}', "expecting rule"),
        ("grammar", "start: <|nope|>", "unknown special token"),
        ("grammar", "start: a\na[temperature=0.3]: /b/", "temperature"),
        ("grammar", 3, "expected text"),
        ("tool_calls", "x", "tool_calls"),
    ],
)  # fmt: skip
def test_sources_that_are_refused(pocket_grammars: Grammars, kind: Any, source: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        pocket_grammars.compile(kind, source)
    said = str(caught.value)
    assert said.isprintable()
    assert kind in said
    assert not re.search(
        r": [A-Z]\w+$|Enable|backtrace|f64", said
    )  # no bare word of the library, no hint at its options


def test_which_formats_hold(pocket: tuple[Any, Tokenizer], pocket_grammars: Grammars) -> None:
    """All that llguidance knows of those that JSON Schema defines."""
    others = {
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
    }
    for name in FORMATS | others | {"uri-reference", "uri-template"}:
        schema = {"type": "string", "format": name}
        said = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        assert (said == "") is (name in FORMATS), said
        grammar = pocket_grammars.compile("json_schema", schema)
        assert accepts(grammar, spelled(pocket[1], '"?"')) is (name not in FORMATS), name


def test_an_answer_that_cannot_go_on(pocket: tuple[Any, Tokenizer], pocket_grammars: Grammars) -> None:
    grammar = pocket_grammars.compile("grammar", 'start: "a" b\nb: b "c"')
    matcher = grammar.matcher()
    matcher.take(*pocket[1].encode("a", add_special_tokens=False))
    with pytest.raises(GrammarError, match="no text satisfies it, or none from here on"):
        matcher.mask()


def test_compiling_has_an_end(pocket: tuple[Any, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of these take minutes at least. The next grammar compiles as ever."""
    monkeypatch.setattr(grammar_module, "TIME_LIMIT_S", 0.7)
    grammars = Grammars(pocket[1], len(pocket[1]))
    names = {f"^p{i}$": {"type": "integer"} for i in range(1500)}
    for schema in (
        {"type": "object", "patternProperties": names},
        {"type": "integer", "multipleOf": 1_000_003},
    ):
        with (
            at_most(20),
            pytest.raises(GrammarError, match=r"json_schema cannot be used: it takes longer than 0.7 s"),
        ):
            grammars.compile("json_schema", schema)
    monkeypatch.undo()
    assert accepts(grammars.compile("regex", "a"), pocket[1].encode("a"))


def test_a_grammar_is_kept_for_those_with_the_same_salt(
    pocket: tuple[Any, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(pocket[1], len(pocket[1]))
    texts = [grammars.document("regex", f"a{{{number}}}") for number in range(1, 5)]
    monkeypatch.setattr(grammar_module, "CACHE_BYTES", sum(map(len, texts[:2])) + 9)
    made = [grammars.compile_document("regex", text, b"one") for text in texts[:2]]
    assert [grammars.compiled(text, b"one") for text in texts[:2]] == made
    assert (
        grammars.compiled(texts[0])
        is grammars.compiled(texts[0], b"two")
        is grammars.compiled(texts[2], b"one")
        is None
    )
    grammars.compiled(texts[0], b"one")  # it was used last
    third = grammars.compile_document("regex", texts[2], b"one")
    assert [grammars.compiled(text, b"one") for text in texts] == [made[0], None, third, None]
    for _ in range(2):  # an answer changes nothing of what is kept
        assert accepts(third, pocket[1].encode("aaa"))


def test_from_many_threads(pocket: tuple[Any, Tokenizer]) -> None:
    grammars = Grammars(pocket[1], len(pocket[1]))
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda i: grammars.compile("regex", f"a{{{i}}}"), range(1, 9)))
    for i, grammar in enumerate(made, start=1):
        assert accepts(grammar, pocket[1].encode("a") * i)


def test_tools_and_tokenizers_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="qwen3_coder"):
        build_tool_grammar(QwenCoder(), TOOLS)
    with pytest.raises(GrammarError, match="no tools"):
        build_tool_grammar(Hermes(), [])
    write_tokenizer(tmp_path, "wordpiece")
    with pytest.raises(GrammarError, match="do not stand for bytes"):
        Grammars(loaded(tmp_path), 600).compile("json_object")
    write_tokenizer(tmp_path / "no end", "qwen2")
    endless = loaded(tmp_path / "no end")
    endless.eos_token_ids = ()
    with pytest.raises(GrammarError, match="no end-of-text token"):
        Grammars(endless, 900).prepare()


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["°C", "°F"]},
                   "n": {"$ref": "#/$defs/N"}},
    "required": ["city", "n"], "additionalProperties": False,
    "$defs": {"N": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip
SAY = {"properties": {"t": {"type": "string", "maxLength": 5}}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "say-it", "parameters": SAY}},
    {"type": "function", "function": {"name": "now"}},
]
FORMS = (Hermes(), Mistral(), Mistral(space=""), MistralArgs(), Llama3())
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}{len(form.writing.begin)}")


@pytest.fixture(scope="module", params=["pocket", "qwen2", "mistral"])
def calling(
    request: Any, pocket: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Grammars]:
    """Marks of calls are text in pocket's vocabulary; in the others they are tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = pocket[1] if request.param == "pocket" else _made(folder, request.param, MARKS)
    return tokenizer, Grammars(tokenizer, len(tokenizer))


def _parts(tokenizer: Tokenizer, form: ToolFormat, text: str) -> list[Any]:
    parts = AnswerParts(tokenizer, "", TOOLS, form)
    return [*parts.add(text), *parts.finish()]


def _call(form: ToolFormat, *calls: tuple[str, str]) -> str:
    writing = form.writing
    begun = [f"{writing.before_name}{name}{writing.before_arguments}{arguments}" for name, arguments in calls]
    return (
        writing.begin + writing.between.join(each + writing.after_arguments for each in begun) + writing.end
    )


@forms
def test_calls_that_have_to_be_made(calling: tuple[Tokenizer, Grammars], form: ToolFormat) -> None:
    tokenizer, grammars = calling
    rng = random.Random(0)
    for tools, parallel in ((TOOLS[:2], False), (TOOLS[:2], True), (TOOLS[1:2], True)):
        grammar = grammars.compile("tool_calls", build_tool_grammar(form, tools, "required", parallel))
        for _ in range(count(4, 300)):
            tokens = draw(grammar, rng, prefer=closing(tokenizer))
            assert tokens is not None
            text = tokenizer.decode(tokens)
            parts = _parts(tokenizer, form, text)
            assert parts, text
            names = {part.name if isinstance(part, CallPart) else part for part in parts}
            assert names <= {tool["function"]["name"] for tool in tools}, text
            assert len(parts) == 1 or parallel
        two = _call(form, ("say-it", "{}"), ("say-it", "{}"))
        assert accepts(grammar, spelled(tokenizer, two)) is (parallel and form.several)


@forms
def test_calls_that_may_be_made(calling: tuple[Tokenizer, Grammars], form: ToolFormat) -> None:
    """Text, and calls in it; the arguments of a strict tool satisfy its schema, others are any object."""
    tokenizer, grammars = calling
    grammar = grammars.compile("tool_calls", build_tool_grammar(form, TOOLS, "auto"))
    good = _call(form, ("get_weather", '{"city": "Rome", "n": 7}'))
    may = ["Let me see.", good, _call(form, ("say-it", '{"whatever": [1]}')), _call(form, ("now", "{}"))]
    if not form.first:
        may.append(f"Let me see.\n{good}")
    wrong = ['{"city": "Rome"}', '{"city": "Rome", "n": 700}', '{"city": "Rome", "n": 7, "x": 1}', "{}"]
    must_not = [_call(form, ("get_weather", each)) for each in wrong] + [_call(form, ("other", "{}"))]
    for text in may + must_not:
        assert accepts(grammar, spelled(tokenizer, text)) is (text in may), text
    rng = random.Random(1)
    for _ in range(count(3, 100)):
        assert draw(grammar, rng, prefer=closing(tokenizer)) is not None


@pytest.mark.parametrize("opened", [False, True], ids=["thinks", "has begun"])
@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [
        ("<think>", "</think>", MARKS),
        ("[THINK]", "[/THINK]", ["[THINK]", "[/THINK]"]),
        ("<think>", "</think>", []),
    ],
    ids=["Qwen3", "Ministral 3", "in words"],
)
def test_thinking_is_free(tmp_path: Path, start: str, end: str, tokens: list[str], opened: bool) -> None:
    tokenizer = _made(tmp_path, "qwen2", tokens)
    if not tokens:  # as Olmo 3, whose template has the marks
        tokenizer.chat_template = "{{ messages[-1].content }}<think>"
    prompt = "<|im_start|>assistant\n" + f"{start}\n" * opened
    grammar = Grammars(tokenizer, len(tokenizer)).compile("json_schema", {"type": "integer"}, prompt)

    def may(text: str) -> bool:
        return accepts(grammar, tokenizer.encode(text, add_special_tokens=False))

    assert may("12") is not opened
    assert may(f"Let me see. {{{end}\n\n12") is opened
    assert not may(f"{end}twelve")
    thinks = may(f"{start}\nLet me see. {{\n{end}\n\n12")
    if not tokens:
        assert thinks  # where thinking has begun, its mark is a word like any other
        return
    assert thinks is not opened
    marks = [tokenizer.encode(mark, add_special_tokens=False)[0] for mark in (start, end)]
    rng = random.Random(0)
    thought = 0
    for _ in range(count(20, 200)):
        drawn = draw(grammar, rng, prefer=[*marks, *closing(tokenizer)])
        assert drawn is not None
        parts = AnswerParts(tokenizer, prompt)
        texts = [
            part
            for part in [*parts.add(tokenizer.decode(drawn)), *parts.finish()]
            if isinstance(part, TextPart)
        ]
        thought += any(part.thinking for part in texts)
        int("".join(part.text for part in texts if not part.thinking))
    assert thought
