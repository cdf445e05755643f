"""What is declared is what is used: pyproject.toml, the two files of constraints and the imports of src, held
against each other.
"""

import ast
import re
import sys
import tomllib
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvant

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEVELOPMENT = ("test", "dev", "docs", "train")  # extras that nobody needs to run kvant
RUN = [PROJECT["dependencies"], *(lines for extra, lines in EXTRAS.items() if extra not in DEVELOPMENT)]
PACKAGES = {
    "constraints.txt": [Requirement(line) for lines in RUN for line in lines],
    "constraints-dev.txt": [
        Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines
    ],
}


def constraints(file: str) -> dict[str, Requirement]:
    lines = (ROOT / file).read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    by_name = {canonicalize_name(line.name): line for line in found}
    assert len(by_name) == len(found), "a package twice"
    return by_name


@pytest.mark.parametrize(
    ("file", "package"), [(file, package) for file in PACKAGES for package in PACKAGES[file]], ids=str
)
def test_the_exact_version_is_in_the_range(file: str, package: Requirement) -> None:
    [exact] = constraints(file)[canonicalize_name(package.name)].specifier
    assert package.specifier.contains(exact.version)
    if package.extras:  # mlx[cpu]: mlx itself is a dependency, with its range
        assert not package.specifier
    else:
        assert {part.operator for part in package.specifier} == {">=", "<"}


@pytest.mark.parametrize("file", PACKAGES)
def test_constraints_are_names_and_versions(file: str) -> None:
    exact = constraints(file)
    for line in exact.values():
        assert line.url is None
        assert not line.extras
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(line.specifier))
    versions = {
        str(exact[name].specifier) for name in ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13")
    }
    assert len(versions) == 1


def test_what_runs_is_what_is_tested() -> None:
    """Both files have one version of a package, and the smaller has nothing that only tests need."""
    run, tested = (constraints(file) for file in PACKAGES)
    assert {name: str(line.specifier) for name, line in run.items()} == {
        name: str(tested[name].specifier) for name in run
    }
    assert not {"pytest", "torch", "sphinx", "ruff"} & run.keys()


@pytest.mark.parametrize("file", PACKAGES)
def test_constraints_say_how_they_are_made(file: str) -> None:
    """By the command that CONTRIBUTING.md has, and from no index of one's own."""
    said, command, *_ = (ROOT / file).read_text().splitlines()
    assert "uv" in said
    commands = (ROOT / "CONTRIBUTING.md").read_text().replace(" \\\n    ", " ").splitlines()
    options = [sorted(line.split("uv ")[1].split()) for line in commands if "uv pip compile" in line]
    assert sorted(command.split("uv ")[1].split()) in options
    assert "://" not in (ROOT / file).read_text()


def test_the_version_is_everywhere_the_same() -> None:
    cited = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", cited, re.MULTILINE) == [PROJECT["version"]] == [kvant.__version__]


def test_every_import_is_declared() -> None:
    imported = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    imported -= {"kvant", "kvant_command", "kvant_llm", *sys.stdlib_module_names}
    assert "mlx" in imported
    lines = [*PROJECT["dependencies"], *EXTRAS["plot"], *EXTRAS["llm"], *EXTRAS["serve"]]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    distributions = packages_distributions()
    for name in imported:
        assert {canonicalize_name(found) for found in distributions[name]} & declared, (
            f"{name} is not declared"
        )


def test_the_wheel_has_what_entry_points_name() -> None:
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    packed = {*wheel["packages"], *(name.removesuffix(".py") for name in wheel["force-include"])}
    named = {**PROJECT["scripts"], **PROJECT["entry-points"]["llm"]}
    assert {f"src/{module.partition(':')[0]}" for module in named.values()} <= packed


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda path: path.stem)
def test_what_scripts_take_of_kvant_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvant":
            module = import_module(node.module or "")
            names = (alias.name for alias in node.names if not hasattr(module, alias.name))
            assert all(find_spec(f"{node.module}.{name}") for name in names)


def test_templates_cannot_leave_their_sandbox() -> None:
    """jinja2 before 3.1.6 let a template call what its sandbox hides (CVE-2025-27516)."""
    [jinja] = (package for package in PACKAGES["constraints.txt"] if package.name == "jinja2")
    assert not jinja.specifier.contains(Version("3.1.5"))
