"""Training speed beside RecTools' SASRec of the same size."""

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
from typing import IO, Annotated, Any, NamedTuple, cast

import numpy as np
import typer
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.training.presets import choose_preset
from service.datasets.movielens import LICENCE
from service.datasets.movielens import fetch as fetch_movielens
from service.domain.errors import Unavailable
from service.domain.settings import Settings
from service.lab.protocols import leave_one_out_5_core
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from service.training.training_corpus import read_dataset
from tests.benchmarks.harness.options import Rounds
from tests.benchmarks.harness.servers import ROOT
from tests.benchmarks.harness.tables import OUT, print_machine, rate, ratio, rounds_of, table
from tests.benchmarks.harness.timing import ratios, rotated, spread
from tests.benchmarks.peers.recommend import HEED, PYTHON, DataSet, Folder, Python

_STOP = 15.0  # seconds to end in


@dataclass(slots=True)
class Trained:
    """Figures of one contestant, turn by turn."""

    described: Mapping[str, Any]  # by itself
    turns: list[Mapping[str, float]] = field(default_factory=list)

    def sum(self, name: str) -> float:
        """Return a figure over all turns."""
        return sum(turn[name] for turn in self.turns)

    def rates(self) -> list[float]:
        """Target positions a second of processor time, one figure a turn."""
        return [turn["targets"] / turn["processor"] for turn in self.turns]


class Contestant(NamedTuple):
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
            ["-m", "tests.benchmarks.peers.trainee", "heed"],
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
        Unavailable: when one ends too early, with its last words.
    """
    found: dict[str, Trained] = {}
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder, ExitStack() as stack:
        data = Path(folder) / "events.npz"
        np.savez(data, users=log.users, items=log.items, timestamps=log.timestamps, content=content)
        running = {}
        for each in wanted:
            running[each.name] = stack.enter_context(_started(each, data))
            found[each.name] = Trained(running[each.name].hear())
        for number in rounds_of(rounds, "training", first=-1):
            for name in rotated(list(running), number):
                done = running[name].turn(seconds)
                if number >= 0:
                    found[name].turns.append(done)
    return found


def training(
    dataset: DataSet = "ml-1m",
    data: Folder = Path("./data"),
    python: Python = PYTHON,
    rounds: Rounds = 7,
    seconds: Annotated[float, typer.Option(help="Processor time of a turn.")] = 10.0,
) -> None:
    """Train Heed and RecTools' SASRec in turns, one thread each, on the training part."""
    print_machine("one thread each")
    OUT.print(LICENCE, style="dim", soft_wrap=True)
    source = fetch_movielens(dataset, data / CACHE_FOLDER)
    encoder = open_encoder(Settings.read().encoder)
    corpus = read_dataset(source, EmbeddingCache(encoder, data / EMBEDDINGS_FILE))
    task = leave_one_out_5_core(corpus.log)
    content = corpus.content[task.items]
    wanted = contestants(task.train, content.shape[1], python)
    found = measure(task.train, content, wanted, rounds=rounds, seconds=seconds)
    table(
        f"Training on {dataset}: {task.train.n_users:,} users, {task.train.n_items:,} items, "
        f"{len(task.train):,} events",
        ("training", "products", "targets a second", "targets a step", "times as fast Heed is",
         "memory"),
        (
            (
                name,
                str(trained.described["products"]),
                rate(spread(trained.rates())),
                f"{trained.sum('targets') / trained.sum('steps'):,.0f}",
                "" if name == HEED else ratio(ratios(found[HEED].rates(), trained.rates())),
                f"{max(turn['memory'] for turn in trained.turns) / 2**30:.1f} GiB",
            )
            for name, trained in found.items()
        ),
        caption="A target is an event to be predicted among all items; padding is none. Each has "
        "its own batches, and the softmax over all items. Seconds are of processor time.",
    )  # fmt: skip


class _Running:
    """A trainee that was started, and its words."""

    def __init__(self, name: str, tells: IO[str], hears: IO[str], words: Path) -> None:
        self._name, self._tells, self._hears, self._words = name, tells, hears, words

    def hear(self) -> Any:
        """Read the next message. Raises `Unavailable` when the process ended instead."""
        line = self._hears.readline()
        if not line:
            said = self._words.read_text(errors="replace").strip()[-500:]
            raise Unavailable(f"the training of {self._name} ended too early: {said}")
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
                cwd=ROOT,
            )
        except OSError as error:
            raise Unavailable(
                f"{each.python} does not run ({error}): `make bench-peers` installs RecTools"
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
