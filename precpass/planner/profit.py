"""Whether a product pays: its time in float32 and in a low format, and who knows these times.

A scaled product (`precpass.rewrite.scaled_product`) pays if it takes less time than the product in
float32 and than that in bfloat16. Rounding its operands to 8 bits is a part of its time, as a cast
is of a product's in 16 bits. A value that several scaled products read is rounded once for all of
them, so each bears only its share.

The planner asks one object, a `ProfitModel`. It has its answers before the plan is made, from the
table of devices or from a measurement ahead of time, so that planning stays a function of the
program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.equations import is_matrix_product
from precpass.analysis.graph import Graph
from precpass.analysis.operand_origin import OperandOrigin, OperandOrigins
from precpass.analysis.sizes import NOMINAL_SIZE, flops, nbytes
from precpass.analysis.uses import Uses
from precpass.devices.devices import Device, cast_seconds, product_seconds, rounding_seconds
from precpass.plan import reasons
from precpass.planner.storage.energy import Candidate
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op
from precpass.policy.saved import SavedPrecisions
from precpass.units import duration

__all__ = ["Assumed", "Product", "ProductPricing", "ProductTimes", "ProfitModel", "sentence"]


@dataclasses.dataclass(frozen=True)
class Product:
    """A product, with everything around it that its time depends on.

    Attributes:
        eqn: one of the equations that are this product.
        low: the format that is asked about, of 16 bits or of 8.
        origins: where its two data operands come from.
        behind: the permutation of a transpose that alone reads its result; else ().
    """

    eqn: ir.Eqn
    low: Precision
    origins: tuple[OperandOrigin, OperandOrigin]
    behind: tuple[int, ...] = ()

    @functools.cached_property
    def avals(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The dtype and the shape of each operand; symbolic dimensions have a nominal size."""
        return tuple(
            (np.dtype(v.aval.dtype).name, tuple(map(_size, v.aval.shape))) for v in self.eqn.invars
        )

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The parameters of the equation on one device."""
        settings = dict(ir.sorted_params(self.eqn))
        return settings | {name: None for name in _SHARDING if name in settings}

    @functools.cached_property
    def text(self) -> str:
        """The product in words: unique to it, and the same in every process."""
        avals = " ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in self.avals)
        settings = [f"{k}={_shown(v)}" for k, v in self.settings.items() if v is not None]
        behind = f", then transposed {self.behind}" if self.behind else ""
        origins = ", ".join(origin.value for origin in self.origins)
        form = f"{self.eqn.primitive.name} {avals} {' '.join(settings)}"
        return f"{form} in {self.low}: operands {origins}{behind}"


_SHARDING = ("out_sharding",)


def _size(dimension: Any) -> int:
    return dimension if isinstance(dimension, int) else NOMINAL_SIZE


def _shown(value: Any) -> str:
    try:
        return np.dtype(value).name if isinstance(value, type | np.dtype) else repr(value)
    except TypeError:
        return repr(value)


class ProductTimes(NamedTuple):
    """The times of a product.

    Attributes:
        wide: seconds in float32.
        low: seconds in the low format, its casts included.
        by: "measured"; or "assumed", with the reason if a measurement was asked for.
    """

    wide: float
    low: float
    by: str

    @property
    def ratio(self) -> float:
        """The low time divided by the wide one."""
        return self.low / self.wide


class ProfitModel(Protocol):
    """An object that knows the times of products, and so whether lowering them pays."""

    @property
    def costs(self) -> str:
        """Where the times are from, and of which device they are."""
        ...

    @property
    def device(self) -> Device:
        """The device whose other figures (bandwidth, launches) are used with these times."""
        ...

    def least_gain(self, wide: float) -> float:
        """The seconds that lowering a product must save to pay, given its seconds in float32."""
        ...

    def product_times(self, product: Product) -> ProductTimes:
        """The times of a product by itself, its casts included."""
        ...

    def sentence(self, product: Product, product_times: ProductTimes) -> reasons.Reason:
        """That a product does not pay."""
        ...

    def new_warnings(self) -> Sequence[str]:
        """Warnings for the user that arose since this was last called."""
        ...


@dataclasses.dataclass(frozen=True)
class Assumed:
    """The profit model whose times come from the table of devices.

    Attributes:
        device: the device whose figures are used.
        instead: why nothing was measured, if a measurement was asked for.
    """

    device: Device
    instead: str = ""

    @property
    def costs(self) -> str:
        """The device whose figures count."""
        return f"assumed for {self.device}{f' ({self.instead})' if self.instead else ''}"

    def least_gain(self, wide: float) -> float:
        """Zero: a table has no noise."""
        return 0.0

    def sentence(self, product: Product, product_times: ProductTimes) -> reasons.Reason:
        """The reason that a product does not pay by the table."""
        return sentence(product, product_times, f"on {self.device}")

    def new_warnings(self) -> Sequence[str]:
        """None: reading a table cannot fail."""
        return ()

    def product_times(self, product: Product) -> ProductTimes:
        """The times of a product by the table."""
        return self.by_table(product)

    def by_table(self, product: Product, by: str = "assumed") -> ProductTimes:
        """The times of a product by the table; the low one includes casts of operands in memory."""
        eqn, device = product.eqn, self.device
        work = flops(eqn, with_zeros=device.platform == "cpu")
        out = nbytes(eqn.outvars[0].aval)
        operands = sum(nbytes(v.aval) for v in eqn.invars[:2])
        wide = product_seconds(device, work, operands + out, Precision.F32)
        moved = operands * product.low.dtype.itemsize / 4 + out
        if product.low is Precision.INT8:
            # its sums are an int32 array, which another kernel multiplies by the scales
            moved += 2 * out
        low = float(product_seconds(device, work, moved, product.low))
        return ProductTimes(float(wide), low + sum(casting(product, device)), by)


class ProductPricing:
    """The prices of a graph's products: each is put to a `ProfitModel` with what is around it.

    Args:
        graph: the program that is planned.
        uses: who reads each of its values.
        profit_model: knows the times; without one, every product pays.
    """

    def __init__(self, graph: Graph, uses: Uses, profit_model: ProfitModel | None) -> None:
        self._origins = OperandOrigins(graph)
        self._uses = uses
        self._profit_model = profit_model

    def is_recast(self, body: int, atom: ir.Atom) -> bool:
        """Whether the backward pass casts a value again (`OperandOrigins.is_recast`)."""
        return self._origins.is_recast(body, atom)

    @property
    def device(self) -> Device | None:
        """The device whose figures are used; None if every product pays."""
        return self._profit_model.device if self._profit_model else None

    def against(
        self, eqn: ir.Eqn, body: int, low: Precision, readers: tuple[int, int] = (1, 1)
    ) -> reasons.Reason | None:
        """Why a float32 product does not pay by itself; None if it pays or is no product.

        Args:
            eqn: the product.
            body: the index of its body.
            low: the format that is asked about.
            readers: for each operand, how many products share its cast.
        """
        product = self.product(eqn, body, low)
        if self._profit_model is None or product is None:
            return None
        product_times = self._shared(product, self._profit_model.product_times(product), readers)
        pays = product_times.low < product_times.wide - self._profit_model.least_gain(
            product_times.wide
        ) or (product_times.by != "measured" and product_times.low <= product_times.wide)
        return None if pays else self._profit_model.sentence(product, product_times)

    def against_scaled(
        self, eqn: ir.Eqn, body: int, scaled: Precision, readers: tuple[int, int]
    ) -> str:
        """Why a product is not faster in 8 bits than in bfloat16, in words; "" if it is.

        Args:
            eqn: a dot that may be scaled.
            body: the index of its body.
            scaled: its format of 8 bits.
            readers: for each operand, how many scaled products read it.
        """
        eight = self.product(eqn, body, scaled)
        if self._profit_model is None or eight is None:
            return ""
        times = self._shared(eight, self._profit_model.product_times(eight), readers)
        sixteen = self._profit_model.product_times(dataclasses.replace(eight, low=Precision.BF16))
        if times.low < sixteen.low - self._profit_model.least_gain(sixteen.low):
            return ""
        return f"it takes {duration(times.low)}, and {duration(sixteen.low)} in bf16 ({times.by})"

    def _shared(
        self, product: Product, product_times: ProductTimes, readers: tuple[int, int]
    ) -> ProductTimes:
        """The times of a product that bears only its own share of its operands' casts."""
        casts = self._casts_in(product, product_times)
        others = sum(seconds * (1 - 1 / n) for seconds, n in zip(casts, readers, strict=True))
        return product_times._replace(low=product_times.low - others)

    def candidate(self, eqn: ir.Eqn, body: int, low: Precision) -> Candidate | None:
        """The times of a float32 product with its casts apart; None for any other equation."""
        product = self.product(eqn, body, low)
        if self._profit_model is None or product is None:
            return None
        product_times = self._profit_model.product_times(product)
        left, right = self._casts_in(product, product_times)
        wide = max(product_times.wide - self._profit_model.least_gain(product_times.wide), 0.0)
        why = self._profit_model.sentence(product, product_times)
        return Candidate(wide, product_times.low - left - right, (left, right), why)

    def _casts_in(self, product: Product, product_times: ProductTimes) -> tuple[float, float]:
        """The seconds that the casts of the two operands have in a product's low time."""
        assert self._profit_model is not None
        casts = casting(product, self._profit_model.device)
        if product_times.by == "measured":
            # The measured time includes the casts. The table charges each cast a kernel launch
            # that a small fused cast does not have; take it off.
            launch = self._profit_model.device.launch
            casts = max(casts[0] - launch, 0.0), max(casts[1] - launch, 0.0)
        part = min(1.0, product_times.low / 2 / sum(casts)) if sum(casts) else 0.0
        return part * casts[0], part * casts[1]

    def product(self, eqn: ir.Eqn, body: int, low: Precision) -> Product | None:
        """The `Product` of a float32 product with contracted dimensions; None for all others."""
        if self._profit_model is None or op(eqn.primitive.name).kind is not OpKind.COMPUTE:
            return None
        is_known = low.is_low or low.is_scaled
        is_asked = ir.precision_of(eqn.invars[0].aval) is Precision.F32 and is_known
        if not (is_asked and is_matrix_product(eqn)):
            return None
        lhs, rhs = (self._origins.of(body, v) for v in eqn.invars[:2])
        readers = self._uses.of(body).get(eqn.outvars[0], ())
        alone = readers[0] if len(readers) == 1 else None
        behind = (alone is not None and ir.permutation(alone)) or ()
        return Product(eqn, low, (lhs, rhs), behind)

    def costs(self, lock: SavedPrecisions | None) -> str:
        """Where the costs in a plan are from, a saved plan's included; "" if none was asked."""
        saved = f"in the saved plan: {lock.costs}" if lock and lock.costs else ""
        return "; ".join(
            filter(None, (self._profit_model.costs if self._profit_model else "", saved))
        )


def casting(product: Product, device: Device) -> tuple[float, float]:
    """The seconds of making each of a product's operands low; 0 for a cast inside a fusion."""
    left, right = (
        float(_cast_seconds(origin, nbytes(v.aval) / 4, product.low, device))
        for v, origin in zip(product.eqn.invars[:2], product.origins, strict=True)
    )
    return left, right


def _cast_seconds(origin: OperandOrigin, n: float, low: Precision, device: Device) -> float:
    if not low.is_scaled:
        return cast_seconds(device, n) if origin is OperandOrigin.IN_MEMORY else 0.0
    if low.block:
        # A block is read once, and rounded by the scale that is made of it.
        return rounding_seconds(device, n, is_made=True)
    has_eight_bits = OperandOrigin.IN_INT8 if low is Precision.INT8 else OperandOrigin.IN_FLOAT8
    if origin is has_eight_bits:
        return 0.0
    return rounding_seconds(device, n, is_made=origin is not OperandOrigin.IN_MEMORY)


def sentence(product: Product, product_times: ProductTimes, where: str) -> reasons.Reason:
    """That a product does not pay."""
    times = duration(product_times.low), product.low, duration(product_times.wide), Precision.F32
    return reasons.DOES_NOT_PAY(where, *times, product_times.by)
