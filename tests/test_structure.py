"""The package's shape: what imports what, and how long files and functions are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "precpass"
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

# Every module of the package, lowest first, with the modules of the package that it may import.
# A module may name only modules that stand above it here, so imports point only downward.
# A folder such as report/ counts as one module.
MAY_IMPORT: dict[str, set[str]] = {
    "units": set(),
    "policy": set(),
    "devices": {"policy"},
    "jaxpr": {"policy"},
    "analysis": {"units", "policy", "jaxpr"},
    "measure": {"policy", "devices", "jaxpr", "analysis"},
    "plan": {"units", "policy", "jaxpr"},
    "planner": {"units", "policy", "devices", "jaxpr", "analysis", "plan"},
    "rewrite": {"policy", "jaxpr", "analysis", "plan"},
    "view": {"units", "policy", "jaxpr", "analysis", "measure", "plan", "rewrite"},
    "autotune": {
        *("policy", "devices", "jaxpr", "analysis", "measure", "plan", "planner"),
        *("rewrite",),
    },
    "jit": {"policy", "jaxpr", "plan", "planner", "rewrite", "autotune"},
    "api": {"policy", "jaxpr", "plan", "view", "jit"},
    "numerics": {
        *("units", "policy", "jaxpr", "analysis", "plan", "view", "jit"),
        *("api",),
    },
    "report": {
        *("units", "policy", "devices", "jaxpr", "analysis", "measure", "plan"),
        *("planner", "view", "jit", "api"),
    },
    "__init__": {"policy", "plan", "view", "jit", "api", "numerics", "report"},
    "testing": {"units", "policy", "jaxpr", "plan", "view", "api"},
    "cli": {"policy", "plan", "view", "jit", "api", "report", "testing"},
    "__main__": {"cli"},
}
# Methods of a value that write it as a file or a page import what does so when they are called.
MAY_IMPORT_WHEN_CALLED: dict[str, set[str]] = {
    "policy": {"view"},
    "plan": {"planfile", "view"},
}
# The only module that touches JAX's IR.
USES_JAX_EXTEND = {"jaxpr"}

FILES = sorted(PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize(
    "path", FILES, ids=[p.relative_to(PACKAGE).as_posix() for p in FILES]
)


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of attributes on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Of each import: its line, the full dotted name, and whether it stands in a function."""
    package = ("precpass", *path.relative_to(PACKAGE).parts[:-1])
    tree = parse(path)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += (node.module,) if node.module else ()
            names = [".".join((*base, alias.name)) for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name, id(node) in inside) for name in names)


def mentions(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a file imports or reaches through attributes."""
    yield from ((line, name) for line, name, _ in imports(path))
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield node.lineno, name


def docstring_lines(tree: ast.AST) -> int:
    """The lines of all docstrings in a tree, nested functions and classes included."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(ast.Constant(value=str())) as doc, *_]:
                    total += (doc.end_lineno or doc.lineno) - doc.lineno + 1
    return total


def test_every_module_is_in_the_table():
    assert FILES, f"no Python file in {PACKAGE.name}/"
    unknown = sorted({module_of(path) for path in FILES} - MAY_IMPORT.keys())
    assert not unknown, f"give these modules a row in MAY_IMPORT: {', '.join(unknown)}"


def test_the_table_points_only_downward():
    lower: set[str] = set()
    for module, allowed in MAY_IMPORT.items():
        assert allowed <= lower, f"{module} names modules that are not below it: {allowed - lower}"
        lower.add(module)


@each_file
def test_imports_point_only_downward(path: Path):
    own = module_of(path)
    if own not in MAY_IMPORT:
        pytest.fail(f"module {own!r} has no row in MAY_IMPORT")
    for line, name, in_function in imports(path):
        first, _, rest = name.partition(".")
        if first != "precpass":
            continue
        target = rest.partition(".")[0]
        # `from precpass import auto_mixed` names no module: it imports the package's top.
        target = target if target in MAY_IMPORT.keys() | set(map(module_of, FILES)) else "__init__"
        allowed = MAY_IMPORT[own]
        if in_function:
            allowed = allowed | MAY_IMPORT_WHEN_CALLED.get(own, set())
        assert target == own or target in allowed, (
            f"{path.name}:{line}: {own} may not import {target} ({name}); "
            f"allowed: {', '.join(sorted(allowed)) or 'nothing of the package'}"
        )


@each_file
def test_nothing_from_jax_src(path: Path):
    private = re.compile(r"(^|\.)_src(\.|$)")
    found = {f"{path.name}:{line}: {name}" for line, name in mentions(path) if private.search(name)}
    # Strings, docstrings and comments too: importlib takes a string.
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if "jax._src" in text:
            found.add(f"{path.name}:{line}: {text.strip()}")
    assert not found, f"jax._src is private to JAX: {sorted(found)}"


@each_file
def test_only_one_module_uses_jax_extend(path: Path):
    if module_of(path) in USES_JAX_EXTEND:
        return
    found = {
        f"{path.name}:{line}: {name}"
        for line, name in mentions(path)
        if f"{name}.".startswith("jax.extend.")
    }
    assert not found, f"only {USES_JAX_EXTEND} may use jax.extend: {sorted(found)}"


@each_file
def test_only_one_module_reads_the_params_of_equations(path: Path):
    if module_of(path) in USES_JAX_EXTEND:
        return
    read = [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr == "params"
    ]
    assert not read, f"make it a helper of precpass/jaxpr/reading.py: {read}"


@each_file
def test_files_are_short(path: Path):
    lines = len(path.read_text(encoding="utf-8").splitlines()) - docstring_lines(parse(path))
    assert lines <= MAX_FILE_LINES, f"{path.name}: {lines} lines without docstrings"


@each_file
def test_functions_are_short(path: Path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            assert lines <= MAX_FUNCTION_LINES, (
                f"{path.name}:{node.lineno}: {node.name} has {lines} lines without docstrings"
            )
