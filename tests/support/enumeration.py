"""What the installed JAX has: its primitives, and which of them can hold jaxprs.

As a program it prints them as JSON. The tests run it in a process of its own, which imports every
module of JAX and no other library: in theirs there are also the primitives of whatever the tests
before them imported.
"""

import functools
import gc
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

# Modules of tests and of tools: they define no primitives, and some of them run on import.
_NOT_THE_LIBRARY = re.compile(r"test|jax2tf|\.tools\.|colab_tpu|collect_profile")
# What JAX calls the params in which its primitives hold jaxprs, or objects that hold some.
_HOLDS_JAXPRS = re.compile(r"jaxpr|branches|^call$|^callee$|^_prim$")


@functools.cache
def installed() -> dict[str, Any]:
    """What this module prints when it runs as a program.

    `version`; `primitives`, the names of all; `lowerable`, those that JAX can lower: by a rule of
    their own, into other primitives, or by taking their references away; and `holders`, the params
    of each in which jaxprs can stand.
    """
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _import_all_of_jax() -> None:
    import jax

    for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda _: None):
        if not _NOT_THE_LIBRARY.search(module.name):
            # what cannot be imported (bindings of absent hardware) cannot be used either
            try:
                importlib.import_module(module.name)
            except ImportError:
                continue


def _registries(primitive: type) -> Iterator[dict[Any, Any]]:
    """Every dict in JAX's modules, and in dicts there, that maps primitives to something."""

    def maps(value: Any) -> bool:
        return isinstance(value, dict) and any(isinstance(k, primitive) for k in value)

    for name, module in list(sys.modules.items()):
        if name.startswith("jax"):
            for value in list(vars(module).values()):
                if maps(value):
                    yield value
                elif isinstance(value, dict):
                    yield from filter(maps, list(value.values()))


def _keywords(rule: Any, depth: int = 0) -> set[str]:
    """The keyword-only parameters of a rule: the params of its primitive."""
    if depth > 4 or rule is None:
        return set()
    if isinstance(rule, tuple | list):
        return set().union(*(_keywords(r, depth + 1) for r in rule))
    if isinstance(rule, functools.partial):
        return _keywords((rule.func, *rule.args), depth)
    inner = [getattr(rule, "rule", None), getattr(rule, "__wrapped__", None)]
    for cell in getattr(rule, "__closure__", None) or ():
        with_contents = getattr(cell, "cell_contents", None)
        inner += [with_contents] if inspect.isfunction(with_contents) else []
    found = _keywords(inner, depth + 1)
    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):  # not a function, or one without a signature
        return found
    return found | {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def _has_own(instance: Any, method: str, base: type) -> bool:
    """Whether a method of an instance is another than the base class's, which only fails."""
    own = getattr(instance, method, None)
    return getattr(own, "__func__", own) is not getattr(base, method, None)


def _enumerate() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    _import_all_of_jax()
    import jax
    from jax._src import core
    from jax._src.interpreters import mlir
    from jax._src.state import discharge

    primitives = [x for x in gc.get_objects() if isinstance(x, core.Primitive)]
    lowerable = set(mlir._lowerings).union(
        *mlir._platform_specific_lowerings.values(),
        discharge._discharge_rules,
        (p for p in primitives if _has_own(p, "to_lojax", core.Primitive)),
    )
    params: dict[str, set[str]] = {}
    for primitive in primitives:
        rules = [getattr(primitive, "impl", None), getattr(primitive, "abstract_eval", None)]
        params.setdefault(primitive.name, set()).update(_keywords(rules))
    for registry in _registries(core.Primitive):
        for key, rule in list(registry.items()):
            if isinstance(key, core.Primitive):
                params[key.name] |= _keywords(rule)
    holders = {n: sorted(p for p in ps if _HOLDS_JAXPRS.search(p)) for n, ps in params.items()}
    return {
        "version": jax.__version__,
        "primitives": sorted(params),
        "lowerable": sorted(p.name for p in lowerable),
        "holders": {name: found for name, found in sorted(holders.items()) if found},
    }


if __name__ == "__main__":
    print(json.dumps(_enumerate()))
