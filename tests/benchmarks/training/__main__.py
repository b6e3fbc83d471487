"""Training speed beside RecTools' SASRec of the same size, for `make bench-training`.

RecTools is no dependency: `make bench-training` gives it an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from models.data.interactions import Interactions
from models.training.presets import choose_preset
from service.datasets.movielens import LICENCE as MOVIELENS_LICENCE
from service.datasets.movielens import fetch as fetch_movielens
from service.domain.errors import HeedError, Unavailable
from service.domain.settings import Settings
from service.lab.protocols import leave_one_out_5_core
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from service.training.training_corpus import read_dataset
from tests.benchmarks.harness import machine
from tests.benchmarks.harness.processes import Cores
from tests.benchmarks.harness.timing import Spread, ratios, spread

HEED = "Heed"
_FOLDER = Path("./data")
_RECTOOLS = Path(".venv-rectools/bin/python")  # where `make bench-training` puts it
_ROOT = Path(__file__).parents[3]
_STOP = 15.0  # seconds to end in


@dataclass(slots=True)
class Trained:
    """Figures of one contestant, turn by turn."""

    described: Mapping[str, Any]  # by itself
    turns: list[Mapping[str, float]] = field(default_factory=list)

    def rates(self) -> list[float]:
        """Target positions a second of processor time, one figure a turn."""
        return [turn["targets"] / turn["processor"] for turn in self.turns]


@dataclass(frozen=True, slots=True)
class Contestant:
    """Command that starts a contestant."""

    name: str
    python: str
    arguments: Sequence[str]
    spec: Mapping[str, Any]


def contestants(log: Interactions, dimension: int, python: Path) -> list[Contestant]:
    """Heed at its best preset; SASRec of that size, the same in bfloat16, and with its defaults.

    Args:
        log: what is trained on.
        dimension: of the text embeddings.
        python: an interpreter that has RecTools.
    """
    preset = choose_preset(len(log), log.n_items, "best")
    shape = preset.model_config(log.n_items, dimension)
    size = {
        "n_factors": shape.dim,
        "n_blocks": shape.blocks,
        "n_heads": shape.heads,
        "session_max_len": shape.window,
        "dropout_rate": shape.dropout,
        "loss": "softmax",
    }
    sasrec = f"SASRec, {shape.dim} dimensions, {shape.blocks} blocks, {shape.window} long"
    trainee = str(Path(__file__).with_name("trainee.py"))

    def theirs(name: str, options: Mapping[str, Any], precision: str) -> Contestant:
        spec = {"options": options, "precision": precision}
        # Isolated, or modules of this folder would stand before those of the same name there.
        return Contestant(name, str(python), ["-I", trainee, "rectools"], spec)

    return [
        Contestant(
            HEED,
            sys.executable,
            ["-m", "tests.benchmarks.training.trainee", "heed"],
            {"shape": shape.as_dict(), "config": asdict(preset.train_config)},
        ),
        theirs(sasrec, size, "32-true"),
        theirs(f"{sasrec}, bfloat16", size, "bf16-mixed"),
        theirs("SASRec, its defaults", {}, "32-true"),
    ]


def measure(
    log: Interactions,
    content: NDArray[np.float32],
    wanted: Sequence[Contestant],
    *,
    rounds: int,
    seconds: float,
) -> dict[str, Trained]:
    """Let each train for so many seconds in every round, one at a time, one thread each.

    The first turn of each warms it up and does not count.

    Args:
        log: what all are trained on.
        content: text embeddings of its items [N, D].
        wanted: who.
        rounds: at least 1.
        seconds: of processor time in a turn, to the end of the step in which they are over.

    Raises:
        Unavailable: when one ends by itself, with its last words.
    """
    found: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder, ExitStack() as stack:
        data = Path(folder) / "events.npz"
        np.savez(data, users=log.users, items=log.items, timestamps=log.timestamps, content=content)
        running = {}
        for each in wanted:
            running[each.name] = stack.enter_context(_started(each, data))
            found[each.name] = Trained(running[each.name].hear())
        names = list(running)
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                done = running[name].turn(seconds)
                if number:
                    found[name].turns.append(done)
    return found


def run(
    dataset: Annotated[
        Literal["ml-100k", "ml-1m"], typer.Argument(help="It is fetched.")
    ] = "ml-1m",
    data: Annotated[
        Path, typer.Option("--data", envvar="HEED_DATA", help="Directory of the caches.")
    ] = _FOLDER,
    rectools: Annotated[Path, typer.Option(help="A Python that has RecTools.")] = _RECTOOLS,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each takes.")] = 7,
    seconds: Annotated[float, typer.Option(help="Processor time of a turn.")] = 10.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Train Heed and RecTools' SASRec in turns, one thread each, on the training part."""
    # Into a pipe or a file, the table keeps the width it needs.
    out, err = Console(width=None if sys.stdout.isatty() else 140), Console(stderr=True)
    err.print(MOVIELENS_LICENCE, style="dim", highlight=False, soft_wrap=True)
    source = fetch_movielens(dataset, data / CACHE_FOLDER)
    encoder = open_encoder(Settings.read().encoder)
    corpus = read_dataset(source, EmbeddingCache(encoder, data / EMBEDDINGS_FILE))
    task = leave_one_out_5_core(corpus.log)
    content = corpus.content[task.items]
    wanted = contestants(task.train, content.shape[1], rectools)
    with out.status("training in turns"):
        found = measure(task.train, content, wanted, rounds=rounds, seconds=seconds)
    out.print(shown(dataset, task.train, found))
    if json_file is not None:
        described = machine.describe_machine(data, Cores(None, None))
        report = as_json(dataset, task.train, found) | {"machine": described}
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def shown(dataset: str, log: Interactions, found: Mapping[str, Trained]) -> Table:
    """The contestants side by side."""
    table = Table(
        title=f"Training on {dataset}: {log.n_users:,} users, {log.n_items:,} items, "
        f"{len(log):,} events; one thread each, in turns",
        title_justify="left",
        caption="A target is an event to be predicted among all items; padding is none. Each has "
        "its own batches, and the softmax over all items; Heed's blocks are gated, with biases on "
        "distance and age, and its head counts transitions. Seconds are of processor time; figures "
        "are medians, with quartiles, ratios of rounds.",
        caption_justify="left",
    )
    table.add_column("training")
    for heading in ("products", "targets a second", "targets a step", "Heed is", "memory"):
        table.add_column(heading, justify="right")
    for name, trained in found.items():
        steps = sum(turn["steps"] for turn in trained.turns)
        targets = sum(turn["targets"] for turn in trained.turns)
        rate, times = spread(trained.rates()), _times(found, name)
        table.add_row(
            name,
            str(trained.described["products"]),
            f"{rate.median:,.0f} ({rate.low:,.0f}–{rate.high:,.0f})",
            f"{targets / steps:,.0f}",
            ""
            if name == HEED
            else f"{times.median:.2f} times as fast ({times.low:.2f}–{times.high:.2f})",
            f"{max(turn['memory'] for turn in trained.turns) / 2**30:.1f} GiB",
        )
    return table


