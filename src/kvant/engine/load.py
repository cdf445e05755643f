"""A model's name or folder to a decoder and a tokenizer."""

import os
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kvant import weights
from kvant.engine.template import BoundedTemplate, TemplateProcess
from kvant.engine.tokenizer_files import check_tokenizer
from kvant.errors import ModelError, foreign, one_line
from kvant.models import Decoder, load_decoder
from kvant.models.checkpoint import Progress

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

POCKET = "pocket"  # the embedded model's name


def load(
    path_or_name: str | Path, *, revision: str | None = None, adapter_path: str | Path | None = None
) -> tuple[Decoder, "TokenizerWrapper"]:
    """Load a model and its tokenizer.

    Args:
        path_or_name: what :func:`find_model` takes: a model folder, a known name, ``owner/repository[@revision]`` or
            ``pocket``. Nothing is downloaded: ``kvant pull`` does that.
        revision: a repository's commit, branch or tag, as it was pulled; refused for a folder and for ``pocket``.
        adapter_path: the folder of a LoRA or DoRA adapter as mlx-lm trains it.

    Returns:
        The decoder, and mlx-lm's tokenizer wrapper, whose ``eos_token_ids`` are those of the tokenizer together with
        those of generation_config.json or, without one, config.json. Its ``apply_chat_template`` renders the folder's
        template in a process of its own, within 5 seconds and 512 MiB; one that fails is a PromptError.

    Raises:
        ModelError: no such folder, a model that was not pulled, or one that is not supported, model or adapter.
        ValueError: an argument that cannot be applied.
    """
    return load_folder(find_model(path_or_name, revision), adapter_path=adapter_path)


def load_folder(
    folder: Path, progress: Progress | None = None, *, adapter_path: str | Path | None = None
) -> tuple[Decoder, "TokenizerWrapper"]:
    """Load from a folder, transformers' slow import beside the weights; ``progress`` as in ``load_decoder``."""
    adapter = None if adapter_path is None else find_adapter(adapter_path)
    with ThreadPoolExecutor(max_workers=1) as pool:
        imported = pool.submit(_import_transformers)
        model = load_decoder(folder, progress, adapter)
        imported.result()
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *model.config.eos_token_ids}
    return model, tokenizer


def find_model(path_or_name: str | Path, revision: str | None = None) -> Path:
    """The folder of a model.

    ``pocket`` is the embedded model. A path, text that begins as one (``/``, ``.``, ``~``) and text that names an
    existing folder mean that folder. Anything else is a known name or ``owner/repository[@revision]``, pulled before.

    Raises:
        ModelError: no such folder, or a model that was not pulled.
        ValueError: a revision of a folder or of the embedded model.
    """
    name = str(path_or_name)
    if name == POCKET:
        folder = Path(str(resources.files("kvant") / POCKET))
    else:
        try:
            folder = Path(name).expanduser()
            found = bool(name) and folder.is_dir()
        except (OSError, RuntimeError, ValueError):  # a name too long, a user who does not exist, a NUL
            found = False
        if not found:
            return _find_pulled(path_or_name, name, revision)
    if revision is not None:
        raise ValueError(f"revision is {revision!r}; a folder and the embedded model have none")
    return folder


def find_adapter(path: str | Path) -> Path:
    """An adapter's folder.

    Raises:
        ModelError: no such folder.
    """
    try:
        folder = Path(path).expanduser()
        if str(path) and folder.is_dir():
            return folder
    except (OSError, RuntimeError, ValueError):  # a name too long, a user who does not exist, a NUL
        pass
    raise ModelError(f"adapter {str(path)[:200]!r} is not a folder; expected one as mlx_lm.lora writes it")


def _find_pulled(path_or_name: str | Path, name: str, revision: str | None) -> Path:
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    if isinstance(path_or_name, Path) or name.startswith(("/", ".", "~")):
        raise ModelError(f"model {shown!r} is not a folder")
    try:
        return weights.resolve(name, revision)
    except ValueError as error:
        raise ModelError(f"model {shown!r} is not a folder or '{POCKET}', the embedded model; {error}") from error


def _import_transformers() -> None:
    """Import what mlx-lm's tokenizers need of transformers, which takes longer than everything else together.

    Not mlx-lm itself: imported outside the main thread it makes the process abort when it ends (0.32.2).
    """
    # Read when transformers is first imported: it would announce on standard error that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401


def load_tokenizer(folder: Path) -> "TokenizerWrapper":
    """mlx-lm's wrapper around transformers' tokenizer; nothing in the folder is executed.

    Its ``apply_chat_template`` renders under a time limit and a memory limit and raises a PromptError.

    Raises:
        ModelError: no tokenizer, or one that cannot be loaded.
    """
    check_tokenizer(folder)
    templates = TemplateProcess()  # it is ready by the time the tokenizer is
    _import_transformers()
    from mlx_lm.tokenizer_utils import load as load_wrapper
    from transformers import PreTrainedTokenizerBase

    try:
        tokenizer = load_wrapper(folder, {"trust_remote_code": False, "local_files_only": True})
    except BaseException as error:  # transformers raises whatever a malformed file happens to break
        if not foreign(error):
            raise
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {one_line(error)}") from error
    # Lengths are checked here, against the real context; transformers would warn about its own idea of it.
    tokenizer.model_max_length = int(1e30)
    inner = tokenizer._tokenizer
    if type(inner).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:  # others render no template
        inner.apply_chat_template = BoundedTemplate(inner, templates)
    return tokenizer
