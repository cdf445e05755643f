"""What a checkpoint's tensors say better than its config.json: the output head, and formats of single
matrices.
"""

import warnings
from dataclasses import replace
from pathlib import Path

from kvant.errors import CheckpointError
from kvant.models.config import ModelConfig
from kvant.models.mtp import with_head
from kvant.models.quantization import Quantization, format_of_shapes
from kvant.models.tensors import TensorFiles, tensor_files

PARTS = ("weight", "scales", "biases")  # the tensors that a matrix may have, quantized or not


def open_folder(folder: Path, *, head: bool = False) -> tuple[ModelConfig, TensorFiles]:
    """The config and the tensors of a model folder, as :func:`as_stored`; whether they fit is not checked
    yet. ``head``: with the head for drafts.
    """
    config = ModelConfig.from_folder(folder)
    tensors = TensorFiles(folder, tensor_files(folder, head=True) if head else None)
    return as_stored(with_head(config, tensors) if head else config, tensors), tensors


def as_stored(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Return the config that the tensors show; ``tie_word_embeddings`` is then a bool.

    Data is read only if a head is stored that config.json ties: one that differs from the embedding is the
    model's own, as in transformers. A head without an embedding is renamed to be the embedding.
    """
    return _with_formats(_with_head(_with_prefix(config, tensors), tensors), tensors)


def _with_prefix(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Give the tensors of an embedding model their names. If a head of its own is missing, there is none."""
    saved_without_head = add_prefix(tensors, config.architecture.embedding.path)
    if saved_without_head and config.tie_word_embeddings is False and not _has_head(config, tensors):
        warnings.warn(
            "the model has no output head, which config.json does not tie to the embedding: it computes "
            "embeddings, and text that it generates means nothing",
            stacklevel=2,
        )
        return replace(config, tie_word_embeddings=True)
    return config


def _has_head(config: ModelConfig, tensors: TensorFiles) -> bool:
    return f"{config.architecture.head.path}.weight" in tensors


def _with_head(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    head, embedding, said = (
        config.architecture.head.path,
        config.architecture.embedding.path,
        config.tie_word_embeddings,
    )
    if not _has_head(config, tensors):
        # Exporters leave this out of config.json if it is their default, and defaults differ.
        return replace(config, tie_word_embeddings=said is not False)
    if said is False:
        return config
    if f"{embedding}.weight" not in tensors:
        for part in stored_parts(head, tensors):
            tensors.rename(f"{head}.{part}", f"{embedding}.{part}")
        formats = dict(config.quantization_overrides)
        formats |= {embedding: formats[head]} if head in formats else {}
        return replace(config, tie_word_embeddings=True, quantization_overrides=formats)
    parts = {*stored_parts(head, tensors), *stored_parts(embedding, tensors)}
    tied = said is True and all(tensors.are_same(f"{head}.{part}", f"{embedding}.{part}") for part in parts)
    if said and not tied:
        warn_of_head(f"{head}.weight")
    return replace(config, tie_word_embeddings=tied)


def add_prefix(tensors: TensorFiles, embedding: str) -> bool:
    """Give the tensors of a model that was saved without its output head their names in the whole model.

    Embedding models are saved so: ``norm.weight`` in place of ``model.norm.weight``. ``embedding`` is the
    path in the whole model, such as ``model.embed_tokens``. Returns whether the model was saved so.
    """
    prefix, dot, name = embedding.rpartition(".")
    if not dot or f"{embedding}.weight" in tensors or f"{name}.weight" not in tensors:
        return False
    for each in tensors.names:
        if not each.startswith((f"{prefix}.", "lm_head.")):
            tensors.rename(each, f"{prefix}.{each}")
    return True


def warn_of_head(name: str) -> None:
    """Warn that a head is used that config.json says is none."""
    warnings.warn(
        f"config.json ties the output head to the embedding, but {name} is stored too and differs; it is "
        f"used. "
        'Set "tie_word_embeddings": false to say so',
        stacklevel=2,
    )


def _with_formats(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Give each quantized matrix that config.json does not name the format that its shapes tell, as mlx-lm
    does. A head may be quantized beside a model that is not.
    """
    matrices = config.matrices()
    if config.quantization is None:
        head = config.head_paths
        matrices = {path: size for path, size in matrices.items() if path in head}
    formats = dict(config.quantization_overrides)
    for path, size in matrices.items():
        said, stored = config.quantization_of(path), _stored_format(tensors, path, size[-1])
        if stored is None or stored == said:
            continue
        if path in config.quantization_overrides:
            given = "floats" if said is None else said.text
            raise CheckpointError(f"{path} is stored with {stored.text}; config.json says {given}")
        formats[path] = stored
    return replace(config, quantization_overrides=formats)


def _stored_format(tensors: TensorFiles, path: str, width: int) -> Quantization | None:
    """The format of a matrix with rows of ``width`` values; None: it is not quantized, or in none of MLX's
    formats.
    """
    parts = stored_parts(path, tensors)
    in_bytes = "scales" in parts and tensors.dtype(f"{path}.scales") == "U8"
    if parts != (PARTS[:2] if in_bytes else PARTS) or not all(
        tensors.shape(f"{path}.{part}") for part in parts
    ):
        return None
    words, groups = (tensors.shape(f"{path}.{part}")[-1] for part in PARTS[:2])
    return format_of_shapes(width, words, groups, in_bytes=in_bytes)


def stored_parts(path: str, tensors: TensorFiles) -> tuple[str, ...]:
    """Those of :data:`PARTS` that a module has."""
    return tuple(part for part in PARTS if f"{path}.{part}" in tensors)
