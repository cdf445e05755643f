"""Whether a draft model has the tokenizer of the model that it drafts for."""

from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from kvant.errors import ModelError
from kvant.models import LanguageModel
from kvant.models.identity import tokenizer_digest
from kvant.text.tokenizer import Tokenizer, load_tokenizer

SAME = "a draft model needs the same tokenizer"

_same: WeakKeyDictionary[Tokenizer, set[str]] = WeakKeyDictionary()  # digests of files that were found to be the same


def check_draft_model(model: LanguageModel, tokenizer: Tokenizer, draft_model: LanguageModel) -> None:
    """Refuse a draft model with another tokenizer.

    Files are compared first. Where they differ, the draft model's tokenizer is loaded from its folder and compared by
    content, once. The weights' vocabularies may be padded to different sizes. Of a draft model that was not loaded from
    a folder only the size of its vocabulary is known.
    """
    ours, theirs = model.identity, draft_model.identity
    if draft_model is model:
        return
    if theirs is None or theirs.folder is None:
        sizes = draft_model.config.vocab_size, model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ModelError(f"the draft model's vocabulary has {sizes[0]} tokens, and the model's {sizes[1]}; {SAME}")
        return
    if (ours is not None and ours.tokenizer == theirs.tokenizer) or theirs.tokenizer in _same.get(tokenizer, ()):
        return
    if tokenizer_digest(theirs.folder) != theirs.tokenizer:
        raise ModelError(f"{theirs.folder}: tokenizer.json was changed after the draft model was loaded; {SAME}")
    compare(load_tokenizer(theirs.folder), tokenizer)
    _same.setdefault(tokenizer, set()).add(theirs.tokenizer)


def check_folders(folder: Path, draft_folder: Path) -> None:
    """:func:`check_draft_model` before anything is loaded."""
    if tokenizer_digest(folder) != tokenizer_digest(draft_folder):
        compare(load_tokenizer(draft_folder), load_tokenizer(folder))


def compare(theirs: Tokenizer, ours: Tokenizer) -> None:
    """Refuse tokenizers that differ: ``theirs`` is the draft model's, ``ours`` the model's."""
    parts = ours.parts()
    differing = [name for name, digest in theirs.parts().items() if parts[name] != digest]
    if not differing:
        return
    what = f"its {differing[0]} are not the same" if differing[0].endswith("s") else f"its {differing[0]} is another"
    if differing[0] == "vocabulary":
        what = _first_token(theirs.get_vocab(), ours.get_vocab())
    raise ModelError(f"the draft model's tokenizer differs: {what}")


def _first_token(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str:
    there, here = ({place: token for token, place in vocabulary.items()} for vocabulary in (theirs, ours))
    first = min(place for place in there.keys() | here.keys() if there.get(place) != here.get(place))
    there_is, here_is = (repr(found[first])[:80] if first in found else "missing" for found in (there, here))
    return f"token {first} is {there_is} there and {here_is} here"