def as_json(dataset: str, log: Interactions, found: Mapping[str, Trained]) -> dict[str, Any]:
    """Every figure, for machines."""
    return {
        "data": dataset,
        "users": log.n_users,
        "items": log.n_items,
        "events": len(log),
        "trainings": {
            name: {
                **trained.described,
                "targets_a_second": spread(trained.rates()).as_dict(),
                "heed_times_as_fast": _times(found, name).as_dict(),
                "turns": trained.turns,
            }
            for name, trained in found.items()
        },
    }


# ------------------------------------------------------------------------------ the parts


class _Running:
    """A trainee that was started, and its words."""

    def __init__(self, name: str, tells: IO[str], hears: IO[str], words: Path) -> None:
        self._name, self._tells, self._hears, self._words = name, tells, hears, words

    def hear(self) -> Any:
        """Read the next message. Raises `Unavailable` when the process ended instead."""
        line = self._hears.readline()
        if not line:
            said = self._words.read_text(errors="replace").strip()[-500:]
            raise Unavailable(f"the training of {self._name} ended by itself: {said}")
        return json.loads(line)

    def turn(self, seconds: float) -> Any:
        """Let it train for a number of seconds and return its figures."""
        with suppress(BrokenPipeError):  # it ended: what it said last is heard next
            self._tells.write(f"{seconds}\n")
            self._tells.flush()
        return self.hear()


@contextmanager
def _started(each: Contestant, data: Path) -> Iterator[_Running]:
    """A trainee, stopped at the end whatever happens."""
    words = data.with_name(f"{each.name}.log")
    one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    spec = json.dumps({**each.spec, "data": str(data)})
    with words.open("w") as said:
        try:
            process = subprocess.Popen(
                [each.python, *each.arguments, spec],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**inherited, **one},
                cwd=_ROOT,
            )
        except OSError as error:
            raise Unavailable(
                f"{each.python} does not run ({error}): `make bench-training` installs RecTools"
            ) from error
    with process:
        try:
            tells, hears = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
            yield _Running(each.name, tells, hears, words)
        finally:
            process.terminate()
            try:
                process.wait(_STOP)
            except subprocess.TimeoutExpired:
                process.kill()


def _times(found: Mapping[str, Trained], name: str) -> Spread:
    """Ratio of Heed's targets a second to another's, round by round."""
    return ratios(found[HEED].rates(), found[name].rates())


def main() -> None:
    """Errors of the domain and of files are said in a line."""
    try:
        typer.run(run)
    except (HeedError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
