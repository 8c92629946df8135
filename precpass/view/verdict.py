"""What a policy changes in a program and what it leaves in float32, in figures and in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from precpass.jaxpr import Source
from precpass.measure.counts import LOW_FORMATS, Counts
from precpass.plan.eqn_info import Site
from precpass.units import counted, sized
from precpass.view.text import Line

__all__ = ["Verdict", "Wide"]

_NAMES = {"bf16": "bfloat16", "f16": "float16"}
_HALF = 0.55
"""The share of bytes that is called half."""
_REASONS = 3
"""The most reasons for which saved values stay in float32 that are named."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The figures of an `Explanation`: what the policy changes in numbers.

    Attributes:
        before, after: the counts of both programs (`precpass.measure.counts.Counts`): matrix
            products, casts, FLOPs and bytes by format.
        narrowed: the matrix products that are float64 in the program and float32 under the policy.
        left_wide: the matrix products that keep their precision and are not in low precision.
        unread_casts: the casts in the rewritten program that only its derivatives read; XLA drops
            them if you take none.
        swapped: the matrix products whose operands are exchanged to replace transposes.
        stored: the results that are rounded where they are defined and stored in 16 bits, in
            whatever precision they are computed.
        crossed: the operands and results of loops, branches and calls with a 16-bit or 8-bit copy.
        crossed_on_8: those of them whose copy has 8 bits, and a scale.
        kept_before, kept_after: the bytes that the forward pass saves for the backward pass
            (`precpass.analysis.residuals`); 0 in a program without one.
        kept_wide: why values among them stay in float32, each with the bytes of these values.
    """

    before: Counts
    after: Counts
    narrowed: int
    left_wide: int
    unread_casts: int
    swapped: int
    stored: int
    crossed: int
    crossed_on_8: int
    kept_before: float
    kept_after: float
    kept_wide: tuple[tuple[str, float], ...] = ()

    def brief(self) -> str:
        """Return how much runs in low precision, in a sentence."""
        after = self.after
        if not after.products:
            return "It has no matrix products, so there is nothing to run in low precision."
        formats = [name for name in after.flops if name in LOW_FORMATS and after.flops[name]]
        low = " and ".join(_NAMES.get(name, name) for name in formats) or "low precision"
        narrowed = f", {self.narrowed} in f32 instead of f64" if self.narrowed else ""
        do = "does" if self.left_wide == 1 else "do"
        wide = f"; {self.left_wide} {do} not" if self.left_wide else ""
        products = f"{after.low} of {counted(after.products, 'matrix product')}"
        run = "runs" if after.products == 1 else "run"
        return f"{products} {run} in {low}{narrowed}: {after.low_flops:.1%} of the FLOPs{wide}."

    def saving(self) -> str:
        """Return what the policy saves for the backward pass, in a sentence."""
        if not (self.kept_before or self.kept_after):
            return "`compare` measures time and memory."
        before, after = sized(self.kept_before), sized(self.kept_after)
        sizes = f"{after}, as in the program as written"
        if before != after:
            sizes = f"{after} instead of {before}"
        return f"Saved for the backward pass: {sizes}."

    def why_kept(self) -> Iterator[str]:
        """Yield why what is saved for the backward pass is not half."""
        if self.kept_after > _HALF * self.kept_before and self.kept_wide:
            yield "Saved for the backward pass in float32:"
            yield from (f"  {sized(nbytes)} {why}." for why, nbytes in self.kept_wide[:_REASONS])

    def lines(self) -> Iterator[Line]:
        """Yield the figures in words, as styled text."""
        after, before = self.after, self.before
        casts, nbytes = after.casts - before.casts, after.cast_bytes - before.cast_bytes
        yield [(self.brief(), "wide" if self.left_wide else "low")]
        changed = f"{counted(abs(casts), 'cast')} {'more' if casts >= 0 else 'fewer'} than written"
        written = f", which write {sized(abs(nbytes))} {'more' if nbytes >= 0 else 'less'}"
        unread = f"; {self.unread_casts} of them only for derivatives" if self.unread_casts else ""
        low = f"{sized(after.low_bytes)} of results in 16 bits; "
        yield [(low, ""), (changed, "cast"), (written + unread, "")]
        if self.swapped:
            what = counted(self.swapped, "matrix product")
            yield [(f"{what} with exchanged operands, which replace transposes", "")]
        if self.stored or self.crossed:
            eight = self.crossed_on_8
            kept = f"{counted(self.crossed - eight, 'value')} in 16 bits"
            kept += f" and {eight} in 8 bits" if eight else ""
            stored = f"{counted(self.stored, 'result')} stored in 16 bits"
            yield [(f"{stored}; {kept} kept across function and loop boundaries", "low")]


@dataclasses.dataclass(frozen=True)
class Wide:
    """Equal matrix products that a policy leaves in float32.

    Attributes:
        source: your source line.
        scope: the name scopes around them; "layer_*" for several that differ only in their numbers.
        what: primitive, operands and results.
        reason: why they stay in float32.
        remedy: how to change it; None if nobody would want to.
        times: the number of equations.
        flops: the floating-point operations of all of them in one run.
        site: where you find them: their module, and the line that calls it.
    """

    source: Source
    scope: str
    what: str
    reason: str
    remedy: str | None
    times: int
    flops: float
    site: Site
