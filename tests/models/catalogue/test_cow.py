"""Arrays and lists whose versions share what did not change, compared with plain copies."""

from __future__ import annotations

import gc
import os
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.catalogue import cow
from models.catalogue.cow import CowArray, CowList


@pytest.fixture(autouse=True)
def always_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map arrays of every size."""
    monkeypatch.setattr(cow, "SMALL", 0)


def rows(seed: int, count: int, width: int, dtype: Any) -> NDArray[Any]:
    """Random rows [count, width], or [count] of no width."""
    shape = (count, width) if width else (count,)
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(dtype)


@pytest.mark.parametrize("mapped", [True, False])
@given(data=st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_version_equals_a_plain_copy(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, mapped: bool
) -> None:
    """Each version equals a plain copy of its time, whatever is appended or changed later."""
    monkeypatch.setattr(cow, "SUPPORTED", mapped)
    width = data.draw(st.sampled_from([0, 1, 3, 700]), "width")
    dtype = data.draw(st.sampled_from([np.float32, np.int64, np.bool_]), "dtype")
    first = rows(0, data.draw(st.integers(0, 50), "first"), width, dtype)
    states = [(CowArray(first), first.copy())]
    for seed in range(1, data.draw(st.integers(1, 12), "updates") + 1):
        # Mostly the latest is followed; but any may be, and some are let go of.
        place = data.draw(st.sampled_from([-1, -1, -1, 0]), "from")
        before, copied = states[place]
        count = data.draw(st.integers(0, min(3, len(copied))), "changed")
        at = np.random.default_rng(seed).permutation(len(copied))[:count]
        changed, more = (
            rows(seed, count, width, dtype),
            rows(-seed % 97, data.draw(st.integers(0, 40), "more"), width, dtype),
        )
        expected = np.concatenate([copied, more])
        expected[at] = changed
        states.append((before.updated(at, changed, more), expected))
        if data.draw(st.booleans(), "forget") and len(states) > 2:
            del states[1]
        if data.draw(st.integers(0, 3), "seal") == 0:
            cow.seal()
        for state, copy in states:
            assert state.array.dtype == copy.dtype
            np.testing.assert_array_equal(state.array, copy)


def test_appended_rows_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended rows share memory with earlier rows, and each row is written once per change."""
    written = 0

    def counted(file: int, data: Any, place: int, pwrite: Any = os.pwrite) -> int:
        nonlocal written
        done: int = pwrite(file, data, place)
        written += done
        return done

    monkeypatch.setattr(os, "pwrite", counted)
    first, one = rows(0, 1_000, 9, np.float32), rows(1, 1, 9, np.float32)
    state = CowArray(first).updated(np.array([0]), one, one)
    for at in range(400):
        longer = state.updated(np.arange(0), one[:0], one)
        assert np.shares_memory(longer.array, state.array)
        state = longer.updated(np.array([at]), one, one[:0])
        assert not np.shares_memory(longer.array, state.array)
    assert written <= state.array.nbytes + 402 * one.nbytes


def test_forked_processes_share_what_did_not_change() -> None:
    """Forked processes share unchanged rows and do not see each other's changes."""
    first = rows(0, 20_000, 250, np.float32)  # 20 MB
    origin = CowArray(first).updated(np.arange(0), first[:0], first[:7])
    cow.seal()
    expected = np.concatenate([first, first[:7]])
    gc.collect()  # a child that did it would finalize objects of this process

    def change(seed: int) -> str:
        """Update the array, and return whether it is right and how many bytes that took."""
        before = _allocated()
        state = origin
        steps = [
            (at * seed, rows(seed + at, 1, 250, np.float32), rows(at, seed, 250, np.float32))
            for at in range(30)
        ]
        for at, one, more in steps:
            state = state.updated(np.array([at]), one, more)
        grown = _allocated() - before
        own = np.concatenate([expected, *(more for _, _, more in steps)])
        for at, one, _ in steps:
            own[at] = one
        right = np.array_equal(state.array, own) and np.array_equal(origin.array, expected)
        return f"{right} {grown}"

    children = []
    for seed in (1, 2):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(writing, change(seed).encode())
            except BaseException:  # noqa: BLE001  # reported to the parent
                os.write(writing, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(writing)
        children.append((pid, reading))
    answers = []
    for pid, reading in children:
        with os.fdopen(reading) as told:
            answers.append(told.read())
        os.waitpid(pid, 0)
    for answer in answers:
        right, _, size = answer.partition(" ")
        assert right == "True", answer
        assert int(size) < first.nbytes / 4
    np.testing.assert_array_equal(origin.array, expected)


def _allocated() -> int:
    """Bytes of anonymous memory that this process maps, and of files in memory that it has open.

    A page of a private mapping becomes anonymous when it is written to. `Private_Dirty` is no
    measure of that: it counts the pages that no other process maps at the moment, and so grows when
    the parent or the other child copies or frees its own, and misses a file that was not read yet.
    """
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (anonymous,) = (int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
    files: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own
            if str(link.readlink()).startswith("/memfd:"):
                found = link.stat()
                files[found.st_ino] = 512 * found.st_blocks
    return 1024 * anonymous + sum(files.values())


def test_released_arrays_close_their_files() -> None:
    """A file is closed once the last array that uses it is released."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        folder = Path("/dev/fd")

    def held() -> int:
        gc.collect()
        return len([*folder.iterdir()])

    before = held()
    state = CowArray(rows(0, 100, 9, np.float32))
    for at in range(50):
        state = state.updated(
            np.array([at]), rows(at, 1, 9, np.float32), rows(at, 1, 9, np.float32)
        )
    kept = state.array[7]
    assert held() > before
    del state
    gc.collect()
    np.testing.assert_array_equal(kept, rows(7, 1, 9, np.float32)[0])
    del kept
    assert held() == before


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_every_version_equals_a_plain_list(data: st.DataObject) -> None:
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
