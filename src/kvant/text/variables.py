"""Variables that a user gives the chat template: only those that it reads, and none of kvant's own."""

import re
from collections.abc import Collection

from kvant.errors import did_you_mean
from kvant.text.tokenizer import REFUSED, Tokenizer

# What a conversation gives the template, or kvant the tokenizer.
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
GIVEN |= {"conversation", "chat_template", *REFUSED}


def check_variables(tokenizer: Tokenizer, names: Collection[str]) -> None:
    """Refuse a variable that is not the user's to set, or that the chat template does not mention."""
    words = mentioned(tokenizer) if names else set()
    for name in names:
        if name in GIVEN:
            raise ValueError(f"has {name[:80]!r}, which kvant sets itself")
        if name not in words:
            raise ValueError(f"has {name[:80]!r}, which the chat template does not mention{did_you_mean(name, words)}")


def mentioned(tokenizer: Tokenizer) -> set[str]:
    """All words of the model's chat templates that can be names."""
    templates = tokenizer.chat_template or ""
    source = templates if isinstance(templates, str) else "\n".join(templates.values())
    return set(re.findall(r"[A-Za-z_]\w*", source))
