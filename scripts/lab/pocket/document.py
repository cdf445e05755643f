"""Documents: what the corpus yields and the trainer reads."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Loss weight of text the model need not learn to write.
PROMPT_WEIGHT = 0.1
#: Loss weight of an answer, the densest signal of the corpus.
ANSWER_WEIGHT = 3.0


@dataclass(frozen=True)
class Turn:
    """One message of a conversation, or the text of a plain document (role "text").

    `parts` cuts the text into pieces, each with its own loss weight; without them `weight` is that of the
    whole. `cut` marks a last turn that was cut off: its end is not learned.
    """

    role: str
    text: str
    weight: float = 1.0
    parts: tuple[tuple[str, float], ...] = ()
    cut: bool = False


@dataclass
class Document:
    """A conversation or a plain text; `kind` names what it teaches."""

    kind: str
    turns: list[Turn] = field(default_factory=list)
    hero: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this is plain text and not a conversation."""
        return self.turns[0].role == "text"

    def ask(self, text: str) -> None:
        """Add a user turn."""
        self.turns.append(Turn("user", text, PROMPT_WEIGHT))

    def reply(self, text: str, weight: float = 1.0) -> None:
        """Add an assistant turn."""
        self.turns.append(Turn("assistant", text, weight))

    def answer(self, text: str) -> None:
        """Add an assistant turn that has one right wording."""
        self.turns.append(Turn("assistant", text, ANSWER_WEIGHT))

    def add_text(self, text: str, weight: float = 1.0) -> None:
        """Add a piece of plain text."""
        self.turns.append(Turn("text", text, weight))

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation in the usual message form."""
        return [{"role": turn.role, "content": turn.text} for turn in self.turns]

    def pieces(self) -> list[tuple[str, float]]:
        """Return the document as text pieces with their loss weights, in ChatML unless it is plain."""
        if self.is_plain:
            return [(turn.text, turn.weight) for turn in self.turns] + [("<|endoftext|>", 1.0)]
        out: list[tuple[str, float]] = []
        for turn in self.turns:
            spoken = turn.role == "assistant"
            out.append((f"<|im_start|>{turn.role}\n", PROMPT_WEIGHT if spoken else 0.0))
            out += turn.parts or [(turn.text, turn.weight)]
            if turn.cut:
                break
            out.append(("<|im_end|>", 1.0 if spoken and turn.weight else 0.0))
            out.append(("\n", PROMPT_WEIGHT))
        return out
