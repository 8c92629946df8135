"""The package's shape: what imports what, how long files and functions are, and how branched."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import networkx as nx
from radon.complexity import cc_visit

PACKAGE = Path(__file__).resolve().parents[1] / "precpass"
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_COMPLEXITY = 20
"""The largest cyclomatic complexity that radon grades C."""
MAX_FLOORS = 12
MAX_FOLDER_LINES = {
    "analysis": 3_960,
    "autotune": 525,
    "backends": 560,
    "cli": 1_275,
    "devices": 950,
    "eight_bits": 695,
    "jaxpr": 5_830,
    "jit": 2_680,
    "measure": 1_550,
    "numerics": 4_955,
    "plan": 1_420,
    "planner": 3_175,
    "policy": 2_155,
    "report": 4_015,
    "rewrite": 1_755,
    "testing": 425,
    "view": 3_705,
}
"""What each folder had when it was last counted. A change that adds a mechanism takes one away."""
ROOT_FILES = {
    *("__init__.py", "__main__.py", "api.py", "moved.py", "units.py", "version.py"),
    *("loss_scale.py", "quant.py", "types.py"),  # for users, as the folders numerics and report are
    "py.typed",
}

# Every folder and file of the package's root, lowest first, with those that it may import. A row
# may name only what stands above it here, so imports point only downward.
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "units": set(),
    "moved": set(),
    "policy": set(),
    "devices": {"policy"},
    "jaxpr": {"policy"},
    "analysis": {"units", "policy", "jaxpr"},
    "measure": {"policy", "devices", "jaxpr", "analysis"},
    "plan": {"units", "policy", "jaxpr"},
    "backends": {"policy", "jaxpr", "analysis", "plan"},
    "eight_bits": {"policy", "devices", "jaxpr", "analysis", "plan", "backends"},
    "planner": {*("units", "policy", "jaxpr", "analysis", "plan"), "backends", "eight_bits"},
    "rewrite": {"policy", "jaxpr", "analysis", "plan", "backends", "eight_bits"},
    "view": {"units", "policy", "jaxpr", "analysis", "measure", "plan", "rewrite"},
    "autotune": {
        *("units", "policy", "devices", "jaxpr", "analysis", "measure", "plan", "planner"),
        *("rewrite",),
    },
    "jit": {"policy", "devices", "jaxpr", "plan", "planner", "rewrite", "autotune"},
    "api": {"policy", "devices", "jaxpr", "plan", "view", "jit"},
    "loss_scale": {"policy", "units"},
    "numerics": {
        *("units", "policy", "jaxpr", "analysis", "plan", "eight_bits", "planner", "view"),
        *("jit", "api", "loss_scale"),
    },
    "report": {
        *("units", "policy", "devices", "jaxpr", "analysis", "measure", "plan"),
        *("planner", "rewrite", "view", "jit", "api"),
    },
    "testing": {"units", "policy", "jaxpr", "plan", "view", "api"},
    "quant": {"moved", "numerics"},
    "types": {"policy", "plan", "jit"},
    "__init__": {
        *("version", "moved", "policy", "plan", "api", "numerics", "report", "testing"),
        *("loss_scale", "quant", "types"),
    },
    "cli": {
        *("version", "units", "policy", "devices", "plan", "view", "jit", "api", "report"),
        *("testing",),
    },
    "__main__": {"cli"},
}
# Imported where a function is called: a method of a value that writes it as a file or a page, and
# what a program that only calls `auto_mixed` does not need.
MAY_IMPORT_WHEN_CALLED: dict[str, set[str]] = {
    "policy": {"view"},
    "plan": {"view"},
    "api": {"view", "measure"},
}
# The only folder that touches JAX's IR.
USES_JAX_EXTEND = {"jaxpr"}

FILES = sorted(PACKAGE.rglob("*.py"))


def each_file(check: Callable[[Path], None]) -> Callable[[], None]:
    """A test that checks every file and names all that fail."""

    def test() -> None:
        failures: list[str] = []
        for path in FILES:
            try:
                check(path)
            except AssertionError as error:
                failures.append(f"{path.relative_to(PACKAGE)}: {error}")
        assert not failures, "\n".join(failures)

    test.__doc__ = check.__doc__
    return test


def module_of(path: Path) -> str:
    """The folder of the root that a file is in; a file of the root itself, by its name."""
    parts = path.relative_to(PACKAGE).parts or ("__init__",)
    return parts[0].removesuffix(".py")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of attributes on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@functools.cache
def imports(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """Of each import: its line, the full dotted name, and whether it stands in a function."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str, bool]]:
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


