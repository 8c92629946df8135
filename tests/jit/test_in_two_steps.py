"""Reports take a function, then its arguments; a call that forgets one says what to write."""

import jax.numpy as jnp
import pytest

import precpass as pp

REPORTS = (pp.inspect, pp.explain, pp.audit, pp.compare, pp.bisect)
each_report = pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.__name__)

X = jnp.ones((4, 4))


def square(x):
    return x @ x


@each_report
def test_arguments_in_the_first_call(report):
    call = rf"write {report.__name__}\(square\)\(\.\.\.\)"
    for args in ((X,), ({"w": X},), (X, X), ("AutoMixed", X)):
        with pytest.raises(TypeError, match=call):
            report(square, *args)


@each_report
def test_no_arguments_at_all(report):
    asked = f"{report.__name__}(square)"
    waiting = report(square, pp.AutoMixedBf16, 0.1) if report is pp.bisect else report(square)
    assert f"call it with the function's arguments, {asked}(...)" in repr(waiting)
    with pytest.raises(AttributeError) as caught:
        waiting.diff()
    assert str(caught.value).endswith(f"write {asked}(...).diff")
    assert not hasattr(waiting, "__array__")


def test_what_a_report_returns_is_that_of_the_second_call():
    assert pp.inspect(square)(X).plan.lowers
    assert "1 of 1" in str(pp.explain(square, "AutoMixedBf16")(x=X))
    assert pp.inspect(pp.auto_mixed(square))(X).plan.lowers


def test_arguments_in_the_place_of_a_policy():
    with pytest.raises(TypeError, match=r"an array of float32\. .* auto_mixed\(f\)\(x\)"):
        pp.auto_mixed(square, X)


@each_report
def test_reports_are_functions_and_no_methods(report):
    name = report.__name__
    with pytest.raises(AttributeError, match=rf"write precpass\.(report\.)?{name}\(f\)\(\.\.\.\)"):
        getattr(pp.auto_mixed(square), name)
    with pytest.raises(AttributeError, match=r"write precpass\.inspect\(f\)\(\.\.\.\)\.draw"):
        _ = pp.auto_mixed(square).draw
    with pytest.raises(AttributeError, match="no attribute 'drawn'"):
        _ = pp.auto_mixed(square).drawn
