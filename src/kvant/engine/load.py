"""A model's name or folder to a decoder and a tokenizer."""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, overload

import mlx.core as mx

from kvant import blas
from kvant.bridge.config import is_bridged
from kvant.errors import ArgumentError, ModelError, did_you_mean
from kvant.files import POCKET as POCKET  # most modules take it from here
from kvant.files import read_json, read_optional
from kvant.models import LanguageModel, load_decoder
from kvant.models.checkpoint import Progress, check_folder
from kvant.models.identity import identify
from kvant.sizes import physical_memory
from kvant.text.process import TextProcess
from kvant.text.tokenizer import Tokenizer, begin_loading

TOKENIZER_KEYS = ("eos_token", "chat_template", "trust_remote_code")
Weights = Literal["packed", "float32"]
LoadModel = Callable[[Path, Progress | None, Path | None], LanguageModel]


@overload
def load(
    path_or_hf_repo: str | Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: Literal[False] = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    path_or_name: str | Path | None = None,
    weights: Weights | None = None,
) -> tuple[LanguageModel, Tokenizer]: ...
@overload
def load(
    path_or_hf_repo: str | Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    *,
    return_config: Literal[True],
    revision: str | None = None,
    trust_remote_code: bool = False,
    path_or_name: str | Path | None = None,
    weights: Weights | None = None,
) -> tuple[LanguageModel, Tokenizer, dict[str, Any]]: ...
def load(
    path_or_hf_repo: str | Path | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    path_or_name: str | Path | None = None,
    weights: Weights | None = None,
) -> tuple[LanguageModel, Tokenizer] | tuple[LanguageModel, Tokenizer, dict[str, Any]]:
    """Load a model and its tokenizer. The arguments are mlx-lm's.

    Args:
        path_or_hf_repo: what :func:`find_model` takes: a model folder, a known name,
            ``owner/repository[@revision]`` or ``pocket``. Nothing is downloaded: ``kvant pull`` does that.
        tokenizer_config: ``eos_token``, a token of the vocabulary that ends a text instead of the tokenizer's
            own, and ``chat_template``, Jinja source. Any other key is refused.
        model_config, trust_remote_code: refused, but for None, False and what is empty.
        lazy: True warns: every weight is read and checked at load, one layer after the other.
        adapter_path: the folder of a LoRA or DoRA adapter as mlx-lm trains it.
        return_config: return the folder's config.json too.
        revision: a repository's commit, branch or tag, as it was pulled; refused for a folder and for
            ``pocket``.
        path_or_name: another name of ``path_or_hf_repo``.
        weights: how a CPU holds quantized matrices: "packed", or "float32", which takes more memory and less
            time; default: the latter where the floats take at most half of the memory.

    Returns:
        The model: a decoder of kvant's own, or a bridged one where only mlx-lm has the architecture. A
        tokenizer with the names of mlx-lm's wrapper. Its ``eos_token_ids`` are the tokenizer's and those of
        generation_config.json or, without one, config.json. With ``return_config`` config.json as a dict,
        whose ``eos_token_id`` is that of generation_config.json where that has one.

    Raises:
        ModelError: no such folder, a model that was not pulled, or one that is not supported, model or
            adapter.
        ValueError: an argument that cannot be applied; known before anything is loaded, but for an
            ``eos_token`` that the vocabulary does not have.
    """
    name = path_or_name if path_or_hf_repo is None else path_or_hf_repo
    if name is None:
        raise ArgumentError("path_or_hf_repo", "is missing; expected a folder, a name or 'pocket'")
    if path_or_hf_repo is not None and path_or_name is not None:
        raise ArgumentError("path_or_hf_repo", "is given beside path_or_name; expected one of them")
    for key, given in (("tokenizer_config", tokenizer_config), ("model_config", model_config)):
        if not isinstance(given, Mapping | None):
            raise ArgumentError(key, f"is a {type(given).__name__}; expected a dict")
    if model_config:
        raise ArgumentError(
            "model_config", f"has {_names(model_config)}; a model is as its folder's config.json says"
        )
    settings = dict(tokenizer_config or {})
    inner = "tokenizer_config['trust_remote_code']"
    for key, trusts in (("trust_remote_code", trust_remote_code), (inner, settings.get("trust_remote_code"))):
        if trusts:
            raise ArgumentError(key, "is True; nothing in a model folder is executed")
    if unknown := {key: value for key, value in settings.items() if key not in TOKENIZER_KEYS}:
        raise ArgumentError(
            "tokenizer_config", f"has {_names(unknown)}; expected {', '.join(TOKENIZER_KEYS)}"
        )
    for key in ("eos_token", "chat_template"):
        if not isinstance(settings.get(key), str | None):
            raise ArgumentError(f"tokenizer_config[{key!r}]", f"is {settings[key]!r:.80}; expected text")
    if weights not in (None, *get_args(Weights)):
        raise ArgumentError("weights", f"is {weights!r:.80}; expected 'packed' or 'float32'")
    if weights == "float32" and mx.default_device().type != mx.cpu:
        raise ArgumentError("weights", "is 'float32'; a GPU multiplies quantized weights as they are stored")
    if lazy:
        warnings.warn("lazy is True; every weight is read at load, one layer after the other", stacklevel=2)
    folder = find_model(name, revision)
    model, tokenizer = load_folder(folder, adapter_path=adapter_path, weights=weights)
    if (template := settings.get("chat_template")) is not None:
        tokenizer.chat_template = template
    if (token := settings.get("eos_token")) is not None:
        try:
            tokenizer.replace_eos_token(token)
        except ValueError as error:
            raise ArgumentError(
                "tokenizer_config['eos_token']", f"is {token!r:.80}; not in the vocabulary"
            ) from error
        tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *model.config.eos_token_ids}
    if not return_config:
        return model, tokenizer
    config = dict(read_json(folder / "config.json"))
    if eos := read_optional(folder / "generation_config.json").get("eos_token_id"):
        config["eos_token_id"] = eos
    return model, tokenizer, config


