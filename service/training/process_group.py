"""Process group of data-parallel training: spawned on this machine, or started by torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessException, spawn

from models.compute.device import SINGLE_PROCESS, Processes
from service.domain.errors import HeedError

_COLLECTIVE_TIMEOUT = timedelta(days=7)  # a slow process is awaited; a dead one is noticed at once
_MIN_TOKENS = 400  # padded positions of a batch for each process
_MIN_WORK = 500_000  # positions, below which one process trains
_MAX_WEIGHTS = 8_000_000  # 32 MB, above which one process trains
_POLL = 0.05  # seconds between two checks of the spawned processes
_EXIT_TIMEOUT = 1.0  # seconds for a process to end after its connection was closed
_GRACE = 10.0  # seconds for a process to end once the work is done


class ProcessGroupError(HeedError):
    """A process of the group ended before the work was done."""


def is_rank_zero() -> bool:
    """True in the process that prints and publishes: rank 0 of torchrun, or without torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


def process_count(cores: int, *, tokens: int, work: int, weights: int) -> int:
    """The number of processes that train fastest on these cores, or one for each GPU.

    `tokens` are padded positions of a batch: small operations cost more than a small share saves.
    `work` counts positions in all epochs: a training of seconds is not worth the start of a
    process. Many `weights` have gradients that take longer to exchange than to compute.
    """
    most = torch.cuda.device_count() or cores
    worthwhile = work >= _MIN_WORK and weights <= _MAX_WEIGHTS
    return max(1, min(most, tokens // _MIN_TOKENS)) if worthwhile else 1


@contextlib.contextmanager
def process_group(size: int, work: Callable[..., object], *args: Any) -> Iterator[Processes]:
    """Yield the process group of this process: rank 0 of a new one, or its place in torchrun's.

    `size` is ignored under torchrun. The other processes call `work(group, *args)`, importable by
    name and picklable. Raises ProcessGroupError when another process ended early.
    """
    if _is_under_torchrun():
        yield join_torchrun()
        return
    if size < 2:
        yield SINGLE_PROCESS
        return
    with tempfile.TemporaryDirectory(prefix="heed-group-") as name:
        folder = Path(name)
        before = torch.get_num_threads()
        threads = max(1, before // size)
        others = spawn(  # type: ignore[no-untyped-call]
            _run_member, (folder, size, threads, work, args), size - 1, join=False, daemon=True
        )
        try:
            torch.set_num_threads(threads)
            # All must have started: the rendezvous would wait for days for one that is dead.
            while len(list(folder.glob("*.started"))) < size - 1:
                others.join(_POLL)  # raises if one has failed
            try:
                _join_group(folder, 0, size)
                yield Processes(0, size)
            except RuntimeError:
                others.join(_EXIT_TIMEOUT)  # connections close before their process has ended
                raise
        except ProcessException as error:
            raise ProcessGroupError(
                f"a process of the training ended: {error}; if memory ran out, fewer processes "
                "need less"
            ) from error
        finally:
            torch.set_num_threads(before)
            if distributed.is_initialized():
                distributed.destroy_process_group()
            for other in others.processes:
                other.join(_GRACE if sys.exception() is None else 0)
                other.kill()


def join_torchrun() -> Processes:
    """Return the place of this process among those of torchrun; the only one without torchrun."""
    if not _is_under_torchrun():
        return SINGLE_PROCESS
    if not distributed.is_initialized():  # a second rendezvous would find the keys of the first
        distributed.init_process_group(_backend(), timeout=_COLLECTIVE_TIMEOUT)
    return Processes(distributed.get_rank(), distributed.get_world_size())


def _is_under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _join_group(folder: Path, rank: int, size: int) -> None:
    if sys.platform == "linux":  # all are on this machine; its host name may not resolve to it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = (folder / "rendezvous").as_uri()
    distributed.init_process_group(
        _backend(), init_method=where, rank=rank, world_size=size, timeout=_COLLECTIVE_TIMEOUT
    )


def _run_member(
    index: int,
    folder: Path,
    size: int,
    threads: int,
    work: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    rank = index + 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and ends this process
    torch.set_num_threads(threads)
    (folder / f"{rank}.started").touch()
    _join_group(folder, rank, size)
    try:
        work(Processes(rank, size), *args)
    except RuntimeError as error:
        # Most often rank 0 has ended, and has reported why.
        raise SystemExit(f"process {rank}: {error}") from None
    finally:
        distributed.destroy_process_group()
