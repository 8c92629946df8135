"""Published peaks: each figure's source, and what runs in which format."""

import dataclasses

import pytest

from precpass.devices.peaks import CPUS, PEAKS, Peaks

NAMED = {peaks.name: peaks for peaks in PEAKS}
A100, H100 = NAMED["NVIDIA A100, 80 GB"], NAMED["NVIDIA H100 SXM"]


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
    v5e = NAMED["TPU v5e"]
    assert v5e.flops("f64") is v5e.flops("f16") is v5e.flops("float8_e4m3fn") is None
    assert v5e.source_of("f64").title == "not published"


@pytest.mark.parametrize(
    "device, default, high, highest",
    [
        (A100.name, 156e12, 156e12, 19.5e12),
        ("NVIDIA H200 SXM", 494.7e12, 494.7e12, 66.9e12),
        ("AMD Instinct MI300X", 163.4e12, 163.4e12, 163.4e12),
        ("TPU v4", 275e12, 275e12 / 3, 275e12 / 6),
    ],
)
def test_float32_runs_in_what_jax_takes_for_it(device, default, high, highest):
    peaks = NAMED[device]
    found = [peaks.flops("f32", asked) for asked in ("default", "high", "highest")]
    assert found == [default, high, highest]
    # other formats are what they are, whatever is asked
    assert peaks.flops("bf16", "highest") == peaks.bf16


def test_eight_bits_have_a_peak_where_xla_multiplies_them_as_such():
    v5e = NAMED["TPU v5e"]
    assert H100.flops("f8e4m3") == H100.flops("f8e5m2") == H100.flops("int8") == 1978.9e12
    assert v5e.flops("int8") == 393e12 and A100.flops("int8") == 624e12
    assert v5e.flops("f8e4m3") is A100.flops("f8e4m3") is None


def test_an_algorithm_names_its_format_and_its_passes():
    assert H100.flops("f32", "TF32_TF32_F32") == H100.tf32
    assert H100.flops("f32", "BF16_BF16_F32_X9") == 989.4e12 / 9
    assert H100.flops("f32", "F32_F32_F32") == H100.f32
    assert H100.flops("f32", "ANY_F8_ANY_F8_F32") is None
    assert H100.flops("complex64") == H100.tf32
    assert H100.flops("complex128") == H100.f64
