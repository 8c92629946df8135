"""What must hold of a random program under a policy; each failure is an AssertionError."""

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from precpass.policy.presets import PRESETS
from tests.support.comparisons import (
    assert_same,
    distance,
    finite,
    fits,
    has_user_line,
    low_sums,
    numeric,
    same_avals,
    same_reports,
    size,
)
from tests.support.jaxprs import PRODUCTS, assert_well_typed, contracts, low_products, named, walk
from tests.support.oracle import LOW, Noisy, Plain, Planned, is_float
from tests.support.passes import quiet
from tests.support.random_programs import Program, build, seeded_program

NEAR = 3.0
"""How many times the deviation of a disturbed float32 program a result may deviate."""
NOISE = 4.0
"""The disturbance, in unit roundoffs of the low format."""

Fn = Callable[..., Any]


def _jvp(fn: Fn) -> Fn:
    def pushed(params: Any, others: Any) -> Any:
        run = lambda params: fn(params, others)  # noqa: E731
        tangents = jax.tree.map(lambda x: x * 0.5 + 0.1, params)
        return jax.jvp(run, (params,), (tangents,), has_aux=True)

    return pushed


def _vmap(fn: Fn) -> Fn:
    def mapped(params: Any, others: Any) -> Any:
        batch = jax.tree.map(lambda x: jnp.stack([x, x * 0.5, x * -1.0]), params)
        return jax.vmap(lambda params: fn(params, others)[0])(batch)

    return mapped


FORMS: dict[str, Fn] = {
    "value": lambda fn: fn,
    "grad": lambda fn: jax.value_and_grad(fn, has_aux=True),
    "jvp": _jvp,
    "vmap": _vmap,
}

POLICIES: dict[str, pp.types.PrecisionPolicy] = {
    **PRESETS,
    "rules": pp.AutoMixedBf16.with_rules(
        pp.Rule(scope="*part", precision="f32"),
        pp.Rule(primitive="tanh", precision="bf16"),
        pp.Rule(primitive="reduce_sum", precision="bf16"),
    ),
    "sums": pp.Custom({"compute": "f16", "reduction": "bf16"}),
    "movement": pp.Custom({"data_movement": "bf16", "elementwise": "bf16"}),
    "float64": pp.AutoMixedBf16.with_retypes("f64", "f32"),
}
"""The presets, and policies with rules and orders of their own."""
AUTO = ("AutoMixedConservativeF16", "AutoMixedF16", "AutoMixedBf16")
ROTATION = (*POLICIES, *AUTO)


MIX = (
    *[("value", True)] * 50,
    *[("grad", True)] * 25,
    *[("grad", False)] * 12,
    *[("jvp", True), ("jvp", False), ("vmap", True), ("vmap", False)] * 3,
)
"""How often each form is drawn, with the pass around the derivative and inside of it."""
COMPILED, TWICE = 0.004, 0.15
"""The shares of a sweep's cases that are compiled and run, and that are rewritten twice."""


@dataclasses.dataclass
class Outcome:
    """What a check found.

    Attributes:
        skipped: why there was nothing to check: plain JAX refuses the program.
        products, lowered: their numbers in the plan.
        decided: whether nothing in the program was so near a discontinuity that values
            could not be compared with float32's.
        finite: whether float32's own results are finite.
        compared: whether values were held against float32's.
    """

    skipped: str = ""
    products: int = 0
    lowered: int = 0
    decided: bool = True
    finite: bool = True
    compared: bool = False


@dataclasses.dataclass
class Case:
    """A program in one form under one policy.

    Attributes:
        form: a name of `FORMS`.
        inside: whether the pass is around the derivative, and not inside of it.
        compiled: whether it is compiled and run too.
        twice: whether the rewritten program is rewritten again.
        target: the device that it is planned for, if it is not this machine's.
    """

    program: Program
    policy: str = "AutoMixedBf16"
    form: str = "value"
    inside: bool = True
    compiled: bool = False
    twice: bool = False
    target: str | None = None

    def check(self) -> Outcome:
        """Checks all that can be checked of it."""
        # custom rules of a random program close over what is traced around them: `jax.jit` of it
        # alone leaves tracers behind, and jax_check_tracer_leaks would report that
        absent = planned_for(target_of(self.target)) if self.target else contextlib.nullcontext()
        with absent, self.program.context(), jax.check_tracer_leaks(False):
            return _Check(self).run()


def swept_case(seed: int, index: int) -> Case:
    """The case number `index` of a sweep: presets in rotation, the rest drawn."""
    rng = random.Random(f"{seed}/{index}/case")
    policy = ROTATION[index % len(ROTATION)]
    form, inside = rng.choice(MIX)
    compiled, twice = rng.random() < COMPILED, rng.random() < TWICE
    return Case(seeded_program(seed, index), policy, form, inside, compiled, twice)


