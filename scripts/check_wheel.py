"""Build kvant's sdist and wheel, compare their contents with git, and run the wheel in an empty environment.

Usage: python scripts/check_wheel.py [folder for the two files]. It needs a clone, and the packages build and hatchling.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path
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
    """Install the wheel alone in an empty environment, and use it from another folder."""
    venv.create(folder / "empty", with_pip=True)
    programs = folder / "empty" / "bin"
    constraints = ROOT / "constraints.txt"
    run(str(programs / "pip"), "install", "--quiet", "--constraint", str(constraints), f"{wheel}[cpu]", cwd=folder)
    run(str(programs / "pip"), "check", cwd=folder)
    story = run(str(programs / "kvant"), "generate", STORY, "--max-tokens", "40", "--temp", "0", "--quiet", cwd=folder)
    if "Pip" not in story:
        sys.exit(f"the wheel's story is not about Pip: {story!r}")
    models = run(str(programs / "kvant"), "models", cwd=folder)
    if "qwen2.5-0.5b" not in models:
        sys.exit(f"the wheel's kvant models does not know qwen2.5-0.5b: {models!r}")


def run(*command: str, cwd: Path | None = None) -> str:
    """A command's output. If the command fails, the program ends with all of it."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it could find the tree
    done = subprocess.run(
        command, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
