"""A model folder without tokenizer.json to another one that has it, with the same weights."""

import os
from pathlib import Path

from kvant.errors import ConvertError, ModelError
from kvant.files import check_file
from kvant.models.checkpoint import Progress
from kvant.models.config import ModelConfig
from kvant.models.tensors import TensorFiles
from kvant.text.tokenizer import load_tokenizer
from kvant.tools.convert.make_tokenizer import make_tokenizer
from kvant.tools.convert.new_folder import appearing, carried_files, check_new, check_room, copy_files

INDEX = "model.safetensors.index.json"


def convert_tokenizer(source: Path, dest: Path, progress: Progress | None = None) -> int:
    """Copy a model folder, and give the copy a tokenizer.json. The bytes of that file.

    Args:
        source: a folder with config.json, safetensors, and a vocabulary as :func:`make_tokenizer` takes it. Nothing in
            it is executed.
        dest: does not exist, or is an empty folder; its parent exists.
        progress: called with (files copied, files in all).

    Raises:
        ModelError: a source that cannot be read, or a tokenizer that cannot be made.
        ConvertError: a source that has a tokenizer.json, a destination that is in use or has no room, a failed write.
    """
    dest = check_new(dest)
    if os.path.lexists(source / "tokenizer.json"):
        raise ConvertError(f"{source}: tokenizer.json is there already; expected a folder without it")
    ModelConfig.from_folder(source)
    weights = TensorFiles(source).files
    if os.path.lexists(source / INDEX):
        weights = [*weights, check_file(source / INDEX)]
    files = [check_file(source / "config.json"), *carried_files(source), *weights]
    made = make_tokenizer(source)
    check_room(dest.parent, len(made) + sum(path.stat().st_size for path in files))
    with appearing(dest) as folder:
        (folder / "tokenizer.json").write_bytes(made)
        for done, path in enumerate(files, start=1):
            copy_files([path], source, folder)
            if progress:
                progress(done, len(files))
        try:
            load_tokenizer(folder)
        except ModelError as error:
            raise ConvertError(
                f"the tokenizer that was made cannot be loaded: {str(error).replace(str(folder), str(dest))}"
            ) from error
    return len(made)