class _Check:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.policy = POLICIES[case.policy]
        self.fn, self.log = build(case.program)
        self.args = case.program.args()
        self.flat = [jnp.asarray(x) for x in jax.tree.leaves(self.args)]
        self.derived = FORMS[case.form](self.fn)
        self.outcome = Outcome()

    def run(self) -> Outcome:
        if self.case.inside:
            self.inside()
        else:
            self.outside()
        return self.outcome

    def evaluated(self, run: Callable[[], list[Any]]) -> tuple[list[Any], list[Any]]:
        """The results, and what was reported meanwhile."""
        self.log.clear()
        out = run()
        return out, list(self.log)

    def refused(self) -> bool:
        """Whether plain JAX cannot run the program either; it says so in the outcome."""
        try:
            traced = jax.jit(self.derived).trace(*self.args)
            if self.case.form == "jvp" and named(traced.jaxpr, "custom_lin"):
                traced.lower()
        except (NotImplementedError, TypeError, ValueError) as error:
            self.outcome.skipped = f"{type(error).__name__}: {error}"[:80]
        return bool(self.outcome.skipped)

    # ------------------------------------------------------------ the pass around all

    def inside(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = pp.inspect(self.derived, self.policy)(*self.args)
            except Exception:
                if self.refused():
                    return
                raise
        if self.case.form == "jvp" and self.refused():
            return
        same_avals(found.after, found.before)
        self.nothing_is_silent(found, [str(w.message) for w in caught])
        assert found.plan.changes or found.after is found.before
        plain = Plain()
        wanted, reports = self.evaluated(lambda: plain.run(found.before, self.flat))
        self.outcome.finite = finite(wanted)
        if found.plan.changes:
            self.rewritten(found, plain, wanted, reports)
        if self.case.compiled:
            mixed = pp.auto_mixed(self.derived, policy=self.policy)
            self.compiled(found.before, mixed, plain, wanted)

    def rewritten(
        self, found: pp.report.Inspection, plain: Plain, wanted: list[Any], reports: list[Any]
    ) -> None:
        assert_well_typed(found.after)
        oracle = Planned()
        planned, expected = self.evaluated(lambda: oracle.run(found.before, found.plan, self.flat))
        got, reported = self.evaluated(lambda: Plain().run(found.after, self.flat))
        for i, (a, b) in enumerate(zip(got, planned, strict=True)):
            assert_same(a, b, f"output {i} is not what the plan says")
        same_reports(reported, expected, exact=True)
        same_reports(reported, reports, exact=False)
        self.legal(found, oracle)
        self.near(found.before, plain, got, wanted)
        if self.case.twice:
            again = pp.auto_mixed(pp.auto_mixed(self.derived, policy=self.policy))
            with quiet():
                text = str(pp.inspect(again, self.policy)(*self.args).after)
            assert text == str(found.after), "twice is not once"

    def nothing_is_silent(self, found: pp.report.Inspection, messages: Sequence[str]) -> None:
        eqns = {id(eqn) for eqn in walk(found.before)}
        decided: set[int] = set()
        for eqn, decision, source in found.decisions():
            decided.add(id(eqn))
            assert str(decision.reason).strip(), eqn
            assert source.file or not has_user_line(eqn), f"no source line: {eqn}"
            assert len(decision.stored) == len(eqn.outvars)
        assert decided == eqns, "equations without a decision"
        counts = found.plan.count()
        lowered = sum(n for (_, a), n in counts.items() if a is pp.types.Action.LOWER)
        complaint = any("lowered nothing" in text for text in messages)
        own = any("the user's own precision" in str(d.reason) for d in found.plan.walk())
        if self.policy.lowers:
            assert complaint == (lowered == 0) or own, messages
        self.outcome.products = sum(
            n for (k, _), n in counts.items() if k is pp.types.OpKind.COMPUTE
        )
        self.outcome.lowered = counts[pp.types.OpKind.COMPUTE, pp.types.Action.LOWER]

    def legal(self, found: pp.report.Inspection, oracle: Planned) -> None:
        """The plan by rules of its own: which equations may be low at all."""
        retypes = {p.dtype for p in self.policy.retypes}
        for eqn, decision, _ in found.decisions():
            if decision.action is not pp.types.Action.LOWER:
                continue
            name = eqn.primitive.name
            floats = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars) if is_float(v.aval)}
            assert floats <= retypes and not floats & LOW, eqn
            if self.case.policy in AUTO and "keep(" not in str(decision.reason):
                moves = decision.kind is pp.types.OpKind.DATA_MOVEMENT
                # on a GPU what is chosen from operands is chosen in 16 bits
                moves |= self.case.target is not None and name in ("select_n", "max", "min")
                assert moves or name in PRODUCTS, f"not ordered: {eqn}"
                assert moves or contracts(eqn), f"nothing contracted: {eqn}"
        for eqn, decision, operands in oracle.products:
            if decision.action is pp.types.Action.LOWER:
                for x in operands[:2]:
                    fits(x, decision.compute, eqn)
        if self.case.policy in AUTO:
            sums = ("reduce_sum", "reduce_prod", "cumsum", "cumprod", "add_any", "scatter-add")
            before, after = low_sums(found.before, sums), low_sums(found.after, sums)
            assert after <= before, "a sum is taken in the low format"

    # ------------------------------------------------------------ the pass inside

    def outside(self) -> None:
        program = self.case.program
        if self.case.form == "jvp" and not program.x64 and "island" in program.names():
            self.outcome.skipped = "a float64 region has no forward mode with x64 off"
            return
        with quiet():
            mixed = FORMS[self.case.form](pp.auto_mixed(self.fn, policy=self.policy))
            try:
                traced = jax.jit(mixed).trace(*self.args)
            except Exception:
                if self.refused():
                    return
                raise
        if self.case.form == "jvp" and self.refused():
            return
        before = jax.jit(self.derived).trace(*self.args)
        assert jax.tree.structure(traced.out_info) == jax.tree.structure(before.out_info)
        same_avals(traced.jaxpr, before.jaxpr)
        self.outcome.lowered = len(low_products(traced.jaxpr))
        plain = Plain()
        wanted, _ = self.evaluated(lambda: plain.run(before.jaxpr, self.flat))
        self.outcome.finite = finite(wanted)
        got, _ = self.evaluated(lambda: Plain().run(traced.jaxpr, self.flat))
        self.near(before.jaxpr, plain, got, wanted)
        if self.case.compiled:
            self.compiled(before.jaxpr, mixed, plain, wanted)

    # ------------------------------------------------------------ values

    def near(self, before: Any, plain: Plain, got: list[Any], wanted: list[Any]) -> None:
        """As near float32's as a float32 program whose products are disturbed."""
        if self.case.policy not in AUTO or not self.outcome.finite:
            return
        # a region may keep the other format: bfloat16 has fewer digits, float16 less range
        regions = "kept" in self.case.program.names()
        formats = LOW if regions else (self.policy.low.dtype,)
        deviations = self.deviations(before, plain, wanted, formats, range(2))
        if deviations is None:
            self.outcome.decided = False
            return
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert finite([a]), f"output {i} is not finite"
            found, noise = distance(a, b), 1e-5 * size(b) + 1e-6 if numeric(b) else 0.0
            seed = 2
            # disturbances of one number may cancel: in two runs once in thousands, in 8 never;
            # and integers made of a float's bits change with it, some of them in every other run
            while found > NEAR * deviations[i] + noise and seed < 8:
                more = self.deviations(before, plain, wanted, formats, [seed])
                deviations[i] = max(deviations[i], more[i] if more else 0.0)
                seed += 1
            allowed = NEAR * deviations[i] + noise
            assert found <= allowed, f"output {i} deviates by {found:.3g}, not {allowed:.3g}"
        self.outcome.compared = True

    def deviations(
        self, before: Any, plain: Plain, wanted: list[Any], formats: Any, seeds: Iterable[int]
    ) -> list[float] | None:
        """By how much disturbed runs deviate at most; None if a decision falls otherwise in one."""
        found = [0.0] * len(wanted)
        for seed in seeds:
            noisy = Noisy(formats, NOISE, seed)
            out = noisy.run(before, self.flat)
            if noisy.decisions != plain.decisions:
                return None
            found = [max(d, distance(a, b)) for d, a, b in zip(found, out, wanted, strict=True)]
        return found

    def compiled(self, before: Any, mixed: Fn, plain: Plain, wanted: list[Any]) -> None:
        with quiet():
            out, reported = self.evaluated(lambda: self.executed(mixed))
        reference, reports = self.evaluated(lambda: self.executed(self.derived))
        same_reports(reported, reports, exact=False)
        assert jax.tree.structure(out) == jax.tree.structure(reference)
        got, own = jax.tree.leaves(out), jax.tree.leaves(reference)
        for a, b in zip(got, own, strict=True):
            assert jax.typeof(a) == jax.typeof(b)
        self.near(before, plain, got, wanted)

    def executed(self, fn: Fn) -> Any:
        out = jax.block_until_ready(jax.jit(fn)(*self.args))
        jax.effects_barrier()
        return out
