"""`Rule`: set a precision for the equations that a pattern matches."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from precpass.policy.precision import Precision
from precpass.policy.primitives import TABLE, OpKind
from precpass.policy.scopes import called_scope

__all__ = [
    "MOST_KNOWN",
    "REDUCES",
    "WIRE",
    "EqnView",
    "Rule",
    "called_paths",
    "check_keys",
    "layers_around",
]

WIRE = "bf16 wire, f32 sum"
"""The `reduce` in which devices send terms in 16 bits, and each adds up its part in float32."""
MOST_KNOWN = 1e20
"""The largest magnitude of a rule. The product of two scales for it is finite in float32."""
REDUCES = {
    "auto": "gradients of weights in float32, other sums as their products' results",
    "f32": "every sum between devices",
    "bf16": "gradients of weights too",
    WIRE: "in a shard_map",
}
"""The formats in which devices add up what matrix products made, each with a remark."""


@dataclasses.dataclass(frozen=True)
class EqnView:
    """What a rule's predicate, `where`, can read of an equation.

    Attributes:
        primitive: the primitive's name, such as "dot_general".
        kind: its `OpKind`.
        scope: the name scopes around it, outermost first, joined by "/", without the marks of jvp,
            transpose, vmap and remat.
        file: the file of your source line; "" if unknown.
        function: the function of that line; "" if unknown.
        line: the number of that line; 0 if unknown.
        shapes: the shapes of the operands.
        dtypes: the dtypes of the operands.
        out_shapes: the shapes of the results.
        out_dtypes: the dtypes of the results.
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


