"""Tables of `make bench`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from models.ranking.recommend import EXACT_WORK, INDEXED_CANDIDATES
from tests.benchmarks.attention.histories import EVENTS, AppendResult
from tests.benchmarks.attention.kernels import Kernel
from tests.benchmarks.catalogue import candidates
from tests.benchmarks.catalogue.candidates import CandidateResults, Catalogues
from tests.benchmarks.harness.tables import median, part, rate, ratio, seconds, table
from tests.benchmarks.http import ingest
from tests.benchmarks.http.ingest import IngestResults
from tests.benchmarks.workload.data import BenchmarkData


def machine(
    console: Console,
    found: Mapping[str, Any],
    ground: BenchmarkData,
    more: Iterable[tuple[str, str]] = (),
) -> None:
    """The machine and the data, and more rows of what was measured on."""
    rows = [
        ("processor", f"{found['processor']}, {found['cores']} cores"),
        ("memory", f"{found['memory_bytes'] / 2**30:.1f} GiB"),
        ("system", f"{found['system']}; store on {found['file_system'] or 'an unknown disk'}"),
        ("load average", f"{found['load_average']:.1f} before the run"),
        (
            "placement",
            "{placement}; {threads_a_kernel} thread a kernel".format_map(found),
        ),
        (
            "versions",
            ", ".join(
                f"{name} {found[name]}"
                for name in ("heed", "python", "torch", "faiss-cpu", "sqlite", "fastapi", "uvicorn")
            ),
        ),
        ("data", ground.source),
        ("", f"{ground.items:,} items, {ground.users:,} users, {ground.events:,} events"),
        ("model", ground.model or "none: the identity on content"),
        *more,
    ]
    table(console, "Where this was measured", ("what", "value"), rows, left=2)


def kernels(console: Console, found: Sequence[Kernel]) -> None:
    """The operator beside the fused kernel."""
    table(
        console,
        "Attention over n rows, 4 heads of 16: ratio to torch's fused kernel",
        ("n", "targets", "fused kernel", "attend", "its fused path", "error", "kernel's error"),
        (
            (
                f"{each.rows:,}",
                f"{each.targets}",
                median(each.seconds),
                ratio(each.attend),
                ratio(each.fused),
                f"{each.errors['attend']:.0e}",
                f"{each.errors['scaled_dot_product_attention']:.0e}",
            )
            for each in found
        ),
        caption="Errors are relative, against float64. `attend` also gives the weights.",
    )


def catalogues(console: Console, found: CandidateResults) -> None:
    """Candidates, then what scoring everything costs."""
    top = candidates.TOP
    table(
        console,
        f"{INDEXED_CANDIDATES} candidates of N items: ratio to the bare product of all keys",
        (
            "N",
            "product",
            "bare index",
            "without index",
            "with index",
            "indexing",
            f"recall@{top}",
            "by product",
        ),
        (
            (
                f"{each.items:,}{_whose(each)}",
                median(each.product),
                ratio(each.searched),
                ratio(each.without),
                ratio(each.indexed),
                seconds(each.build),
                f"{each.recall:.3f}",
                f"{each.recall_without:.3f}",
            )
            for each in found.catalogues
        ),
        caption=f"Faster with an index {_from(found.crossover())}; "
        f"items are indexed from {candidates.INDEXED:,}. Recall is of the {top} best under full "
        "target attention; ×n is the trained model over n near copies of each item.",
    )
    table(
        console,
        "Scoring every item for a memory of m rows, and candidates only",
        ("N", "m", "N·m", "all", "candidates", "ns a pair"),
        (
            (
                f"{each.items:,}{' (this data)' if each.own else ''}",
                f"{each.rows:,}",
                f"{each.items * each.rows / 1e6:.2f} M",
                median(each.everything),
                ratio(each.ratio),
                f"{1e9 * each.pair:.1f}",
            )
            for each in found.works
        ),
        caption=f"EXACT_WORK, {EXACT_WORK / 1e6:g} M pairs, takes "
        f"{seconds(found.exact_work_seconds())}.",
    )


def _whose(found: Catalogues) -> str:
    times = f", ×{found.copies}" if found.copies > 1 else ""
    return f" (this data{times})" if found.own else ""


def histories(console: Console, found: Iterable[AppendResult]) -> None:
    """One event more, against encoding everything again."""
    table(
        console,
        f"A new event of a history of {EVENTS}: ratio to encoding it again",
        ("preset", "encoder", "encoding again", "one event", "with the window's moves", "kept"),
        (
            (
                each.preset,
                each.shape,
                median(each.again),
                part(each.ratio),
                part(each.run),
                f"{each.kept / 2**10:.0f} KiB",
            )
            for each in found
        ),
        caption="The window moves by a quarter at once, and is then read again.",
    )


def ingestion(console: Console, found: IngestResults) -> None:
    """Durable events a second."""
    by_core, shared = ingest.rate(found.processor), found.processor_ratio
    rows = [
        (
            "Heed over HTTP",
            rate(ingest.rate(found.wall)),
            "n/a" if by_core is None else rate(by_core),
        ),
        (
            "SQLite alone",
            rate(ingest.rate(found.sqlite)),
            rate(ingest.rate(found.sqlite_processor)),
        ),
        ("ratio of times", ratio(found.ratio), "n/a" if shared is None else ratio(shared)),
    ]
    table(
        console,
        f"Durable events a second on one core, {ingest.BATCH:,} a request, "
        f"{ingest.CONNECTIONS} connections, {found.events:,} events",
        ("", "a second", "a second of the core's time"),
        rows,
        caption=f"The store held {found.before:,} events before. SQLite alone: the same rows in "
        "the same table and index, in a database that began empty, WAL, synchronous=FULL, "
        f"{ingest.BATCH:,} a transaction, pages without checksums. "
        f"One small transaction takes {median(found.sync)} here.",
    )


def memory(console: Console, found: Mapping[str, Mapping[str, int] | None]) -> None:
    """Print the memory of the serving process."""
    table(
        console,
        "Memory of the serving process",
        ("when", "resident", "highest so far"),
        (
            (when, f"{size['resident'] / 2**20:.0f} MiB", f"{size['highest'] / 2**20:.0f} MiB")
            if size
            else (when, "n/a", "n/a")
            for when, size in found.items()
        ),
    )


# ------------------------------------------------------------------------------ the parts


def _from(items: int | None) -> str:
    return "at no size here" if items is None else f"from {items:,} items"
