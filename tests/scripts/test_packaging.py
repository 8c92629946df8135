"""What pyproject.toml says is true: dependencies, extras, and a wheel that runs README's code."""

import ast
import email
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import precpass
from tests.scripts.test_documents import ROOT, code_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def imported(folder: str) -> dict[str, str]:
    """The packages of others that the files of a folder import, each with one of the places."""
    places: dict[str, str] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "precpass":
                    places.setdefault(top, f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", one)[0] for one in requirements}


def test_every_package_that_is_imported_is_a_dependency_or_of_an_extra():
    optional = {name for packages in EXTRAS.values() for name in names_of(packages)}
    known = names_of(PROJECT["dependencies"]) | optional
    places = imported("precpass")
    assert {"jax", "rich", "equinox", "pandas"} <= places.keys()
    assert {name: place for name, place in places.items() if name not in known} == {}


@pytest.mark.parametrize(
    "extra, folder",
    [("report", "precpass/report"), ("solvers", "precpass/numerics/solvers")],
)
def test_an_extra_has_all_that_its_part_of_the_package_imports(extra: str, folder: str):
    complete = names_of(PROJECT["dependencies"]) | names_of(EXTRAS[extra])
    assert {n: place for n, place in imported(folder).items() if n not in complete} == {}


# ---------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The bin folder of an environment with the wheel, and the dependencies of this one."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    subprocess.run([*install, "--no-deps", str(wheel)], check=True, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A line of a .pth file is a folder behind this one: the wheel's package is found first.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def ran(*command: str, cwd: Path) -> str:
    dropped = ("PYTHONPATH", "PRECPASS", "JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"JAX_PLATFORMS": "cpu", "PRECPASS_CACHE_DIR": str(cwd / "cache")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.programs
def test_the_wheel_has_the_whole_package_and_true_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (metadata,) = [name for name in inside if name.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(archive.read(metadata))
    package = ROOT / "precpass"
    files = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "precpass/py.typed" in files
    assert {name for name in inside if name.startswith("precpass/")} == files
    assert fields["Version"] == precpass.__version__
    assert set(fields.get_all("Provides-Extra", [])) == EXTRAS.keys()
    assert fields["License-Expression"] == PROJECT["license"]


@pytest.mark.programs
def test_the_wheel_installs_and_runs_the_code_of_readme(installed: Path, tmp_path: Path):
    python = str(installed / "python")
    place = "import precpass; print(precpass.__file__, precpass.__version__)"
    file, version = ran(python, "-c", place, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent) and version == precpass.__version__
    said = ran(str(installed / "precpass"), "--version", cwd=tmp_path)
    assert said.startswith(f"precpass {version} (jax ")
    code = code_of(ROOT / "README.md")
    assert code
    (tmp_path / "readme.py").write_text("\n\n".join(code), encoding="utf-8")
    said = ran(python, "readme.py", cwd=tmp_path)
    assert "of its FLOPs in low precision" in said or "Use AutoMixedBf16" in said
