"""Processes that train one model together: hired on this machine, or started by torchrun."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from service.domain.errors import HeedError

_PATIENCE = timedelta(days=7)  # a slow member is waited for; one that died is noticed at once
_SHARE = 400  # padded positions of a batch, for each process
_WORK = 500_000  # positions: from here on processes are hired
_WEIGHTS = 8_000_000  # 32 MB: up to here
_TICK = 0.05  # seconds between looks at who has come
_MOMENT = 1.0  # seconds
_GRACE = 10.0  # seconds for a helper to end once the work is done


class TeamBroken(HeedError):
    """A process of the team ended before the work was done."""


def leads() -> bool:
    """Whether this process is to say and publish things: any that torchrun did not start second."""
    return int(os.environ.get("RANK", "0")) == 0


def fitting(cores: int, *, tokens: int, work: int, weights: int) -> int:
    """How many processes train fastest on this many cores, or one for each GPU.

    Args:
        cores: threads that may compute.
        tokens: padded positions of a batch. A share that is too small costs more in small
            operations than it saves.
        work: positions in all epochs. What is done in seconds is not worth a process' start.
        weights: of the model. The gradients of many take longer to exchange than to compute.
    """
    members = torch.cuda.device_count() or cores
    worthwhile = work >= _WORK and weights <= _WEIGHTS
    return max(1, min(members, tokens // _SHARE)) if worthwhile else 1


@contextlib.contextmanager
def team(size: int, assist: Callable[..., object], *args: Any) -> Iterator[DataParallelGroup]:
    """A team that this process leads, or takes part in where torchrun started it.

    Args:
        size: processes in all; not looked at under torchrun.
        assist: what the others run, as `assist(team, *args)`; importable by name.
        args: what pickles.

    Raises:
        TeamBroken: when one of the others ended early.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if not distributed.is_initialized():  # once: a second meeting would find the first's keys
            distributed.init_process_group(_backend(), timeout=_PATIENCE)
        yield DataParallelGroup(distributed.get_rank(), distributed.get_world_size())
        return
    if size < 2:
        yield SINGLE_PROCESS
        return
    with tempfile.TemporaryDirectory(prefix="heed-team-") as folder, _threads(size) as threads:
        meeting = Path(folder)
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(
                target=_help, args=(meeting, rank, size, threads, assist, args), daemon=True
            )
            for rank in range(1, size)
        ]
        for other in others:
            other.start()
        try:
            _wait_for(others, meeting)
            _meet(meeting, 0, size)
            yield DataParallelGroup(0, size)
        except RuntimeError as error:
            if code := _ended(others):
                raise _broken(code) from error
            raise
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
            for other in others:
                other.join(_GRACE if sys.exception() is None else 0)
                other.kill()


def _wait_for(others: Sequence[BaseProcess], meeting: Path) -> None:
    """Return when all have come. Whoever waits for one that never comes would wait for days."""
    while len(list(meeting.glob("* has come"))) < len(others):
        for other in others:
            if other.exitcode is not None:
                raise _broken(other.exitcode)
        time.sleep(_TICK)


def _ended(others: Sequence[BaseProcess]) -> int:
    """The first exit code that is not 0; a closed connection is heard of before its process."""
    for other in others:
        other.join(_MOMENT)
    return next((other.exitcode for other in others if other.exitcode), 0)


def _broken(code: int) -> TeamBroken:
    return TeamBroken(
        f"a process of the training ended with exit code {code}; if memory ran out, fewer "
        "processes need less"
    )


@contextlib.contextmanager
def _threads(size: int) -> Iterator[int]:
    """Each process' share of the threads that this one has had."""
    before = torch.get_num_threads()
    share = max(1, before // size)
    torch.set_num_threads(share)
    try:
        yield share
    finally:
        torch.set_num_threads(before)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _meet(meeting: Path, rank: int, size: int) -> None:
    if sys.platform == "linux":  # all are here; a host name may lead elsewhere, or nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = (meeting / "meeting").as_uri()
    distributed.init_process_group(
        _backend(), init_method=where, rank=rank, world_size=size, timeout=_PATIENCE
    )


def _help(
    meeting: Path,
    rank: int,
    size: int,
    threads: int,
    assist: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    """What another process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader hears it too, and ends this
    torch.set_num_threads(threads)
    (meeting / f"{rank} has come").touch()
    _meet(meeting, rank, size)
    try:
        assist(DataParallelGroup(rank, size), *args)
    except RuntimeError as error:
        # Most often the leader is gone, and has said why; there is nobody to tell twice.
        raise SystemExit(f"helper {rank}: {error}") from None
    finally:
        distributed.destroy_process_group()
