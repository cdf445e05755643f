"""A model's tokenizer, with the interface of mlx-lm's wrapper."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvant.errors import ModelError, PromptError, library_errors, one_line
from kvant.text.detokenizer import ByteDetokenizer, StreamingDetokenizer, WindowDetokenizer
from kvant.text.folder import read_tokenizer_files
from kvant.text.process import TextProcess
from kvant.text.template import choose_template, cut_at_mark, mark_continuation, plain_data, prepare, render

MAX_IDS = 2**32  # limit of the tokenizers library

# Arguments of transformers' apply_chat_template that are refused; they would silently become template
# variables.
REFUSED = (
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens"),
)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Load the tokenizer of a model folder; nothing in the folder is executed.

    Raises:
        ModelError: there is no tokenizer, or it does not load within 5 s of processor time and 512 MiB.
    """
    return begin_loading(folder, TextProcess())()


def begin_loading(folder: Path, process: TextProcess) -> Callable[[], "Tokenizer"]:
    """Start :func:`load_tokenizer` in a process; the returned function waits for the result."""
    content, settings, templates = read_tokenizer_files(folder)
    failure = f"{folder}: the tokenizer cannot be loaded"
    with library_errors(ModelError, failure):
        answer = process.load({"do": "load", **settings}, content)

    def finish() -> Tokenizer:
        with library_errors(ModelError, failure):
            return Tokenizer(process, answer(), templates, folder)

    return finish


