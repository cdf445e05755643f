"""Text whose token ids are known: what was said in a conversation keeps its tokens."""

from collections.abc import Sequence

from kvant.text.prompt import encode_rendered
from kvant.text.tokenizer import Tokenizer


class KnownText:
    """A rendered conversation with the token ids that were fed and generated for it.

    A model may write an answer in other tokens than its text encodes to. A later rendering that repeats the text is
    given the same tokens again, so that the cache still holds them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        unknown = tokenizer.unk_token
        self._special = tuple(token for token in tokenizer.all_special_tokens if token and token != unknown)
        self._text = ""
        self._ids: list[int] = []
        self._answers: list[tuple[int, int]] = []  # where each answer ends, in characters and in tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered conversation."""
        for characters, tokens in reversed(self._answers):
            # Only before a special token is a text's encoding that of its parts.
            if text.startswith(self._text[:characters]) and text.startswith(self._special, characters):
                return self._ids[:tokens] + encode_rendered(self._tokenizer, text[characters:])
        return encode_rendered(self._tokenizer, text)

    def answered(self, text: str, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Remember a rendered conversation, its ids, and the ids of the answer to it without a token that ended it."""
        kept = len(self._answers)
        while kept and not self._repeated(text, ids, *self._answers[kept - 1]):
            kept -= 1
        decoded = self._decode(answer)
        ends = [*self._answers[:kept], (len(text) + len(decoded), len(ids) + len(answer))]
        self._text, self._ids, self._answers = text + decoded, [*ids, *answer], ends

    def restore(self, ids: Sequence[int]) -> None:
        """Remember ids alone, which end with an answer."""
        text = self._decode(ids)
        self._text, self._ids, self._answers = text, list(ids), [(len(text), len(ids))]

    def _repeated(self, text: str, ids: Sequence[int], characters: int, tokens: int) -> bool:
        return text.startswith(self._text[:characters]) and list(ids[:tokens]) == self._ids[:tokens]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
