"""Failovers of PostgreSQL under two API replicas: by hand, and by Patroni."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psycopg

from tests.faults.matrix import Setup, Verdict
from tests.support.journaled_clients import Books, JournaledWriters, Reader, Replicas, compare
from tests.support.patroni_cluster import PatroniCluster
from tests.support.postgres_cluster import PostgresCluster

ROUNDS = 20
PATRONI_ROUNDS = 6
BACK = 10.0  # seconds after a promotion in which writes must succeed at every replica
WEAKER_ROUNDS = 5  # at most
REPLICAS = 2
DEADLINE = 5.0  # seconds of a question: a busy machine is no failure


class Seen(NamedTuple):
    """Outcome of failovers."""

    books: Books
    back: list[float]  # seconds from each promotion to the first write at the slowest replica
    degraded: int  # answers that said so
    quiet: int  # failovers in which none said so
    failed: list[str]  # answers to questions that were errors
    problems: list[str]  # answers to writes that no client should get
    kills: int  # of API replicas


def by_hand(setup: Setup) -> Verdict:
    """Kill or freeze the primary, kill replicas of the API; promote the standby by hand."""
    rounds, place = setup.times(ROUNDS), setup.fresh("failover")
    # One of four hangs, with its connections open, instead of dying.
    hangs = itertools.cycle((False, False, False, True))
    with PostgresCluster(fsync=True) as cluster:

        def fail_over() -> float:
            lost = cluster.primary
            # Long enough for questions to be answered without a primary.
            gap = setup.rng(f"gap-{lost.port}").uniform(0.5, 2.0)
            if next(hangs):
                lost.freeze()
                gap += DEADLINE / 2  # for which a question waits for a server that hangs
            else:
                lost.kill()
            time.sleep(gap)
            (standby,) = cluster.standbys
            cluster.promote(standby)
            cluster.require_standby(False)
            return time.monotonic()

        def rejoin() -> None:
            (lost,) = cluster.standbys
            cluster.rejoin(lost)
            cluster.require_standby(True)
            cluster.wait_for_standbys()

        seen = _drill(setup, place, cluster.url(connect_timeout=2), rounds, fail_over, rejoin)
    lost = _weaker(setup)
    return _verdict(seen, rounds, lost)


def by_patroni(setup: Setup) -> Verdict:
    """Kill and freeze the leader and kill replicas of the API; Patroni elects another leader."""
    rounds, place = setup.times(PATRONI_ROUNDS), setup.fresh("patroni")
    frozen = itertools.cycle((False, True))
    with PatroniCluster(fsync=True) as cluster:
        lost = [cluster.wait_for_leader()]

        def fail_over() -> float:
            lost[0] = cluster.wait_for_leader()
            if next(frozen):
                lost[0].freeze()
            else:
                lost[0].kill()
            cluster.wait_for_leader(other_than=lost[0])
            return time.monotonic()

        def rejoin() -> None:
            if lost[0].answers:
                return
            if lost[0].is_alive:
                lost[0].thaw()
            else:
                lost[0].start()
            cluster.wait_for_standbys()

        seen = _drill(setup, place, cluster.url(connect_timeout=2), rounds, fail_over, rejoin)
    return _verdict(seen, rounds, None)


def _drill(
    setup: Setup,
    place: Path,
    url: str,
    rounds: int,
    fail_over: Callable[[], float],
    rejoin: Callable[[], None],
) -> Seen:
    """Fail over again and again under load, and compare what was acknowledged with what is there.

    `fail_over` returns when the standby had been promoted.
    """
    rng, journal = setup.rng(place.name), place / "journal"
    back: list[float] = []
    quiet = kills = 0
    with Replicas(place, [url] * REPLICAS, deadline=DEADLINE, drain_timeout=10) as replicas:
        replicas.put_items()
        with (
            JournaledWriters(replicas, journal, setup.seed) as writers,
            Reader(replicas, setup.seed) as reader,
        ):
            for _ in range(rounds):
                time.sleep(rng.uniform(0.5, 1.5))
                victim = rng.randrange(REPLICAS) if rng.random() < 0.5 else None
                if victim is not None and rng.random() < 0.5:  # before the primary, or after it
                    replicas.servers[victim].kill()
                before = reader.degraded()
                promoted = fail_over()
                if victim is not None:
                    kills += 1
                    replicas.servers[victim].kill()
                living = [number for number in range(REPLICAS) if number != victim]
                moments = [writers.wait_for_ack(number, promoted) for number in living]
                back.append(max(moments) - promoted)
                quiet += reader.degraded() == before
                rejoin()
                if victim is not None:
                    replicas.restart(victim)
                    writers.wait_for_ack(victim, time.monotonic())
        books = compare(journal, url)
    return Seen(
        books=books,
        back=back,
        degraded=reader.degraded(),
        quiet=quiet,
        failed=reader.errors,
        problems=writers.problems,
        kills=kills,
    )


def _verdict(seen: Seen, rounds: int, lost: int | None) -> Verdict:
    books = seen.books
    held = books.balanced and max(seen.back) <= BACK and not seen.problems
    return Verdict(
        held and not seen.failed and not seen.quiet,
        f"{rounds} failovers and {seen.kills} killed replicas: of {books.acknowledged} "
        f"acknowledged batches {books.lost} lost, {books.doubled} events doubled, "
        f"{books.foreign} unknown; "
        f"writes back after {max(seen.back):.1f} s at most "
        f"(median {sorted(seen.back)[len(seen.back) // 2]:.1f}); {seen.degraded} degraded answers, "
        f"{seen.quiet} failovers without one; {len(seen.failed)} questions failed; "
        f"{len(seen.problems)} other problems {(seen.problems + seen.failed)[:2] or ''}",
        None if lost is None else f"asynchronous standby, synchronous_commit=off: {lost} lost",
        lost is None or lost > 0,
    )


def _weaker(setup: Setup) -> int:
    """Return how many acknowledged batches are lost where commits wait for no disk or standby.

    The same clients, journal and comparison; further rounds follow until some are.
    """
    for number in range(WEAKER_ROUNDS):
        place = setup.fresh(f"weaker{number}")
        journal = place / "journal"
        with PostgresCluster(settings={"synchronous_commit": "off"}, fsync=True) as cluster:
            cluster.require_standby(False)
            with Replicas(
                place, [cluster.url(connect_timeout=2)] * REPLICAS, deadline=DEADLINE
            ) as replicas:
                replicas.put_items()
                with JournaledWriters(replicas, journal, f"{setup.seed}-{number}", pause=0):
                    time.sleep(2.0)
                    # The standby hears nothing of the last moments, as behind a slow network.
                    cluster.standbys[0].freeze()
                    time.sleep(0.5)
                    cluster.primary.kill()
                    cluster.standbys[0].thaw()
                    cluster.promote(cluster.standbys[0])
            with psycopg.connect(cluster.primary.url(), autocommit=True) as connection:
                connection.execute("CHECKPOINT")
            lost = compare(journal, cluster.url(connect_timeout=2)).lost
        if lost:
            return lost
    return 0