def _is_glob(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_line(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_flops(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _pattern(
    matches: Callable[[Any, EqnView], bool],
    takes: Callable[[Any], bool] = _is_glob,
    must_be: str = "a glob such as {name}='*'",
    *,
    is_place: bool = True,
) -> Any:
    """A field of `Rule` that says which equations it matches, and what is legal for it.

    Checks, matching, `repr` and dicts follow from these fields.
    """
    about = {"matches": matches, "takes": takes, "must_be": must_be, "is_place": is_place}
    return dataclasses.field(default=None, metadata=about)


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
        largest: for matrix products in 8 bits, the largest magnitudes of the two operands, as
            `calibrate` writes them. The scales are made for these instead of for the operands of
            each call, so no call looks for the largest magnitude. Larger numbers become the largest
            one that the scale reaches, infinities too. Arguments of the program, such as weights,
            have scales of their own, and a function that JAX differentiates has one for each call.
        evidence: why the rule exists, which a plan's reasons show. Comparing rules ignores it.
        reduce: the format of sums between devices there, as for `PrecisionPolicy.with_reduce`; None
            for the policy's.

    Raises:
        ValueError: for a rule without a pattern, a pattern that no primitive of the table matches,
            a line without a file, or an unknown precision or reduce.

    Examples:
        >>> Rule(scope="*/head", precision="f32")
        Rule(scope='*/head', precision='f32')
    """

    primitive: str | None = _pattern(
        lambda glob, eqn: _glob(_dashless(glob), _dashless(eqn.primitive)), is_place=False
    )
    scope: str | None = _pattern(lambda glob, eqn: _in_region(glob, eqn.scope))
    function: str | None = _pattern(lambda glob, eqn: _glob(glob, eqn.function))
    file: str | None = _pattern(lambda glob, eqn: _glob(glob, eqn.file))
    line: int | None = _pattern(
        lambda n, eqn: n == eqn.line, _is_line, "a line's number, counted from 1"
    )
    where: Callable[[EqnView], bool] | None = _pattern(
        lambda where, eqn: bool(where(eqn)), callable, "a function of an EqnView", is_place=False
    )
    module: str | None = _pattern(lambda glob, eqn: _in_module(glob, eqn.scope))
    min_flops: float | None = _pattern(
        lambda flops, eqn: eqn.flops >= flops,
        _is_flops,
        "a number above 0, such as 2**25",
        is_place=False,
    )
    precision: Precision | str = dataclasses.field(kw_only=True)
    largest: tuple[float, float] | None = dataclasses.field(default=None, kw_only=True)
    evidence: str = dataclasses.field(default="", kw_only=True, compare=False)
    reduce: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", Precision.parse(self.precision))
        if not self.patterns:
            legal = ", ".join(_PATTERNS)
            raise ValueError(f"Rule() without a pattern: give at least one of {legal}")
        for name, value in self.patterns.items():
            if not _PATTERNS[name]["takes"](value):
                must_be = _PATTERNS[name]["must_be"].format(name=name)
                raise ValueError(f"Rule({name}={value!r}): must be {must_be}")
        if self.line is not None and self.file is None:
            raise ValueError(
                f"Rule(line={self.line}) without a file would match that line of every file: give "
                "file= too, such as file='*/attention.py'"
            )
        if self.primitive is not None:
            _check_primitive(self.primitive)
        if self.largest is not None:
            object.__setattr__(self, "largest", _magnitudes(self.largest, self.parsed))
        if self.reduce not in (None, *REDUCES):
            legal = ", ".join(map(repr, REDUCES))
            raise ValueError(f"Rule(reduce={self.reduce!r}): legal are {legal} and None")

    @functools.cached_property
    def patterns(self) -> dict[str, Any]:
        """The patterns that were given, by name."""
        given = {name: getattr(self, name) for name in _PATTERNS}
        return {name: value for name, value in given.items() if value is not None}

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
        fields = {
            name: getattr(value, "__qualname__", None) or repr(value)
            for name, value in (self.patterns | self._others()).items()
        }
        return f"Rule({', '.join(f'{name}={value}' for name, value in fields.items())})"

    def _others(self) -> dict[str, Any]:
        more = {"largest": self.largest, "evidence": self.evidence, "reduce": self.reduce}
        return {"precision": str(self.precision)} | {k: v for k, v in more.items() if v}

    def to_dict(self) -> dict[str, Any]:
        """Return this rule as a dict; a predicate is a ValueError."""
        if self.where is not None:
            raise ValueError(f"{self!r} has a predicate, which no file can hold: add it in Python")
        return self.patterns | self._others()

    @classmethod
    def from_dict(cls, data: Any) -> Rule:
        """Return the rule of `to_dict`; the errors list the legal keys and values."""
        if not isinstance(data, Mapping):
            raise TypeError(f"a rule as data is a dict, not {data!r}")
        fields = cast("Mapping[str, Any]", data)
        patterns = (name for name in _PATTERNS if name != "where")
        check_keys(fields, (*patterns, "precision", "largest", "evidence", "reduce"), "a rule")
        if "precision" not in fields:
            legal = ", ".join(repr(str(precision)) for precision in Precision)
            raise ValueError(f"the rule {dict(fields)!r} has no precision: legal are {legal}")
        return cls(**fields)

    def matches(self, eqn: EqnView) -> bool:
        """Return whether every given pattern matches the equation."""
        return all(_PATTERNS[name]["matches"](value, eqn) for name, value in self.patterns.items())

    def covers(self, scope: str, file: str, function: str, line: int) -> bool:
        """Return whether every given pattern of a place matches this place."""
        place = EqnView("", OpKind.BOUNDARY, scope, file, function, line, (), (), (), (), {})
        return all(
            _PATTERNS[name]["matches"](value, place)
            for name, value in self.patterns.items()
            if _PATTERNS[name]["is_place"]
        )


_PATTERNS = {f.name: f.metadata for f in dataclasses.fields(Rule) if "matches" in f.metadata}


def check_keys(data: Mapping[str, Any], legal: tuple[str, ...], what: str) -> None:
    """Refuses a dict with other keys than the legal ones."""
    for key in data:
        if key not in legal:
            raise ValueError(f"{what} has no key {key!r}: legal are {', '.join(legal)}")


@functools.lru_cache(maxsize=65536)
def _glob(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def _magnitudes(given: Any, precision: Precision) -> tuple[float, float]:
    """The largest magnitudes of a product's operands, as a rule's `largest` gives them."""
    if not precision.is_scaled:
        legal = " or ".join(repr(p.value) for p in Precision if p.is_scaled)
        raise ValueError(f"Rule(largest={given!r}) needs precision {legal}, not {str(precision)!r}")
    is_pair = isinstance(given, (list, tuple)) and len(given) == 2
    if not (is_pair and all(_is_flops(n) and n <= MOST_KNOWN for n in given)):
        raise ValueError(
            f"Rule(largest={given!r}): must be two numbers above 0, up to {MOST_KNOWN:g}"
        )
    return float(given[0]), float(given[1])


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
