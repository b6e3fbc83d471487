"""Copy-on-write lists compared with plain lists."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue.cow_columns import CowList


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_every_version_equals_a_plain_list(data: st.DataObject) -> None:
    """Each version equals a plain list of its time, whichever version is updated later."""
    states = [(CowList(["a", "b"]), ["a", "b"])]
    for turn in range(data.draw(st.integers(1, 9), "updates")):
        before, listed = states[data.draw(st.sampled_from([-1, -1, 0]), "from")]
        count = data.draw(st.integers(0, min(3, len(listed))), "changed")
        at = np.random.default_rng(turn).permutation(len(listed))[:count]
        more = [f"{turn}+{n}" for n in range(data.draw(st.integers(0, 4), "more"))]
        changed = [f"{turn}={n}" for n in range(count)]
        expected = [*listed, *more]
        for place, value in zip(at.tolist(), changed, strict=True):
            expected[place] = value
        states.append((before.updated(at, changed, more), expected))
        for state, copy in states:
            assert list(state) == copy
            assert [state[n] for n in range(len(state))] == copy
            assert len(state) == len(copy)
            some = np.array([n // 2 for n in range(len(copy))], dtype=np.int64)[::-1]
            assert state.take(some) == [copy[n] for n in some.tolist()]


class Thing:
    """Object that supports weak references."""


def test_replaced_objects_are_released() -> None:
    """A repeatedly updated list keeps a bounded number of replaced objects alive."""
    things = [Thing() for _ in range(5_000)]
    watched = [weakref.ref(thing) for thing in things]
    state = CowList(things[:10])
    for at in range(10, 5_000):
        state = state.updated(np.array([at % 10]), [things[at]], ())
    del things
    gc.collect()
    alive = sum(each() is not None for each in watched)
    assert 10 <= alive <= 1_100
    assert {id(thing) for thing in state} == {id(each()) for each in watched[-10:]}
