"""Adapt a Lark grammar to text inside a JSON string, as in an argument of a call.

Each character of such text is written as itself or as an escape, and no such form begins another. Here each
one is a separate terminal, because the library matches terminals greedily and does not backtrack.
"""

import json
import re

from kvant.errors import GrammarError

ESCAPED = '"\\\b\f\n\r\t'  # characters with a short escape in JSON; other control characters are not allowed
PLAIN = r'[^"\\\x00-\x1f]'
COMMON = {  # terminals of Lark's standard library
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
}
IMPORT = re.compile(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?")
# The ends are optional, so that matching is linear.
PIECE = re.compile(
    r'(?P<comment>(?://|#)[^\n]*)|(?P<text>"(?:\\.|[^"\\])*"?)(?P<fold>i?)'
    r"|/(?P<regex>(?:\\.|[^/\\])*)(?:/(?P<flags>\w*))?|(?P<terminal>\b_*[A-Z]\w*)"
    r"|(?P<other>%\w+|\.\.|[<@]\S*|\w\[)",
    re.DOTALL,
)
ATOM = re.compile(
    r"(?P<group>\((?:\?(?:P?<\w+>|:))?)|(?P<close>\))|(?P<bar>\|)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})\??"
    r"|(?P<code>\\x\{[0-9a-fA-F]+\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4})"
    r"|(?P<set>\\[dDwWsS]|\[\^?\]?(?:\\.|[^\]\\])*\]?|\.)"
    r"|(?P<char>\\[nrtfv]|\\[^a-zA-Z0-9]|[^\\^$])|(?P<other>.)",
    re.DOTALL,
)
NAMED = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\f": "\f", "\\v": "\v"}
RUST = re.compile(r"(?<!\\)\[|&&|--|~~|\\[pPux]")  # syntax of sets in Rust that Python does not have


def quoted(source: str) -> str:
    """Return a grammar for the same texts as JSON writes them between quotes; refuse unsupported syntax."""
    return PIECE.sub(_piece, IMPORT.sub(_imported, source))


def _imported(match: re.Match[str]) -> str:
    if match[1] not in COMMON:
        raise _refused(match[0])
    return f"{match[2] or match[1]}: /{COMMON[match[1]]}/"


def _piece(match: re.Match[str]) -> str:
    if match["comment"]:
        return ""
    if match["terminal"]:
        return f"terminal_{match[0].lower()}"  # now a rule, since a terminal would be a single match
    if match["text"]:
        try:
            text = json.loads(match["text"])
        except ValueError:
            raise _refused(match["text"]) from None
        return f"({' '.join(_literal(char, match['fold']) for char in text)})" if text else '""'
    if match["other"]:
        raise _refused(match["other"])
    return _expression(match["regex"], match["flags"] or "")


def _expression(regex: str, flags: str) -> str:
    """Convert a regular expression to the right side of a rule."""
    if not set(flags) <= set("is"):
        raise _refused(f"/{regex}/{flags}")
    fold = "i" if "i" in flags else ""
    pieces = ["("]
    for match in ATOM.finditer(f"{regex})"):
        atom = match[0]
        begins = pieces[-1] in ("(", "|")
        if match["other"] or (match["times"] and begins):
            raise _refused(atom)
        if match["times"]:
            pieces[-1] += match["times"]
        elif match["close"] or match["bar"]:
            pieces += ['""', atom] if begins else [atom]
        elif match["group"]:
            pieces.append("(")
        elif match["set"]:
            text = atom if atom != "." else r"[\s\S]" if "s" in flags else r"[^\n]"
            pieces.append(f"/{_set(text)}/{fold}")
        else:
            char = chr(int(atom[2:].strip("{}"), 16)) if match["code"] else NAMED.get(atom, atom[-1])
            pieces.append(_literal(char, fold))
    return " ".join(pieces)


def _set(members: str) -> str:
    """Convert a set of characters to plain members and escaped ones."""
    if members[0] == "[" and RUST.search(members[1:]):
        raise _refused(members)
    try:
        member = re.compile(members)
    except re.error:
        raise _refused(members) from None
    plain = f"[{members}&&{PLAIN}]"
    others = [re.escape(_written(char)) for char in ESCAPED if member.fullmatch(char)]
    return f"(?:{plain}|(?-i:{'|'.join(others)}))" if others else plain


def _literal(char: str, fold: str) -> str:
    """Return a terminal for one character."""
    return json.dumps(_written(char), ensure_ascii=False) + (fold if char.isalpha() else "")


def _written(char: str) -> str:
    return json.dumps(char, ensure_ascii=False)[1:-1]


def _refused(text: str) -> GrammarError:
    return GrammarError(f"the grammar has {text[:40]!r}, which is not supported inside a call's JSON")
