"""A grammar in Lark's language for text that is written inside a string of JSON, as an argument of a call is.

A character of such text is itself or an escape, and none begins another. Every one is a terminal of its own
here: the library reads terminals by the longest match, and does not go back where two of them begin alike.
"""

import json
import re

from kvant.errors import GrammarError

ESCAPED = '"\\\b\f\n\r\t'  # what JSON writes in a short way; other control characters are not written at all
PLAIN = r'[^"\\\x00-\x1f]'
COMMON = {  # terminals of Lark's own library
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
# Their ends may be missing, so that nothing is read twice.
PIECE = re.compile(
    r'(?P<comment>(?://|#)[^\n]*)|(?P<text>"(?:\\.|[^"\\])*"?)(?P<fold>i?)'
    r"|/(?P<regex>(?:\\.|[^/\\])*)(?:/(?P<flags>\w*))?|(?P<terminal>\b_*[A-Z]\w*)"
    r"|(?P<other>%\w+|\.\.|[<@]\S*|\w\[)",
    re.DOTALL,
)
ATOM = re.compile(
    r"(?P<group>\((?:\?(?:P?<\w+>|:))?)|(?P<close>\))|(?P<bar>\|)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})\??"
    r"|(?P<code>\\x\{[0-9a-fA-F]+\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4})"
    r"|(?P<set>\\[dDwWsS]|\[\^?\]?(?:\\.|[^\]\\])*\]?|\.)|(?P<char>\\[nrtfv]|\\[^a-zA-Z0-9]|[^\\^$])|(?P<other>.)",
    re.DOTALL,
)
NAMED = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\f": "\f", "\\v": "\v"}
RUST = re.compile(r"(?<!\\)\[|&&|--|~~|\\[pPux]")  # in a set, and not in Python's


def quoted(source: str) -> str:
    """A grammar whose texts are those of another one, as JSON writes them between quotes. Others are
    refused.
    """
    return PIECE.sub(_piece, IMPORT.sub(_imported, source))


def _imported(found: re.Match[str]) -> str:
    if found[1] not in COMMON:
        raise _refused(found[0])
    return f"{found[2] or found[1]}: /{COMMON[found[1]]}/"


def _piece(found: re.Match[str]) -> str:
    if found["comment"]:
        return ""
    if found["terminal"]:
        return f"terminal_{found[0].lower()}"  # a rule: a terminal would be one match
    if found["text"]:
        try:
            text = json.loads(found["text"])
        except ValueError:
            raise _refused(found["text"]) from None
        return f"({' '.join(_literal(char, found['fold']) for char in text)})" if text else '""'
    if found["other"]:
        raise _refused(found["other"])
    return _expression(found["regex"], found["flags"] or "")


def _expression(regex: str, flags: str) -> str:
    """A regular expression as the right side of a rule."""
    if not set(flags) <= set("is"):
        raise _refused(f"/{regex}/{flags}")
    fold = "i" if "i" in flags else ""
    pieces = ["("]
    for found in ATOM.finditer(f"{regex})"):
        atom = found[0]
        begins = pieces[-1] in ("(", "|")
        if found["other"] or (found["times"] and begins):
            raise _refused(atom)
        if found["times"]:
            pieces[-1] += found["times"]
        elif found["close"] or found["bar"]:
            pieces += ['""', atom] if begins else [atom]
        elif found["group"]:
            pieces.append("(")
        elif found["set"]:
            text = atom if atom != "." else r"[\s\S]" if "s" in flags else r"[^\n]"
            pieces.append(f"/{_set(text)}/{fold}")
        else:
            char = chr(int(atom[2:].strip("{}"), 16)) if found["code"] else NAMED.get(atom, atom[-1])
            pieces.append(_literal(char, fold))
    return " ".join(pieces)


def _set(members: str) -> str:
    """A set of characters: those that JSON writes as they are, and the others in its way."""
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
    """A terminal that is one character."""
    return json.dumps(_written(char), ensure_ascii=False) + (fold if char.isalpha() else "")


def _written(char: str) -> str:
    return json.dumps(char, ensure_ascii=False)[1:-1]


def _refused(text: str) -> GrammarError:
    return GrammarError(f"the grammar has {text[:40]!r}, which cannot be held inside a call's JSON")
