"""A process that copies a store in small steps and kills itself at one of them.

It imports little, so that a fork server can start many.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

from service.maintenance import copying
from service.maintenance.copying import copy_store
from service.maintenance.store_places import parse_place
from service.stores.records import copying as records
from service.stores.records.copying import BulkAccess

SMALL = 40  # events, items or names in one transaction


class _Doom:
    def __init__(self, step: int) -> None:
        self.left = step

    def come(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def take_small_steps(patch: Any = setattr) -> None:
    """Have copies of this process take many transactions for little."""
    for name in ("EVENTS", "NAMES", "MAX_ITEMS"):
        patch(copying, name, SMALL)


def main(source: Sequence[str], target: Sequence[str], step: int, moment: str) -> None:
    """Copy a namespace of a place, and die.

    Args:
        source: the place, as a command names it, and the namespace.
        target: the same.
        step: number of the transaction at which to die, from 1.
        moment: `inside`, with everything written and before the commit, or `after` it.
    """
    take_small_steps()
    doom = _Doom(step)
    if moment == "inside":
        recorded = records._recorded

        def dying_record(*args: Any) -> Any:
            written = yield from recorded(*args)
            doom.come()
            return written

        setattr(records, "_recorded", dying_record)  # noqa: B010  # a module that mypy guards
    else:
        _die_after(BulkAccess, doom)
    asyncio.run(_copy(source, target))


def _die_after(bulk: Any, doom: _Doom) -> None:
    change = bulk._change

    async def dying(self: Any, *args: Any, **options: Any) -> None:
        await change(self, *args, **options)
        doom.come()

    bulk._change = dying


async def _copy(source: Sequence[str], target: Sequence[str]) -> None:
    ours, theirs = parse_place(source[0]), parse_place(target[0])
    origin = ours.identity(source[1])
    first, second = ours.open(source[1]), theirs.open(target[1], is_target=True)
    await copy_store(first, second, origin)
    await second.close()
    await first.close()
