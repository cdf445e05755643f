"""Grammars of text inside a call's JSON let through what the grammar of the text does, as JSON writes it."""

import json
import random
from typing import Any

import pytest
from support.counts import count
from support.grammars import accepts, draw, spelled

from kvant.errors import GrammarError
from kvant.text.answer_parts import AnswerParts
from kvant.text.call_form import ToolFormat
from kvant.text.grammar import Grammars, build_tool_grammar
from kvant.text.quoted_lark import ESCAPED, quoted
from kvant.text.stream import CallPart
from kvant.text.tokenizer import Tokenizer
from kvant.text.tool_forms import Hermes, Llama3, Mistral, MistralArgs

PATCH = r"""
start: begin file+ end // as agents give it
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
file: "*** Add File: " name LF added+ | "*** Update File: " name LF change+
name: /(.+)/
added: "+" /(.*)/ LF
change: ("+" | "-" | " ") /(.*)/ LF | ("@@" | "@@ " /(.+)/) LF
%import common.LF
"""
ADDED = '*** Begin Patch\n*** Add File: a "b\\.py\n+print("x\\n")\n+\té 🦊\n*** End Patch\n'
CHANGED = "*** Begin Patch\n*** Update File: +a\n@@ *** End\n-x\n+\n*** End Patch"
WRONG = [
    "",
    "*** Begin Patch\n",
    ADDED.replace("+", "?"),
    CHANGED + "x",
    CHANGED.replace("@@ ", "@@"),
    ADDED[1:],
]
EXPRESSIONS = [
    r'[^a-z"]+', r"\s\S\w*", r'"[^"]*"', r"a\n{2,3}b", r"[\t-z]+", r"\x22\x{5c}\u0061", r"a\fb", r"\/\.\*|[*]",
    r"[\]\\]+", r"\d+|\\", "(?:a|.)+", r"[^\n]", "(a|)b*?", "(?P<x>a|b){1,2}", '(|")+', "é?[^é]", r"\D\W|b{2,}", "",
]  # fmt: skip
GRAMMARS = [
    *(f"start: /{expression or '(?:)'}/" for expression in EXPRESSIONS),
    r'start: /a.\n/s | /B[a-c]/i | "aB"i',
    'start: _A B_2* "" // no "comment\n_A: "\\"" | "\\\\a"\nB_2: WS_INLINE | "5" # b\n%import '
    "common.WS_INLINE",
    'start: x{1,2}\nx: Z | "."\n%import common.ESCAPED_STRING -> Z',
    'start: "a" start "\\n" | ',
]
LETTERS = 'aabBb"\\\n\t \f]/.*5xé'


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.fixture(scope="module")
def grammars(pocket: tuple[Any, Tokenizer]) -> Grammars:
    return Grammars(pocket[1], len(pocket[1]))


@pytest.mark.parametrize("source", GRAMMARS)
def test_the_text_is_the_same(pocket: tuple[Any, Tokenizer], grammars: Grammars, source: str) -> None:
    plain, inside = grammars.compile("grammar", source), grammars.compile("grammar", quoted(source))
    rng, seen = random.Random(0), 0
    texts = ["".join(rng.choices(LETTERS, k=rng.randint(0, 4))) for _ in range(count(150, 5000))]
    drawn = [draw(plain, rng, most=12) for _ in range(20)]
    texts += [pocket[1].decode(tokens) for tokens in drawn if tokens is not None]
    for text in texts:
        if any(char < " " and char not in ESCAPED for char in text):
            continue
        right = accepts(plain, spelled(pocket[1], text))
        assert accepts(inside, spelled(pocket[1], _inside(text))) is right, text
        seen += right
    assert seen


@pytest.mark.parametrize("form", [Hermes(), Mistral(), MistralArgs(), Llama3()], ids=lambda form: form.name)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_that_takes_a_patch(pocket: Any, grammars: Grammars, form: ToolFormat, choice: Any) -> None:
    tokenizer = pocket[1]
    tools = [{"type": "function", "function": {"name": name, "grammar": given, "strict": True}}
             for name, given in (("patch", PATCH), ("other", ""))]  # fmt: skip
    grammar = grammars.compile("tool_calls", build_tool_grammar(form, tools, choice))

    def call(text: str) -> str:
        written, given = form.writing, json.dumps({"input": text}, ensure_ascii=False)
        called = f"{written.before_name}patch{written.before_arguments}{given}{written.after_arguments}"
        return f"{written.begin}{called}{written.end}"

    for text in (ADDED, CHANGED, *WRONG):
        answer = call(text)
        assert accepts(grammar, spelled(tokenizer, answer)) is (text in (ADDED, CHANGED)), text
        parts = AnswerParts(tokenizer, "", tools, form)
        (made,) = [*parts.add(answer), *parts.finish()]
        assert isinstance(made, CallPart)
        assert json.loads(made.arguments) == {"input": text}


@pytest.mark.parametrize(
    "source",
    [
        'start: %json {"type": "object"}', "start: <|im_end|>", "start: @other", r"start: /\p{L}/", "start: /[[a]b]/",
        "start: /^a/", "start: /(?i)a/", r"start: /a\b/", "start: /+a/", "start: /a/x", "start: /[b-a]/",
        'start: "\\x"', 'start: "a".."z"', "a[lazy]: /x/", "%ignore WS\n%import "
                                                           "common.WS", "%import common.C_COMMENT",
        'start: "a', 'start: "a" & "b"', "start: /(a/", "start: other", '%llguidance {"x": 1}\nstart: "a"',
    ],
)  # fmt: skip
def test_what_cannot_be_held(grammars: Grammars, source: str) -> None:
    tools = [{"type": "function", "function": {"name": "patch", "grammar": source}}]
    with pytest.raises(GrammarError) as raised:
        grammars.compile("tool_calls", build_tool_grammar(Hermes(), tools))
    assert "\n" not in str(raised.value)
