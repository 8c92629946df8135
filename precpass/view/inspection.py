"""`Inspection`: a program before and after, the plan between them, and their difference."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.plan.eqn_info import EqnInfo, Site
from precpass.plan.plan import Decision, Plan
from precpass.policy.policy import PrecisionPolicy
from precpass.view.compiled import Compiled, compiled_lines
from precpass.view.diff import check_level, diff_tree, totals
from precpass.view.explain import Explanation, explained
from precpass.view.pages import inspection_page
from precpass.view.picture.chart import chart
from precpass.view.picture.svg import Picture, picture
from precpass.view.text import OFF, Line, rendered, titled

__all__ = ["Inspection"]

_SHOWN = 1000
"""The most lines of jaxprs in HTML, because a notebook stores them and a browser lays them out."""


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """A program before and after a policy, and the plan. `inspect` returns it.

    Attributes:
        before: the jaxpr of your function.
        plan: the decision for every equation.
        after: the rewritten jaxpr; `before` itself if nothing changes.
        policy: the policy that was asked for; None if the pass is turned off.
        scope: the name scope around the program; "" unless inside `keep`.
        name: the function's name.
        device: JAX's name for the device that it is planned for; "" for a CPU, and if the pass is
            turned off.
        compiled: the compiler's figures for a device that is not present; None if no program was
            compiled.
        not_compiled: why the program could not be compiled for such a device; "" if it was, or
            was not meant to be.
    """

    before: Any
    plan: Plan
    after: Any
    policy: PrecisionPolicy | None
    scope: str = ""
    name: str = ""
    device: str = ""
    compiled: Compiled | None = None
    not_compiled: str = ""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Inspection holds jaxprs, which JAX cannot pickle: pickle its .plan and its "
            ".policy, or keep the text of its .diff()"
        )

    def __copy__(self) -> Inspection:
        return self

    def __deepcopy__(self, _memo: object) -> Inspection:
        # Everything in it is immutable.
        return self

    @property
    def graph(self) -> Any:
        """The dataflow of `before` as a `networkx.MultiDiGraph` (see `Graph.to_networkx`)."""
        return self._graph.to_networkx()

    @functools.cached_property
    def _graph(self) -> Graph:
        return Graph.build(self.before)

    def decisions(self) -> Iterator[tuple[Any, Decision, ir.Source]]:
        """Yield each equation, its decision and source line, also in bodies; shared bodies once."""
        for eqn, decision, info in _paired(self.before, self.plan, set()):
            yield eqn, decision, info.source

    def diff(
        self,
        level: str = "equations",
        *,
        color: bool | None = None,
        bookkeeping: bool = False,
    ) -> str:
        """Return the changes as text, each with its reason.

        Args:
            level: "lines" for one line per source line, "equations" for one per equation, with
                equal ones counted, or "jaxpr" for a unified diff of both programs as JAX prints
                them, with the same names for the same values.
            color: whether to use terminal colours; None uses them if standard output is a terminal
                and NO_COLOR is not set.
            bookkeeping: for "jaxpr", whether to show all of `after`: also the primitives by which
                the pass keeps derivatives in float32, and the float32 values that only these read.
                Without it you see the casts and the low-precision matrix products, and nothing that
                no result depends on.

        Returns:
            The totals, and one heading per source line, in order of execution, inside the loops,
            branches and custom rules that it runs in. A body that is called several times
            is listed once. A cast of a body's operand or result is listed with the equation in the
            body that reads or computes it.

        Raises:
            ValueError: for another level, and for `bookkeeping` at another level than "jaxpr".

        Examples:
            >>> import jax.numpy as jnp
            >>> from precpass import inspect
            >>> found = inspect(lambda x: x @ x)(jnp.ones((4, 4)))
            >>> print(found.diff(color=False).splitlines()[0])
            AutoMixedBf16: 1 of 1 equations lowered, 0 widened, 0 as written; 1 cast inserted
        """
        check_level(level)
        if level == "jaxpr":
            return rendered(self._unified(bookkeeping), color, wraps=False)
        if bookkeeping:
            raise ValueError(
                f"level {level!r} has no bookkeeping to show: give level='jaxpr', or leave "
                "bookkeeping out"
            )
        outputs = self._outputs()
        lines = [
            [(totals(self.plan, self.policy_name, outputs.total(), self.device), "")],
            *diff_tree(self.plan, level).lines(),
            *(
                [("outputs  ", "frame"), (f"{n} {what}: the policy's output", "cast")]
                for what, n in outputs.items()
            ),
            *([[("costs  ", "frame"), (self.plan.costs, "reason")]] if self.plan.costs else []),
            *compiled_lines(self.compiled, self.not_compiled),
        ]
        return rendered(lines, color)

    def explain(self) -> Explanation:
        """Return an `Explanation`: figures, what stays in float32 and why, how to change that."""
        decided: dict[int, Decision] = {}
        sites: dict[int, Site] = {}
        for eqn, decision, info in _paired(self.before, self.plan, set()):
            decided.setdefault(id(eqn), decision)
            sites.setdefault(id(eqn), info.site)
        name = self.name or "program"
        policy, device = self.policy_name, self.device
        explanation = explained(
            self._graph, self.plan, self.after, decided, sites, name, policy, device
        )
        return dataclasses.replace(
            explanation, compiled=self.compiled, not_compiled=self.not_compiled
        )

    def draw(self, *, boxes: int = 60) -> Picture:
        """Draw the dataflow, coloured by precision and boxed by layer, name scope and loop.

        A program of few equations is drawn equation by equation. A model is drawn by its layers,
        and repeated layers are one box with a count: flax linen and haiku name layers by scopes,
        elsewhere (nnx, equinox) they are the calls of classes, "up: Linear". Other programs are
        drawn by source lines. A stronger colour means that more bytes move there: those of the
        operands and results of equations, times the trips of loops.

        Args:
            boxes: the largest number of boxes.

        Returns:
            A `Picture`, which a notebook displays. It has `.svg` and `.save(path)`.

        Raises:
            ValueError: for less than one box.
        """
        if boxes < 1:
            raise ValueError(f"boxes={boxes}: at least one box is drawn")
        decided: dict[int, tuple[Decision, int]] = {}
        for eqn, decision, info in _paired(self.before, self.plan, set()):
            casts = sum(cast.what == "inserted" for cast in info.casts)
            decided.setdefault(id(eqn), (decision, casts))
        title = titled(self.name or "program", self.policy_name, self.device)
        return picture(chart(self._graph, decided, boxes), title)

    def _outputs(self) -> Counter[str]:
        """The casts of results to the policy's output format, counted by both formats."""
        pairs = zip(ir.out_avals(self.before), ir.out_avals(self.after), strict=True)
        return Counter(
            f"{ir.precision_of(a)} -> {ir.precision_of(b)}" for a, b in pairs if a.dtype != b.dtype
        )

    def listing(self, *, bookkeeping: bool = False) -> str:
        """Return the rewritten program as JAX prints it, with the names of `diff("jaxpr")`.

        Args:
            bookkeeping: as for `diff`.

        Examples:
            >>> import jax.numpy as jnp
            >>> from precpass import inspect
            >>> found = inspect(lambda x: x @ x)(jnp.ones((4, 4)))
            >>> "convert_element_type" in found.listing(), "precpass_" in found.listing()
            (True, False)
        """
        return ir.texts(self.before, self.after, whole=bookkeeping)[1]

    def _unified(self, bookkeeping: bool = False) -> list[Line]:
        texts = ir.texts(self.before, self.after, whole=bookkeeping)
        # As the name of a file: that of the function, without those of JAX's transforms.
        name = (self.name or "program").rpartition("(")[2].rstrip(")")
        old, new = (list(_marked(text)) for text in texts)
        marked = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
        lines = (line.partition(_MARK)[0] for line in marked)
        styles = {"+": "added", "-": "removed", "@": "hunk"}
        return [[(line, styles.get(line[0], ""))] for line in lines]

    @property
    def policy_name(self) -> str:
        """The policy's name, as it is printed."""
        return OFF if self.policy is None else self.policy.title

    def __repr__(self) -> str:
        return f"<{titled('Inspection', self.policy_name, self.device)}: {self.plan!r}>"

    def _repr_html_(self) -> str:
        name = titled(self.name or "program", self.policy_name, self.device)
        jaxprs = self._unified()
        if len(jaxprs) > _SHOWN:
            left = f"... and {len(jaxprs) - _SHOWN} more lines: .diff('jaxpr') has them all"
            jaxprs[_SHOWN:] = [[(left, "reason")]]
        more = [("explanation", self.explain().lines(all=True)), ("jaxprs", jaxprs)]
        return inspection_page(self.plan, name, more, self.draw().svg)

    def __str__(self) -> str:
        return self.diff()


_MARK = "\0"


def _marked(text: str) -> Iterator[str]:
    """The lines of a printed jaxpr, each with the value that it is about.

    An equation's params may stand on lines of their own, which many equations have. difflib takes
    frequent lines for changed, and is slow where they are not.
    """
    value = ""
    for line in text.splitlines():
        if made := re.match(r" *(\w+):", line):
            value = made[1]
        yield f"{line}{_MARK}{value}"


def _paired(jaxpr: ir.Jaxpr, plan: Plan, seen: set[Any]) -> Iterator[tuple[Any, Decision, EqnInfo]]:
    key = (id(ir.open_jaxpr(jaxpr)), plan)
    if key in seen:
        return
    seen.add(key)
    eqns = ir.open_jaxpr(jaxpr).eqns
    for eqn, decision, info in zip(eqns, plan.decisions, plan.eqn_infos, strict=True):
        yield eqn, decision, info
        for body, inner in zip(ir.bodies(eqn), decision.inner, strict=True):
            yield from _paired(body.jaxpr, inner, seen)
