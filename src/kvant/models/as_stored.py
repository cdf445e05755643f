"""Correct a config.json by the stored tensors: the output head, and the formats of single matrices."""

import warnings
from dataclasses import replace
from pathlib import Path

from kvant.errors import CheckpointError
from kvant.models.config import ModelConfig
from kvant.models.mtp import with_head
from kvant.models.quantization import Quantization, format_of_shapes
from kvant.models.tensors import TensorFiles, tensor_files

PARTS = ("weight", "scales", "biases")  # the tensors of a matrix; one in floats has only a weight


def open_folder(folder: Path, *, head: bool = False) -> tuple[ModelConfig, TensorFiles]:
    """Return the config, corrected by :func:`as_stored`, and the tensors of a model folder.

    The shapes are not checked. ``head``: include the head for drafts.
    """
    config = ModelConfig.from_folder(folder)
    tensors = TensorFiles(folder, tensor_files(folder, head=True) if head else None)
    return as_stored(with_head(config, tensors) if head else config, tensors), tensors


def as_stored(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Return the config corrected by the tensors; its ``tie_word_embeddings`` is a bool.

    If config.json ties a head that is stored, its data is compared with the embedding's. A head that differs
    is used, as in transformers. A head without an embedding is renamed to be the embedding.
    """
    return _with_formats(_with_head(_with_prefix(config, tensors), tensors), tensors)


def _with_prefix(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Rename the tensors of an embedding model. A missing head is treated as tied, with a warning."""
    saved_without_head = add_prefix(tensors, config.architecture.embedding.path)
    if saved_without_head and config.tie_word_embeddings is False and not _has_head(config, tensors):
        warnings.warn(
            "the checkpoint has no output head, and config.json does not tie it to the embedding: the model "
            "computes embeddings, and any text that it generates is meaningless",
            stacklevel=2,
        )
        return replace(config, tie_word_embeddings=True)
    return config


def _has_head(config: ModelConfig, tensors: TensorFiles) -> bool:
    return f"{config.architecture.head.path}.weight" in tensors


def _with_head(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    head, embedding, configured = (
        config.architecture.head.path,
        config.architecture.embedding.path,
        config.tie_word_embeddings,
    )
    if not _has_head(config, tensors):
        # Exporters omit tie_word_embeddings from config.json if it is their default, and defaults differ.
        return replace(config, tie_word_embeddings=configured is not False)
    if configured is False:
        return config
    if f"{embedding}.weight" not in tensors:
        for suffix in stored_parts(head, tensors):
            tensors.rename(f"{head}.{suffix}", f"{embedding}.{suffix}")
        formats = dict(config.quantization_overrides)
        formats |= {embedding: formats[head]} if head in formats else {}
        return replace(config, tie_word_embeddings=True, quantization_overrides=formats)
    parts = {*stored_parts(head, tensors), *stored_parts(embedding, tensors)}
    tied = configured is True and all(
        tensors.are_same(f"{head}.{suffix}", f"{embedding}.{suffix}") for suffix in parts
    )
    if configured and not tied:
        warn_of_head(f"{head}.weight")
    return replace(config, tie_word_embeddings=tied)


def add_prefix(tensors: TensorFiles, embedding: str) -> bool:
    """Add the missing prefix to the tensors of a model saved without its head; return whether it was.

    Embedding models have ``norm.weight`` instead of ``model.norm.weight``. ``embedding`` is the path in the
    whole model, such as ``model.embed_tokens``.
    """
    prefix, dot, name = embedding.rpartition(".")
    if not dot or f"{embedding}.weight" in tensors or f"{name}.weight" not in tensors:
        return False
    for each in tensors.names:
        if not each.startswith((f"{prefix}.", "lm_head.")):
            tensors.rename(each, f"{prefix}.{each}")
    return True


def warn_of_head(name: str) -> None:
    """Warn that a stored head is used although config.json ties it to the embedding."""
    warnings.warn(
        f"config.json ties the output head to the embedding, but the checkpoint has a different {name}, "
        'which is used; set "tie_word_embeddings": false to silence this warning',
        stacklevel=2,
    )


def _with_formats(config: ModelConfig, tensors: TensorFiles) -> ModelConfig:
    """Set the formats of quantized matrices that config.json does not name from their shapes, as mlx-lm does.

    If the model is not quantized, this covers only the head for drafts.
    """
    matrices = config.matrices()
    if config.quantization is None:
        head = config.head_paths
        matrices = {path: size for path, size in matrices.items() if path in head}
    formats = dict(config.quantization_overrides)
    for path, size in matrices.items():
        configured, stored = config.quantization_of(path), _stored_format(tensors, path, size[-1])
        if stored is None or stored == configured:
            continue
        if path in config.quantization_overrides:
            expected = "floats" if configured is None else configured.text
            raise CheckpointError(f"{path} is stored with {stored.text}; config.json says {expected}")
        formats[path] = stored
    return replace(config, quantization_overrides=formats)


def _stored_format(tensors: TensorFiles, path: str, width: int) -> Quantization | None:
    """Return the format of a matrix with rows of ``width`` values.

    None: it is not quantized, or MLX does not have its format.
    """
    parts = stored_parts(path, tensors)
    in_bytes = "scales" in parts and tensors.dtype(f"{path}.scales") == "U8"
    if parts != (PARTS[:2] if in_bytes else PARTS) or not all(
        tensors.shape(f"{path}.{suffix}") for suffix in parts
    ):
        return None
    words, groups = (tensors.shape(f"{path}.{suffix}")[-1] for suffix in PARTS[:2])
    return format_of_shapes(width, words, groups, in_bytes=in_bytes)


def stored_parts(path: str, tensors: TensorFiles) -> tuple[str, ...]:
    """Return those of :data:`PARTS` that a module has."""
    return tuple(suffix for suffix in PARTS if f"{path}.{suffix}" in tensors)
