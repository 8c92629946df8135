"""`Rule`: set a precision for the equations that a pattern matches."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Mapping
from typing import Any

from precpass.policy.precision import Precision
from precpass.policy.primitives import TABLE, OpKind
from precpass.policy.scopes import called_scope

__all__ = ["PATTERNS", "EqnView", "Rule", "called_paths", "layers_around"]

PATTERNS = ("primitive", "scope", "module", "function", "file", "line", "min_flops")
"""The patterns of a rule that a file can hold."""


@dataclasses.dataclass(frozen=True)
class EqnView:
    """What a rule's predicate, `where`, can read of an equation.

    Attributes:
        primitive: the primitive's name, such as "dot_general".
        kind: its `OpKind`.
        scope: the name scopes around it, outermost first, joined by "/", without the marks of jvp,
            transpose, vmap and remat.
        file, function, line: your source line; "" and 0 where unknown.
        shapes, dtypes: of the operands.
        out_shapes, out_dtypes: of the results.
        params: the equation's parameters.
        flops: the floating-point operations of one execution.
    """

    primitive: str
    kind: OpKind
    scope: str
    file: str
    function: str
    line: int
    shapes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[str, ...]
    out_shapes: tuple[tuple[Any, ...], ...]
    out_dtypes: tuple[str, ...]
    params: Mapping[str, Any]
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rule:
    """Set the precision of the equations that match all of the given patterns.

    A precision below the equation's own lowers it: any kind of equation if `primitive` or `where`
    is given, and only matrix products if the rule only names a region (`scope`, `module`,
    `function`, `file`, `line`), so that sums and exponentials there keep their precision. "f32"
    leaves a float32 equation as you wrote it; "f64" evaluates it in float64. The guards of
    accumulation, range and exact integers override rules.

    Attributes:
        primitive: glob on the primitive's name ("dot_general", "reduce_*").
        scope: glob on the name scopes; it matches a region and everything within ("*/head" matches
            "model/head" and "model/head/dense").
        function: glob on the name of your function.
        file: glob on your file ("*/attention.py").
        line: a line of that file, counted from 1; it needs `file`.
        where: a function of an `EqnView` that returns whether the rule applies.
        module: glob on the path of a layer, from the model's root or from anywhere below it; it
            matches everything within the layer: "encoder/layers/*/attention", or "attention" for
            every layer of this name. The path has the names of the attributes in flax nnx and
            equinox, as in "layers/3", and those of the parameters in flax linen ("layers_3") and
            haiku. The path that a report prints matches too ("model.layers[i]").
        min_flops: the fewest floating-point operations of one execution; a matrix product has
            2 M N K. Such a rule says which equations gain, so it is as weak as a preset: a saved
            plan and products whose results are needed exactly override it.
        precision: "f64", "f32", "bf16", "f16" or a `Precision`; for matrix products also "tf32",
            "bf16x3", "bf16x6" and "f32_exact" (docs/pages/explanation/float32.md).
        evidence: why the rule exists, which a plan's reasons show. Comparing rules ignores it.

    Raises:
        ValueError: for a rule without a pattern, a pattern that no primitive of the table matches,
            a line without a file, or an unknown precision.

    Examples:
        >>> Rule(scope="*/head", precision="f32")
        Rule(scope='*/head', precision='f32')
    """

    primitive: str | None = None
    scope: str | None = None
    function: str | None = None
    file: str | None = None
    line: int | None = None
    where: Callable[[EqnView], bool] | None = None
    module: str | None = None
    min_flops: float | None = None
    precision: Precision | str = dataclasses.field(kw_only=True)
    evidence: str = dataclasses.field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.parse(self.precision))
        for name in ("primitive", "scope", "module", "function", "file"):
            glob = getattr(self, name)
            if glob is not None and not (isinstance(glob, str) and glob):
                raise ValueError(f"Rule({name}={glob!r}): must be a glob such as {name}='*'")
        if self.line is not None:
            _check_line(self.line, self.file)
        if self.where is not None and not callable(self.where):
            raise ValueError(f"Rule(where={self.where!r}): must be a function of an EqnView")
        if self.min_flops is not None:
            _check_flops(self.min_flops)
        if not self.patterns:
            raise ValueError(
                f"Rule() without a pattern: give at least one of {', '.join(PATTERNS)}, where"
            )
        if self.primitive is not None:
            _check_primitive(self.primitive)

    @property
    def patterns(self) -> dict[str, Any]:
        """The patterns that were given, by name."""
        fields = (*PATTERNS, "where")
        return {f: getattr(self, f) for f in fields if getattr(self, f) is not None}

    @property
    def parsed(self) -> Precision:
        """The precision, which you may have given by its name."""
        return Precision.parse(self.precision)

    @property
    def is_region(self) -> bool:
        """Whether the rule names no primitive and no predicate; it is for products alone then."""
        return self.primitive is None and self.where is None

    def __repr__(self) -> str:
        # a function's own repr has its address, and a plan's reasons are to be the same tomorrow
        fields = [
            f"{name}={getattr(value, '__qualname__', None) or repr(value)}"
            for name, value in self.patterns.items()
        ]
        fields.append(f"precision={str(self.precision)!r}")
        if self.evidence:
            fields.append(f"evidence={self.evidence!r}")
        return f"Rule({', '.join(fields)})"

    def matches(self, eqn: EqnView) -> bool:
        """Return whether every given pattern matches the equation."""
        return (
            (self.primitive is None or _glob(_dashless(self.primitive), _dashless(eqn.primitive)))
            and self.covers(eqn.scope, eqn.file, eqn.function, eqn.line)
            and (self.min_flops is None or eqn.flops >= self.min_flops)
            and (self.where is None or bool(self.where(eqn)))
        )

    def covers(self, scope: str, file: str, function: str, line: int) -> bool:
        """Return whether every given pattern of a place matches this place."""
        return (
            (self.scope is None or _in_region(self.scope, scope))
            and (self.module is None or _in_module(self.module, scope))
            and (self.function is None or _glob(self.function, function))
            and (self.file is None or _glob(self.file, file))
            and (self.line is None or self.line == line)
        )


@functools.lru_cache(maxsize=65536)
def _glob(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def _dashless(name: str) -> str:
    return name.replace("-", "_")


@functools.lru_cache(maxsize=65536)
def _in_region(pattern: str, scope: str) -> bool:
    parts = scope.split("/")
    regions = ("/".join(parts[: i + 1]) for i in range(len(parts)))
    return any(_glob(pattern, region) or _glob(pattern, "/" + region) for region in regions)


@functools.lru_cache(maxsize=65536)
def _in_module(pattern: str, scope: str) -> bool:
    around = scope.split("/")
    for scopes, path in called_paths(pattern):
        mark = called_scope(path)
        if mark in around and set(scopes) <= set(around[: around.index(mark)]):
            return True
    # haiku's names of modules have a "~" for what a constructor makes, and its scopes do not
    pattern = "/".join(part for part in pattern.split("/") if part not in ("", "~"))
    parts = layers_around(scope)
    ends = range(1, len(parts) + 1)
    return any(_glob(pattern, "/".join(parts[i:end])) for end in ends for i in range(end))


def called_paths(pattern: str) -> list[tuple[list[str], str]]:
    """How a report's path may be read: your name scopes, and the path of a call within them.

    Examples:
        >>> called_paths("encoder.block.up")
        [([], 'encoder.block.up'), (['encoder'], 'block.up'), (['encoder', 'block'], 'up')]
    """
    names = pattern.split(".")
    return [(names[:i], ".".join(names[i:])) for i in range(len(names))]


def layers_around(scope: str) -> list[str]:
    """The names of the layers around an equation.

    Around the methods of a layer, flax linen has one more scope, "layer/layer.method", and
    equinox has one inside of each of its own layers, "layer/eqx.nn.Linear".

    Args:
        scope: the name scopes around it, as `EqnView` has them.
    """
    names: list[str] = []
    for part in scope.split("/"):
        name, _, method = part.partition(".")
        is_extra = name == "precpass" or part.startswith("eqx.nn.")
        if part and not is_extra and not (method and names[-1:] == [name]):
            names.append(part)
    return names


def _check_line(line: object, file: str | None) -> None:
    if not isinstance(line, int) or isinstance(line, bool) or line < 1:
        raise ValueError(f"Rule(line={line!r}): must be a line's number, counted from 1")
    if file is None:
        raise ValueError(
            f"Rule(line={line}) without a file would match that line of every file: give file= "
            "too, such as file='*/attention.py'"
        )


def _check_flops(flops: object) -> None:
    if not isinstance(flops, int | float) or isinstance(flops, bool) or not flops > 0:
        raise ValueError(f"Rule(min_flops={flops!r}): must be a number above 0, such as 2**25")


def _check_primitive(pattern: str) -> None:
    if any(_glob(_dashless(pattern), _dashless(name)) for name in TABLE):
        return
    close = difflib.get_close_matches(_dashless(pattern), TABLE, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    some = f"{', '.join(sorted(TABLE)[:6])} and {len(TABLE) - 6} more"
    raise ValueError(
        f"Rule(primitive={pattern!r}) can never match: {hint}Legal are globs of the primitives "
        f"in precpass.policy.primitives.TABLE ({some}); primitives "
        "with a body (scan, jit, cond) are matched by scope=, opaque ones keep their dtypes."
    )