@functools.cache
def mentions(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of all that a file imports or reaches through attributes."""
    return tuple(_mentions(path))


def _mentions(path: Path) -> Iterator[tuple[int, str]]:
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


def name_of(path: Path) -> str:
    """A file as a module, "precpass.plan.plan"."""
    parts = ("precpass", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path) for path in FILES}


def imported(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Of each import from the package: its line, the module, and whether a function makes it."""
    for line, name, in_function in imports(path):
        if name.split(".")[0] == "precpass":
            # the last part of a name may be something in the module
            module = name if name in MODULES else name.rpartition(".")[0]
            yield line, module, in_function


def test_every_folder_is_in_the_table():
    assert FILES, f"no Python file in {PACKAGE.name}/"
    unknown = sorted({module_of(path) for path in FILES} - MAY_IMPORT.keys())
    assert not unknown, f"give these a row in MAY_IMPORT: {', '.join(unknown)}"


def test_the_root_holds_folders_and_little_else():
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} <= ROOT_FILES


def test_the_table_points_only_downward():
    lower: set[str] = set()
    for folder, allowed in MAY_IMPORT.items():
        assert allowed <= lower, f"{folder} names what is not below it: {allowed - lower}"
        lower.add(folder)


def test_the_table_has_few_floors():
    floors: dict[str, int] = {}
    for folder, allowed in MAY_IMPORT.items():
        floors[folder] = 1 + max((floors[below] for below in allowed), default=0)
    assert max(floors.values()) <= MAX_FLOORS, floors


@each_file
def test_imports_point_only_downward(path: Path):
    own = module_of(path)
    for line, module, in_function in imported(path):
        target = module_of(PACKAGE.parent / (module.replace(".", "/") or "."))
        allowed = MAY_IMPORT[own] | {own}
        if in_function:
            allowed = allowed | MAY_IMPORT_WHEN_CALLED.get(own, set())
        assert target in allowed, (
            f"{path.name}:{line}: {own} may not import {target} ({module}); "
            f"allowed: {', '.join(sorted(allowed))}"
        )


def test_no_modules_import_each_other_in_a_circle():
    graph = nx.DiGraph()
    for path in FILES:
        own = name_of(path)
        edges = {module for _, module, in_function in imported(path) if not in_function}
        graph.add_edges_from((own, module) for module in edges - {own})
    assert nx.is_directed_acyclic_graph(graph), nx.find_cycle(graph)


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
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{path.name}: {lines} lines"


def test_folders_do_not_grow():
    lines: Counter[str] = Counter()
    for path in FILES:
        if path.parent != PACKAGE:
            folder = path.relative_to(PACKAGE).parts[0]
            lines[folder] += len(path.read_text(encoding="utf-8").splitlines())
    assert lines.keys() == MAX_FOLDER_LINES.keys()
    grown = {folder: n for folder, n in lines.items() if n > MAX_FOLDER_LINES[folder]}
    assert not grown, f"take something away, or move what it is about: {grown}"


@each_file
def test_functions_are_not_tangled(path: Path):
    blocks = cc_visit(path.read_text(encoding="utf-8"))
    tangled = {
        block.name: block.complexity for block in blocks if block.complexity > MAX_COMPLEXITY
    }
    assert not tangled, f"{path.name}: {tangled}; `radon cc -s` counts the branches"


@each_file
def test_functions_are_short(path: Path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            assert lines <= MAX_FUNCTION_LINES, (
                f"{path.name}:{node.lineno}: {node.name} has {lines} lines without docstrings"
            )
