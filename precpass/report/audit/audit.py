"""`audit`: find what XLA runs in another precision than planned, by source line."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax

from precpass import jaxpr as ir
from precpass.api import inspect, mixed_of
from precpass.devices.detect import planned_for
from precpass.devices.targets import abstract_on, check_places, target_of
from precpass.jaxpr import Source
from precpass.jit.arguments import Declared
from precpass.jit.region import configured
from precpass.jit.staged import AtArguments, in_two_steps, owner_of
from precpass.measure import execute
from precpass.measure.execute import Memory
from precpass.measure.hlo import Module, lowered_text
from precpass.measure.traffic import Traffic
from precpass.plan.eqn_info import EqnInfo, Site
from precpass.policy.policy import PolicyLike
from precpass.policy.scopes import clean_scope, is_backward
from precpass.policy.warned import quietly
from precpass.report.audit.changes import changes
from precpass.report.audit.matching import Change
from precpass.units import counted, listed
from precpass.view.compiled import Compiled
from precpass.view.inspection import Inspection
from precpass.view.page import as_html, folded, page
from precpass.view.rows import alike, listed_sites, rows
from precpass.view.text import Line, heading, rendered

__all__ = ["Audit", "Finding", "audit"]

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that XLA ran or stored in another precision than planned.

    Attributes:
        kind: "product widened", "product narrowed", "cast removed", "cast moved", "loop state
            widened", "buffer widened" or "collective widened".
        source: your source line. For an operation inside a jitted function of JAX's own it is the
            line of the call, or no line if there are several calls.
        scope: the name stack, without the names of the outermost jits.
        operation: the JAX primitive.
        planned: the planned type as HLO writes it, with sizes.
        compiled: the compiled type as HLO writes it, with sizes.
        planned_dtype: the planned format, such as "bf16".
        compiled_dtype: the compiled format, such as "f32".
        why: the consequence.
        site: where you find it: the path of the flax or equinox module, and the line that calls it.
        reason: the plan's reason for this line's equation; "" if the plan has none (for an
            operation that JAX made from a scan), or several that cannot be told apart.
        times: how often it occurs.
    """

    kind: str
    source: Source
    scope: str
    operation: str
    planned: str
    compiled: str
    planned_dtype: str
    compiled_dtype: str
    why: str
    site: Site
    reason: str = ""
    times: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; the source as "file", "line" and "function"."""
        fields = dataclasses.asdict(self)
        del fields["site"]
        return fields

    def __str__(self) -> str:
        scope = f" in {name}" if (name := clean_scope(self.scope)) else ""
        scope += ", backward" if is_backward(self.scope) else ""
        reason = f"  [{self.reason}]" if self.reason else ""
        times = f"  ({self.times} times)" if self.times > 1 else ""
        return (
            f"{self.operation}{scope}: {self.kind}: planned {self.planned}, "
            f"compiled {self.compiled}: {self.why}{reason}{times}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
    """The result of `audit`: a compiled program compared with its plan.

    Attributes:
        findings: the differences, in the order of the program.
        products: the number of matrix products in the program that XLA was given; one in a loop's
            body counts once.
        as_planned: the number of matrix products that run on operands of the planned formats.
        merged: the number of matrix products that the compiled program does not have: they were
            merged with an equal one, computed at compile time, fused as multiplications, or built
            anew by XLA without a name (a TPU's ragged products, some of them).
        backend: the platform that the program was compiled for ("cpu", "gpu", "tpu").
        device_kind: JAX's name for the kind of device ("cpu", "NVIDIA H100 80GB HBM3", ...).
        inspection: the plan, and the program before and after it.
        hlo: the compiled program's text.
        memory: what XLA allocates; None if the backend does not report it.
        traffic: the compiled program's kernels, the bytes that they move, and a TPU's cycles.
    """

    findings: tuple[Finding, ...]
    products: int
    as_planned: int
    merged: int
    backend: str
    device_kind: str
    inspection: Inspection
    hlo: str
    memory: Memory | None
    traffic: Traffic

    @property
    def ok(self) -> bool:
        """Whether nothing differs from the plan."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the programs themselves, as JSON values."""
        changed = self.products - self.as_planned - self.merged
        return {
            "policy": self.inspection.policy_name,
            "backend": self.backend,
            "device_kind": self.device_kind,
            "jax": jax.__version__,
            "ok": self.ok,
            "products": {
                "planned": self.products,
                "as_planned": self.as_planned,
                "changed": changed,
                "merged": self.merged,
            },
            "findings": [finding.to_dict() for finding in self.findings],
            "memory": None if self.memory is None else dataclasses.asdict(self.memory),
            "compiled": dataclasses.asdict(self.traffic),
        }

    def lines(self) -> list[Line]:
        """Return the totals, and the findings by module and line, as styled text."""
        lines: list[Line] = [[(self._totals(), "")]]
        for site, findings in self._by_site():
            lines.append(heading(site.source, site.module))
            lines += ([("  ", ""), (str(f), "wide")] for f in findings)
        return [*lines, *([(text, "")] for text in self._compiled())]

    def text(self, *, color: bool | None = None) -> str:
        """Return the findings as text; `color` is as for `Inspection.diff`."""
        return rendered(self.lines(), color)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Audit: {self._totals()}>"

    def _repr_html_(self) -> str:
        parts = [
            folded(
                heading(site.source, site.module),
                as_html([[(str(f), "wide")] for f in findings]),
                is_open=True,
            )
            for site, findings in self._by_site()
        ]
        around = [as_html([[(text, "")]]) for text in (self._totals(), *self._compiled())]
        return page("".join([around[0], *parts, *around[1:]]))

    def _by_site(self) -> Iterator[tuple[Site, list[Finding]]]:
        """The findings of each line; scopes that differ only in their numbers share a finding."""
        sites = listed_sites(finding.site for finding in self.findings)
        lines: dict[Site, dict[Finding, list[Finding]]] = {}
        for finding in self.findings:
            site = sites[finding.site]
            shared = dataclasses.replace(finding, scope=alike(finding.scope), site=site, times=1)
            lines.setdefault(site, {}).setdefault(shared, []).append(finding)
        for site, there in lines.items():
            yield site, [_together(shared, findings) for shared, findings in there.items()]

    def _compiled(self) -> list[str]:
        """What the compiled program does; nothing for a CPU, where a program's time tells more."""
        if self.backend == "cpu":
            return []
        return Compiled(self.device_kind, self.memory, self.traffic).lines()

    def _totals(self) -> str:
        merged = f", {self.merged} merged, fused or without a name" if self.merged else ""
        outcome = "no finding" if self.ok else counted(len(self.findings), "finding")
        return (
            f"{self.inspection.policy_name}: {self.as_planned} of "
            f"{counted(self.products, 'matrix product')} as planned{merged}; {outcome}. "
            f"Compiled by jax {jax.__version__} for {self.device_kind}; XLA changes other things "
            "for other devices."
        )


_OWN_LINES = "jax_compilation_cache_include_metadata_in_key"
"""An option of JAX. Without it JAX's persistent cache ignores source lines in its key.

A program that was compiled before an edit would then be returned with its old lines, which do
not match those of the plan.
"""


def _together(shared: Finding, found: Sequence[Finding]) -> Finding:
    """Several findings as one, which keeps the scope if all have the same."""
    scope = shared.scope if len({finding.scope for finding in found}) > 1 else found[0].scope
    return dataclasses.replace(shared, scope=scope, times=sum(f.times for f in found))


@in_two_steps
def audit(
    fn: Callable[P, Any], policy: PolicyLike | None = None, *, target: Any = None
) -> AtArguments[P, Audit]:
    """Compile a function and report what XLA runs in another precision than planned.

    The function is planned, rewritten, lowered and compiled for the device on which its arguments
    are; it does not run. The optimised HLO is compared with the program that XLA was given:
    operations with the same name stack and source line are the same operation. Casts inside a
    fusion are not reported, because they store nothing. A matrix product of 16-bit operands with a
    float32 result is as planned.

    Args:
        fn: a function, or the result of `auto_mixed`, whose policy and options are the defaults.
        policy: as for `auto_mixed`. To audit a float32 program, pass "AlwaysF32"; to audit it as
            you wrote it, put `use_policy(None)` around the call.
        target: as for `inspect`: a device that need not be present, for which the program is
            planned and compiled. Its compiler must be installed, by the extra `gpu-target` or
            `tpu-target`, in a process that was started with JAX_PLATFORMS=cpu.

    Returns:
        A function that takes arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) and returns an
        `Audit`: `findings` by source line, `ok`, and how many matrix products run as planned.

    Raises:
        TypeError: for an argument with a symbolic dimension, which XLA cannot compile.
        ValueError: for an unknown target, and for a function with host callbacks and a target.
        ModuleNotFoundError: if the target's compiler is not installed.
        Exception: errors of tracing, lowering or compiling `fn`, unchanged.

    Examples:
        >>> import jax.numpy as jnp
        >>> def f(x, w):
        ...     return x @ w
        >>> found = audit(f)(jnp.ones((8, 8)), jnp.ones((8, 8)))
        >>> found.ok, found.as_planned, found.products
        (True, 1, 1)
    """
    fn, owner = owner_of(fn)
    mixed = mixed_of(fn, policy=policy)
    target = target_of(target)

    def audited(*args: Any, **kwargs: Any) -> Audit:
        args = (*owner, *args)
        declared = Declared(mixed.__wrapped__, mixed.jit_options)
        declared.map(functools.partial(execute.check_sizes, "audit"), args, kwargs)
        if target is not None:
            check_places(target, (args, kwargs))
            args, kwargs = declared.map(lambda x, _: abstract_on(target, x), args, kwargs)
        inspection = inspect(mixed, target=target, compiled=False)(*args, **kwargs)
        # `inspect` has given the plan's warnings already.
        with planned_for(target), quietly(), configured(_OWN_LINES, True):
            program = execute.compiled(mixed, *args, **kwargs)
        if program.refused is not None:
            raise program.refused
        text = program.compiled.as_text()
        planned = Module.parse(lowered_text(program.lowered))
        findings = changes(planned, Module.parse(text))
        return Audit(
            findings=tuple(_findings(findings.found, inspection)),
            products=findings.products,
            as_planned=findings.as_planned,
            merged=findings.merged,
            backend=program.device.platform,
            device_kind=program.device.device_kind,
            inspection=inspection,
            hlo=text,
            memory=program.memory,
            traffic=program.traffic,
        )

    return audited


def _findings(found: tuple[Change, ...], inspection: Inspection) -> Iterator[Finding]:
    """Each distinct change with the plan's reason."""
    # (file, line, primitive) of an equation -> the reasons there, each with its precision.
    reasons: dict[tuple[str, int, str], dict[str, str]] = {}
    # For equations without a line, as in JAX's own jitted functions, the lines of the callers.
    callers: dict[str, set[Source]] = {}
    infos: list[EqnInfo] = []
    for row in rows(inspection.plan):
        info, decision = row.info, row.decision
        there = reasons.setdefault((info.source.file, info.source.line, info.primitive), {})
        there[str(decision.reason)] = str(decision.compute or "")
        infos.append(info)
        if not info.has_line:
            callers.setdefault(info.primitive, set()).add(info.source)
    modules = _modules(infos)
    counted: dict[Finding, int] = {}
    for change in found:
        scope, _, operation = _JITS.sub("", change.name).rpartition("/")
        source, called_at = change.source, callers.get(operation, ())
        if not source.file and len(called_at) == 1:
            (source,) = called_at
        there = reasons.get((source.file, source.line, operation), {})
        fitting = [reason for reason, dtype in there.items() if dtype == change.planned_dtype]
        chosen = fitting or list(there)
        line = ir.in_users_code(change.calls) or source
        finding = Finding(
            kind=change.kind,
            source=source,
            scope=scope,
            operation=operation,
            planned=change.planned,
            compiled=change.compiled,
            planned_dtype=change.planned_dtype,
            compiled_dtype=change.compiled_dtype,
            why=change.why,
            site=Site(modules.get((source, line), ""), line),
            # A line may hold several equations, and no reason is better than a wrong one.
            reason=chosen[0] if len(chosen) == 1 else "",
        )
        counted[finding] = counted.get(finding, 0) + 1
    for finding, times in counted.items():
        yield dataclasses.replace(finding, times=times)


def _modules(infos: Sequence[EqnInfo]) -> dict[tuple[Source, Source], str]:
    """For two lines, where an equation is and where it is called from, the module around it."""
    modules: dict[tuple[Source, Source], dict[str, None]] = {}
    for info in infos:
        modules.setdefault((info.source, info.site.source), {})[info.site.module] = None
    return {
        lines: listed(list(there if len(there) == 1 else dict.fromkeys(map(alike, there))), 3)
        for lines, there in modules.items()
    }


_JITS = re.compile(r"^(?:jit\([^/]*\)/)+")