class Tokenizer:
    """Convert text to token ids and back, and messages to text, in a separate process.

    Each text is limited to 5 seconds of processor time and 512 MiB.

    Attributes:
        chat_template: Jinja source, a dict of several by name, or None.
        bos_token, eos_token, unk_token, pad_token: text or None; with ``_id`` their ids.
        all_special_ids: ids of tokens that have a role.
        vocab_size: number of tokens without added ones; ``len`` includes them.
        folder: the folder it was loaded from, or None if that is not known.
    """

    def __init__(
        self,
        process: TextProcess,
        facts: Mapping[str, Any],
        templates: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Use the facts of a process that has loaded the tokenizer. Call :func:`load_tokenizer` instead."""
        self.folder = folder
        self._process = process
        self._facts = facts
        special: Mapping[str, tuple[str, int | None]] = facts["special"]
        tokens = {name: token for name, (token, _) in special.items()}
        ids = {name: token for name, (_, token) in special.items()}
        self.special_tokens_map = tokens
        self.bos_token = tokens.get("bos_token")
        self.eos_token = tokens.get("eos_token")
        self.unk_token = tokens.get("unk_token")
        self.pad_token = tokens.get("pad_token")
        self.bos_token_id = ids.get("bos_token")
        self.eos_token_id = ids.get("eos_token")
        self.unk_token_id = ids.get("unk_token")
        self.pad_token_id = ids.get("pad_token")
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *facts["extra"]]))
        self.vocab_size = int(facts["vocab_size"])
        self.chat_template: str | dict[str, str] | None = dict(templates) or None
        if list(templates) == ["default"]:
            self.chat_template = templates["default"]
        thinking: Sequence[str | None] = facts["thinking"] or (None, None)
        self.think_start, self.think_end = thinking
        self._eos_token_ids = set() if self.eos_token_id is None else {self.eos_token_id}

    def __len__(self) -> int:
        return int(self._facts["size"])

    @property
    def eos_token_ids(self) -> set[int]:
        """Ids that end a text. Can be set; an empty set ends none."""
        return self._eos_token_ids

    @eos_token_ids.setter
    def eos_token_ids(self, ids: Iterable[int] | None) -> None:
        self._eos_token_ids = set(ids or ())

    def add_eos_token(self, token: str) -> None:
        """Add a token, by its text or its id, to those that end texts."""
        self._eos_token_ids.add(int(token) if token.isdecimal() else self._known(token))

    def replace_eos_token(self, token: str) -> None:
        """Make a token of the vocabulary the only end of text, for chat templates too."""
        self.eos_token_id = self._known(token)
        self.eos_token = self.special_tokens_map["eos_token"] = token
        self._eos_token_ids = {self.eos_token_id}

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens that have a role."""
        return [token for token in self.convert_tokens_to_ids(self.all_special_tokens) if token is not None]

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return self.chat_template is not None

    @has_chat_template.setter
    def has_chat_template(self, has: bool) -> None:
        """Do nothing: mlx-lm's wrapper sets this, but here it follows from ``chat_template``."""

    @property
    def has_thinking(self) -> bool:
        """Whether the vocabulary has marks around a model's thoughts: ``think_start``, ``think_end``."""
        return self.think_start is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode text to token ids.

        Args:
            text: special tokens in it become their ids.
            add_special_tokens: add the special tokens that the tokenizer is configured to add.

        Raises:
            PromptError: the text is not Unicode, or takes too long or too much memory.
        """
        if not isinstance(text, str):
            raise PromptError(f"the prompt is a {type(text).__name__}; expected text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt has {text[error.start]!r}, half of a character; expected Unicode"
            ) from error
        request = {"do": "encode", "text": text, "add_special_tokens": bool(add_special_tokens)}
        return list(self._ask(request, "the prompt cannot be encoded", PromptError))

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Decode token ids to text.

        Raises:
            ModelError: the tokenizer fails.
            ValueError: ``token_ids`` are not ids.
        """
        request = {"do": "decode", "ids": _ids(token_ids), "skip_special_tokens": bool(skip_special_tokens)}
        request["clean_up"] = clean_up_tokenization_spaces
        return str(self._ask(request, "the tokenizer cannot decode"))

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the vocabulary's string of an id, or a list of them for several; None for unknown ids."""
        strings = self._ask({"do": "tokens", "ids": _ids(ids)}, "no such ids")
        return strings[0] if isinstance(ids, int) else strings

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a string, or a list of them; the unknown token's id for unknown strings."""
        known = self._find([tokens] if isinstance(tokens, str) else list(tokens))
        ids = [self.unk_token_id if token is None else token for token in known]
        return ids[0] if isinstance(tokens, str) else ids

    def get_vocab(self) -> dict[str, int]:
        """Return every token's id."""
        return dict(self._ask({"do": "vocabulary"}, "the vocabulary is not available"))

    def parts(self) -> dict[str, str]:
        """Return a digest of each part of the tokenizer that affects ids or text, by name."""
        return dict(self._ask({"do": "parts"}, "the tokenizer cannot be compared"))

    @property
    def mark_ids(self) -> list[int]:
        """Ids of added tokens that are not plain text: control tokens, and marks such as ``<tool_call>``."""
        return list(self._facts["marks"])

    @property
    def special_tokens(self) -> dict[int, str]:
        """The text of every control token, such as ``<|im_start|>``, by id."""
        return {int(token): str(text) for token, text in self._facts["special_tokens"]}

    def token_bytes(self) -> list[bytes] | None:
        """Return the bytes of every token by id, or None if this tokenizer's tokens are not bytes."""
        known = self._facts["decoder"] != "other"
        return [*map(self.detokenizer.token_bytes, range(len(self._facts["pieces"])))] if known else None

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer."""
        kind = self._facts["decoder"]
        if kind == "other":
            return WindowDetokenizer(lambda ids: self.decode(ids, clean_up_tokenization_spaces=False))
        return ByteDetokenizer(
            self._facts["pieces"], byte_level=kind == "byte_level", strips=self._facts["strips"]
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Render messages with the chat template.

        Args:
            conversation: messages, each with a role and content; or several such conversations, for a list of
                results.
            tools: JSON schemas or Python functions that the model may call. A function needs a type hint for
                each parameter, and a docstring in Google's style that describes them.
            documents: texts the model may read, each with a title and a text.
            chat_template: the name of one of the model's, or Jinja source; default: the model's.
            add_generation_prompt: end where the assistant's answer begins.
            continue_final_message: end inside the last message, so that the model continues it.
            tokenize: return token ids instead of text.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            PromptError: there is no template, or it fails on these messages or exceeds 5 s or 512 MiB.
            ValueError: the arguments are not supported.
        """
        for name in REFUSED:
            if variables.pop(name, None):
                raise ValueError(f"{name} is not supported by kvant's apply_chat_template")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt are both set; expected one of them"
            )
        options: dict[str, Any] = {"chat_template": chat_template, "tokenize": tokenize, **variables}
        options["add_generation_prompt"] = add_generation_prompt
        options["continue_final_message"] = continue_final_message
        if conversation and all(isinstance(each, list | tuple) for each in conversation):
            return [
                self.apply_chat_template(prepare(each), tools, documents, **options) for each in conversation
            ]
        if tools is not None:
            tools = [tool if isinstance(tool, Mapping) else _schema(tool) for tool in tools]
        messages = prepare(conversation)
        continued = mark_continuation(messages) if continue_final_message else ""
        seen = {
            **self.special_tokens_map,
            **plain_data(variables),
            "messages": messages,
            "tools": plain_data(tools),
            "documents": plain_data(documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        text = render(self._process, choose_template(self.chat_template, chat_template, tools), seen)
        if continue_final_message:
            text = cut_at_mark(text, continued)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def close(self) -> None:
        """End the tokenizer's process, even one that is stopped. A further use starts another."""
        self._process.close()

    def _known(self, token: str) -> int:
        token_id = self._find([token])[0]
        if token_id is None:
            raise ValueError(f"{token!r} is not a token of this tokenizer")
        return token_id

    def _find(self, tokens: list[str]) -> list[int | None]:
        return list(self._ask({"do": "ids", "tokens": tokens}, "no such tokens"))

    def _ask(
        self, request: dict[str, Any], failure: str, kind: type[ModelError] | type[PromptError] = ModelError
    ) -> Any:
        with library_errors(kind, failure):
            return self._process.ask(request)


def _schema(tool: object) -> dict[str, Any]:
    """Return the JSON schema of a Python function, made by transformers."""
    if not callable(tool):
        raise ValueError(f"a tool is a {type(tool).__name__}; expected a JSON schema or a function")
    from transformers.utils.chat_template_utils import get_json_schema  # takes most of a second

    try:
        return dict(get_json_schema(tool))
    except Exception as error:  # transformers' error types have no common base
        raise ValueError(f"tool {getattr(tool, '__name__', tool)!r}: {one_line(error)}") from error


def _ids(value: Any) -> list[int]:
    """Convert an id, a sequence or an array to a list of ints."""
    try:
        ids = [operator.index(value)]
    except TypeError:
        try:
            ids = [operator.index(token) for token in value]
        except TypeError:
            raise ValueError(f"token ids are {str(value)[:80]!r}; expected an int or ints") from None
    if wrong := [token for token in ids if not 0 <= token < MAX_IDS]:
        raise ValueError(f"token id {str(wrong[0])[:80]}; expected 0 to {MAX_IDS - 1}")
    return ids


def check_same(theirs: Tokenizer, ours: Tokenizer) -> None:
    """Refuse a draft model's tokenizer (``theirs``) that differs from the model's (``ours``)."""
    parts = ours.parts()
    differing = [name for name, digest in theirs.parts().items() if parts[name] != digest]
    if not differing:
        return
    noun = differing[0]
    what = f"its {noun} are not the same" if noun.endswith("s") else f"its {noun} is not the same"
    if noun == "vocabulary":
        what = _first_token(theirs.get_vocab(), ours.get_vocab())
    raise ModelError(f"the draft model's tokenizer differs: {what}")


def _first_token(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str:
    there, here = ({place: token for token, place in vocabulary.items()} for vocabulary in (theirs, ours))
    first = min(place for place in there.keys() | here.keys() if there.get(place) != here.get(place))
    there_is, here_is = (repr(each[first])[:80] if first in each else "missing" for each in (there, here))
    return f"token {first} is {there_is} there and {here_is} here"
