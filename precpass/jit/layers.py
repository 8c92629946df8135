"""The names of layers: the path of each flax nnx or equinox module, as a name scope of its call.

flax linen and haiku name the scopes of their layers. nnx and equinox do not, so while a function is
traced under a policy with a `Rule(module=...)`, the calls of their modules are put under
`jax.named_scope`. For that the `__call__` of their classes is replaced, and put back when the last
such trace has ended, also by an error. In other threads the replaced methods do as before.

A module is known by its object. A transform such as `jax.grad` calls the function with another
object for the same module. If the function calls such an object, it is taken for the only module
of its class inside of the module that is running, or of several for the one with the same arrays,
which a derivative and a vmap hand on. If that is not known either, its name is that of its class.

The Python calls that JAX records with each equation, which pictures read, would need no such
methods; but they say `layers[i]` where a rule asks for `layers/3`.

Nothing here imports flax or equinox: without them there is no module to be named.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.rules import called_paths
from precpass.policy.scopes import called_scope

__all__ = ["layers_asked", "name_root_modules", "naming_layers"]


def layers_asked(policy: PrecisionPolicy | None) -> frozenset[str]:
    """The layers that a policy's rules name."""
    rules = () if policy is None else policy.rules
    return frozenset(rule.module for rule in rules if rule.module is not None)


@contextlib.contextmanager
def naming_layers(asked: frozenset[str]) -> Generator[None]:
    """A context in which calls of modules, in this thread, stand in scopes of their paths.

    A call that reports have under the path of a layer that is `asked` for by a rule is marked.
    """
    outer = _here.trace
    trace = outer or _Trace()
    before, trace.asked = trace.asked, asked
    try:
        with _replaced_calls():
            _here.trace = trace
            yield
    finally:
        _here.trace, trace.asked = outer, before


def name_root_modules(fn: Any, args: Any, kwargs: Any) -> None:
    """Names the modules in arguments, and that of which `fn` is a method, as roots of models."""
    trace = _here.trace
    if trace is not None:
        for _, module in _modules((getattr(fn, "__self__", None), args, kwargs), ""):
            trace.name_all(module, "")


# ---------------------------------------------------------------- the modules of a model


def _bases() -> tuple[type[Any], ...]:
    libraries = (sys.modules.get(name) for name in ("flax.nnx", "equinox"))
    found = (getattr(library, "Module", None) for library in libraries)  # None while one is loading
    return tuple(module for module in found if module is not None)


def _modules(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The outermost modules in a value and its lists, tuples and dicts, with their paths."""
    if isinstance(value, _bases()):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _modules(item, _joined(path, str(name)))


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


class _Trace:
    """The modules that one trace has met, with their paths, and those that are being called."""

    def __init__(self) -> None:
        # The modules are held, so that no other one has the identity of one that is gone.
        self.known: dict[int, tuple[Any, str]] = {}
        self.running: list[str] = []
        self.asked: frozenset[str] = frozenset()

    def name_all(self, module: Any, path: str) -> None:
        """Names a module and all inside of it; one that is known keeps its name."""
        todo = [(path, module)]
        while todo:
            at, found = todo.pop()
            if id(found) in self.known:
                continue
            self.known[id(found)] = found, at
            for name, value in vars(found).items():
                if not name.startswith("_pytree__"):  # flax's own
                    todo += _modules(value, _joined(at, name))

    def path(self, module: Any) -> str:
        """The path of a module that is called."""
        if id(module) not in self.known:
            self.name_all(module, self._path_of_unknown(module))
        return self.known[id(module)][1]

    def _path_of_unknown(self, module: Any) -> str:
        around = self.running[-1] if self.running else ""
        inside = f"{around}/" if around else ""
        found = alike = {
            path: known
            for known, path in self.known.values()
            if type(known) is type(module) and f"{path}/".startswith(inside)
        }
        if len(alike) > 1:
            arrays = _arrays(module)
            alike = {path: known for path, known in alike.items() if _arrays(known) == arrays}
        if len(alike) == 1:
            return next(iter(alike))
        is_root = not found and not self.running
        return "" if is_root else _joined(around, type(module).__name__)

    @contextlib.contextmanager
    def call(self, module: Any, called: str) -> Generator[None]:
        """A context around a module's call, which reports have at the path `called`, if any."""
        path, around = self.path(module), self.running[-1] if self.running else ""
        inner = path.removeprefix(f"{around}/") if around else path
        scopes = [inner] if path != around else []
        asked = {path for pattern in self.asked for _, path in called_paths(pattern)}
        scopes += [called_scope(a) for a in sorted(asked) if _is_called(called, a)]
        scope = jax.named_scope("/".join(scopes)) if scopes else contextlib.nullcontext()
        self.running.append(path)
        try:
            with scope:
                yield
        finally:
            self.running.pop()


def _is_called(called: str, asked: str) -> bool:
    """Whether a report's path is the one that a rule has, in which "*" may stand for numbers."""
    return bool(called) and fnmatch.fnmatchcase(called, asked.replace("[", "[[]"))


def _arrays(module: Any) -> list[int]:
    """The identities of a module's arrays, as the trace around a derivative or a vmap has them."""
    return [id(ir.outer_value(x)) for x in jax.tree.leaves(module)]


class _Here(threading.local):
    trace: _Trace | None = None


_here = _Here()


# ---------------------------------------------------------------- the classes


_lock = threading.Lock()
_traces = 0
_replaced: dict[type[Any], tuple[Any, Any]] = {}


@contextlib.contextmanager
def _replaced_calls() -> Generator[None]:
    """A context in which `__call__` of all classes of modules that there are is replaced.

    The methods are put back when the last such context of any thread ends.
    """
    global _traces
    with _lock:
        _traces += 1
        for cls in _classes_with_calls():
            if cls not in _replaced:
                original = vars(cls)["__call__"]
                _replaced[cls] = original, _naming(original)
                cls.__call__ = _replaced[cls][1]
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            while _replaced and not _traces:
                cls, (original, naming) = _replaced.popitem()
                if vars(cls).get("__call__") is naming:  # unless someone has put another there
                    cls.__call__ = original


def _classes_with_calls() -> Iterator[type[Any]]:
    todo, seen = list(_bases()), set[type[Any]]()
    while todo:
        cls = todo.pop()
        if cls in seen:
            continue
        seen.add(cls)
        todo += type.__subclasses__(cls)
        # equinox's own wrappers of functions are modules, and no layers
        is_wrapper = cls.__module__.startswith("equinox.") and ".nn" not in cls.__module__
        if "__call__" in vars(cls) and not is_wrapper:
            yield cls


def _naming(original: Any) -> Callable[..., Any]:
    code = getattr(inspect.unwrap(original), "__code__", None)

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = _here.trace
        call = original.__get__(self, type(self))
        if trace is None:
            return call(*args, **kwargs)
        frame = inspect.currentframe()
        called = ir.called_path(frame.f_back, code) if frame and code else ""
        with trace.call(self, called):
            return call(*args, **kwargs)

    return __call__
