"""Load mlx-lm's own model from a folder after kvant has checked the files."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.bridge.config import is_bridged
from kvant.errors import CheckpointError
from kvant.files import read_json
from kvant.models.checkpoint import check_folder
from kvant.models.tensors import TensorFiles


def load_mlx_lm(folder: Path, dtype: mx.Dtype | None = None) -> tuple[Any, int | None]:
    """Load mlx-lm's module; cast its floating-point weights to ``dtype`` if there is one.

    Returns:
        The module, and the number of experts per token, or None for a model without experts.

    Raises:
        KvantError: the folder cannot be loaded. Errors of mlx-lm pass through.
    """
    from kvant.bridge.folder import TIED, check_bridged, settle_head

    raw = read_json(folder / "config.json")
    config: dict[str, Any] | None = None
    if is_bridged(raw):
        _, bridged = check_bridged(folder)
        experts_used = bridged.experts_used
        tensors = TensorFiles(folder)
        settled = settle_head(raw, tensors)
        if settled is not raw:
            config = {key: settled[key] for key in (TIED, "text_config") if key in settled}
    else:
        native, tensors = check_folder(folder)
        # config.json may store the rope settings under either of two keys; mlx-lm 0.32.2 reads only one
        # (docs/models.md).
        scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
        config = {"rope_theta": native.rope.theta, "tie_word_embeddings": native.tie_word_embeddings}
        config |= {"rope_scaling": scaling} if scaling else {}
        experts_used = None if native.experts is None else native.experts.per_token
        if native.experts is not None:
            config |= native.experts.as_config()
    unnamed = {*folder.glob("model*.safetensors")} - {*tensors.files}
    if unnamed:  # mlx-lm reads every file of such a name, unchecked
        raise CheckpointError(f"{min(unnamed)}: not among the model's files; mlx-lm would read it")
    # This imports transformers too, so it waits until the files are checked.
    from mlx_lm.utils import load_model

    module, _ = load_model(folder, model_config=config)
    if dtype is not None:
        module.set_dtype(dtype)
        mx.eval(module.parameters())
    return module, experts_used