def _names(settings: Mapping[str, Any]) -> str:
    return ", ".join(str(key)[:80] for key in settings)


def load_folder(
    folder: Path,
    progress: Progress | None = None,
    *,
    adapter_path: str | Path | None = None,
    process: TextProcess | None = None,
    load_weights: LoadModel | None = None,
    weights: Weights | None = None,
) -> tuple[LanguageModel, Tokenizer]:
    """Load from a folder; ``process``: for the tokenizer; ``load_weights``: in place of
    :func:`load_model`.
    """
    adapter = None if adapter_path is None else find_adapter(adapter_path)
    try:
        tokenizer = begin_loading(folder, process or TextProcess())
        identity = identify(folder, adapter)
    except ModelError:
        check_model(folder)  # an error of the model itself is said first
        raise
    model = (load_weights or partial(load_model, weights=weights))(folder, progress, adapter)
    model.identity = identity
    loaded = tokenizer()
    loaded.eos_token_ids = {*loaded.eos_token_ids, *model.config.eos_token_ids}
    return model, loaded


def load_model(
    folder: Path,
    progress: Progress | None = None,
    adapter: Path | None = None,
    *,
    weights: Weights | None = None,
) -> LanguageModel:
    """:func:`kvant.models.load_decoder` where kvant has the architecture, else by mlx-lm's class without
    adapter.

    ``weights``: how a CPU holds quantized matrices; None: as floats where those take at most half of its
        memory.
    """
    if not is_bridged_folder(folder):
        if weights is None:
            weights = default_weights(folder)
        return load_decoder(folder, progress, adapter, unpack=weights == "float32")
    if weights == "float32":
        raise ModelError(f"{folder}: mlx-lm's class computes this model, with its weights as they are stored")
    from kvant.bridge.folder import load_bridged  # not for a decoder: it imports mlx-lm

    return load_bridged(folder, progress, adapter)


def default_weights(folder: Path) -> Weights:
    """How :func:`load_model` holds a decoder's quantized matrices: floats pay with OpenBLAS only."""
    if mx.default_device().type != mx.cpu or blas.sgemv() is None:
        return "packed"
    config, tensors = check_folder(folder, whole=False)
    stored = [(path, size) for path, size in config.matrices().items() if f"{path}.weight" in tensors]
    floats = mx.float32.size * sum(math.prod(size) for _, size in stored if len(size) == 2)
    return "float32" if floats <= physical_memory() // 2 else "packed"


def check_model(folder: Path) -> None:
    """Check a folder's config.json and the headers of its tensors, as :func:`load_model`; no tensor is
    read.
    """
    if not is_bridged_folder(folder):
        check_folder(folder)
        return
    from kvant.bridge.folder import check_bridged

    check_bridged(folder)


def is_bridged_folder(folder: Path) -> bool:
    """Whether mlx-lm's class is to compute a folder's model."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    return is_bridged(read_json(folder / "config.json"))


def find_model(path_or_name: str | Path, revision: str | None = None) -> Path:
    """The folder of a model.

    ``pocket`` is the embedded model. A path, text that begins as one (``/``, ``.``, ``~``) and text that
    names an existing folder mean that folder. Anything else is the name of an imported model, a known name or
    ``owner/repository[@revision]``, pulled before.
    """
    name = str(path_or_name)
    folder = Path(str(resources.files("kvant") / POCKET)) if name == POCKET else _folder(name)
    if folder is not None:
        if revision is not None:
            raise ValueError(f"revision is {revision!r}; a folder and the embedded model have none")
        return folder
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    if name.lower().endswith(".gguf"):
        raise ModelError(f"{shown} is a GGUF file; `kvant import FILE` makes a model folder of it once")
    if isinstance(path_or_name, Path) or name.startswith(("/", ".", "~")):
        raise ModelError(f"model {shown!r} is not a folder")
    from kvant import weights  # not for a folder: it imports what pulling takes
    from kvant.weights.imported import find_imported, model_names
    from kvant.weights.known import packaged_models

    imported = find_imported(name)
    if imported is not None:
        if revision is not None:
            raise ValueError(f"revision is {revision!r}; an imported model has none")
        return imported
    if name in packaged_models():
        raise ModelError(f"{name} is not here; `kvant pull {name}` fetches it")
    try:
        return weights.find(name, revision)
    except ValueError as error:
        near = did_you_mean(name, [POCKET, *model_names()])
        expected = f" or a known name{near}" if near else f"; {error}"
        raise ModelError(f"model {shown!r} is not a folder{expected}") from error


def find_adapter(path: str | Path) -> Path:
    """An adapter's folder."""
    if (folder := _folder(str(path))) is not None:
        return folder
    raise ModelError(f"adapter {str(path)[:200]!r} is not a folder; expected one as mlx_lm.lora writes it")


def _folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, a user who does not exist, a NUL
        return None
