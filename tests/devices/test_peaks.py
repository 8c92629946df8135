"""Published peaks: each figure's source, and what runs in which format."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from precpass.devices.peaks import CPUS, PEAKS, Peaks, peaks_of
from precpass.measure.roofline import work_of


@pytest.mark.parametrize("peaks", [*CPUS, *PEAKS], ids=str)
def test_each_figure_has_one_source_with_its_date_and_that_of_a_vendor_its_address(peaks: Peaks):
    figures = {f.name: getattr(peaks, f.name) for f in dataclasses.fields(Peaks)}
    numbers = [name for name, value in figures.items() if isinstance(value, float)]
    assert {"bf16", "bandwidth"} <= set(numbers)
    for name in numbers:
        sources = [source for source in peaks.sources if name in source.figures]
        assert len(sources) == 1, name
        assert sources[0].url.startswith("" if peaks in CPUS else "https://")
        assert "2020" <= sources[0].date[:4] <= "2026"
        assert peaks.source_of(name) == sources[0]


def test_what_nobody_publishes_is_none():
    (v5e,) = peaks_of(["v5e"])
    assert v5e.flops("f64") is v5e.flops("f16") is v5e.flops("float8_e4m3fn") is None
    assert v5e.source_of("f64").title == "not published"


@pytest.mark.parametrize(
    "device, default, high, highest",
    [
        ("a100", 156e12, 156e12, 19.5e12),
        ("h200", 494.7e12, 494.7e12, 66.9e12),
        ("mi300x", 163.4e12, 163.4e12, 163.4e12),
        ("v4", 275e12, 275e12 / 3, 275e12 / 6),
    ],
)
def test_float32_runs_in_what_jax_takes_for_it(device, default, high, highest):
    (peaks,) = peaks_of([device])
    found = [peaks.flops("f32", asked) for asked in ("default", "high", "highest")]
    assert found == [default, high, highest]
    # other formats are what they are, whatever is asked
    assert peaks.flops("bf16", "highest") == peaks.bf16


def test_eight_bits_have_a_peak_where_xla_multiplies_them_as_such():
    h100, v5e, a100 = peaks_of(["h100", "v5e", "a100"])
    assert h100.flops("f8e4m3") == h100.flops("f8e5m2") == h100.flops("int8") == 1978.9e12
    assert v5e.flops("int8") == 393e12 and a100.flops("int8") == 624e12
    assert v5e.flops("f8e4m3") is a100.flops("f8e4m3") is None


def test_a_program_with_products_of_eight_bits_has_a_roofline():
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.int8)
    work = work_of(jax.make_jaxpr(functools.partial(jnp.dot, preferred_element_type="int32"))(x, x))
    h100, v4 = peaks_of(["h100", "v4"])
    assert work.seconds(h100) == 2 * 8192**3 / 1978.9e12
    assert work.seconds(v4) is None and work.without_peak(v4) == {"int8"}


def test_an_algorithm_names_its_format_and_its_passes():
    (h100,) = peaks_of(["h100"])
    assert h100.flops("f32", "TF32_TF32_F32") == h100.tf32
    assert h100.flops("f32", "BF16_BF16_F32_X9") == 989.4e12 / 9
    assert h100.flops("f32", "F32_F32_F32") == h100.f32
    assert h100.flops("f32", "ANY_F8_ANY_F8_F32") is None
    assert h100.flops("complex64") == h100.tf32
    assert h100.flops("complex128") == h100.f64


@pytest.mark.parametrize(
    "name, found",
    [
        ("H100", "NVIDIA H100 SXM"),
        ("tpu-v5p", "TPU v5p"),
        ("TPU v6e", "TPU v6e"),
        ("tpu7x", "TPU 7x"),
    ],
)
def test_a_device_has_several_names(name, found):
    assert [str(peaks) for peaks in peaks_of([name, name])] == [found]


def test_names_are_of_one_device():
    names = [name for peaks in PEAKS for name in (peaks.name.lower(), *peaks.aliases)]
    assert len(names) == len(set(names))
    assert all(alias == alias.lower() for peaks in PEAKS for alias in peaks.aliases)


@pytest.mark.parametrize("name", ["b100", "", None, 3])
def test_an_unknown_device_is_told_the_legal_ones(name):
    with pytest.raises(ValueError, match=r"unknown device .*'a100', .*'mi300x', 'v4', 'v5e'"):
        peaks_of([name])
