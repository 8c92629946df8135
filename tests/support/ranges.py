"""Reads the facts of a function's results."""

import jax

from precpass.analysis.graph import Graph
from precpass.analysis.propagate import propagate


def facts_of(fn, *args):
    """The fact of each result of `fn`."""
    closed = jax.make_jaxpr(fn)(*args)
    facts = propagate(Graph.build(closed))
    return [facts.range_of(v) for v in closed.jaxpr.outvars]


def fact_of(fn, *args):
    (fact,) = facts_of(fn, *args)
    return fact


def bounds(fact):
    return fact.lo, fact.hi
