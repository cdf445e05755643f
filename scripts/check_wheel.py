"""Build kvant's sdist and wheel, compare their contents with git, and run the wheel in an empty environment.

pip takes the wheel from an index on this machine, and its dependencies from the indexes it is set up for.
Usage: python scripts/check_wheel.py [folder for the two files]. It needs a clone, and the packages build and
    hatchling.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
STORY = "Tell me a story about a fox named Pip."


def main() -> None:
    """Every check, in order. The first that fails ends the program with its finding."""
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(sys.argv[1] if len(sys.argv) > 1 else scratch).resolve()
        sdist, wheel = build(built, Path(scratch) / "from-the-tree")
        tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())
        compare("the sdist", names_of_sdist(sdist), tracked)
        compare("the wheel", names_of_wheel(wheel), {place_in_wheel(name) for name in tracked} - {""})
        try_wheel(wheel, Path(scratch))
    print(f"{sdist.name} and {wheel.name}: hold what they should, and the wheel runs")


def build(folder: Path, other: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel made from it. The wheel made from the tree must equal it to the byte."""
    command = (sys.executable, "-m", "build", "--no-isolation", str(ROOT), "--outdir")
    run(*command, str(folder))
    run(*command, str(other), "--wheel")
    [sdist], [wheel] = folder.glob("kvant-*.tar.gz"), folder.glob("kvant-*.whl")
    if wheel.read_bytes() != (other / wheel.name).read_bytes():
        sys.exit(f"{wheel.name}: the sdist and the tree build different wheels")
    return sdist, wheel


def names_of_sdist(sdist: Path) -> set[str]:
    """The sdist's files, without the folder that holds them all and without the metadata."""
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}


def names_of_wheel(wheel: Path) -> set[str]:
    """The wheel's files, without the metadata."""
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def place_in_wheel(name: str) -> str:
    """The place of a repository's file in the wheel, or nothing if it does not belong there."""
    if name == "weights.toml":
        return "kvant/weights/weights.toml"
    return name.removeprefix("src/") if name.startswith("src/") else ""


def compare(archive: str, found: set[str], expected: set[str]) -> None:
    """End the program unless both sets are the same."""
    if found != expected:
        sys.exit(f"{archive} lacks {sorted(expected - found)} and has {sorted(found - expected)} too many")


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install the wheel by its name in an empty environment, and do there what README says."""
    venv.create(folder / "empty", with_pip=True)
    pip, python, kvant = (str(folder / "empty" / "bin" / name) for name in ("pip", "python", "kvant"))
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    with index(wheel, folder / "index") as (address, asked):
        run(pip, "install", "--quiet", *constraints, "--extra-index-url", address, "kvant[cpu]", cwd=folder)
        if f"/simple/kvant/{wheel.name}" not in asked:
            sys.exit(f"pip did not take {wheel.name} from {address}, which it asked for {asked}")
    run(pip, "check", cwd=folder)
    [example] = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    for command, expected in (
        ((kvant, "generate", STORY, "--max-tokens", "40", "--temp", "0", "--quiet"), "Pip"),
        ((python, "-c", example), "bytes, now and later"),
        ((kvant, "models"), "qwen2.5-0.5b"),
    ):
        said = run(*command, cwd=folder)
        if expected not in said:
            sys.exit(f"{' '.join(command)} does not say {expected!r}: {said!r}")


@contextmanager
def index(wheel: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """An index that has the wheel alone: its address, and the paths it was asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            asked.append(self.path)

    (folder / "simple" / "kvant").mkdir(parents=True)
    shutil.copy(wheel, folder / "simple" / "kvant")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/", asked
        server.shutdown()


def run(*command: str, cwd: Path | None = None) -> str:
    """A command's output. If the command fails, the program ends with all of it."""
    # it could find the tree
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
