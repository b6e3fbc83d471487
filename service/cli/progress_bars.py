"""Progress of commands, as bars, lines or JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from models.training.fit import TrainingProgress as Training
    from service.datasets.base import Dataset
    from service.training.training_corpus import StageProgressCallback


@contextmanager
def bars(
    console: Console, unit: str = "", *, transient: bool = True
) -> Iterator[Callable[..., None]]:
    """Draw a bar for one stage after the other.

    Yields a function that takes the stage, what is done, its total (None or 0 if it is unknown) and
    a note. Without a note, the rate is shown in `unit`, if there is one.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=transient) as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int | None, note: str = "") -> None:
            if stage not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[stage] = progress.add_task(stage, total=None, note="")
            speed = progress.tasks[tasks[stage]].speed
            if unit and speed and not note:
                note = f"{speed:,.0f} {unit}/s"
            progress.update(tasks[stage], completed=done, total=total or None, note=note)

        yield show


@contextmanager
def reading_bar(console: Console, source: Dataset) -> Iterator[Callable[[str, int], None]]:
    """Draw the bytes read of a data set; yield a function that takes the stage and its rows."""
    with bars(console) as draw:
        read = source.progress
        yield lambda stage, rows: draw(
            f"{source.name}: {stage}", read.done, read.total, f"{rows:,} rows"
        )


_MESSAGE_INTERVAL = 0.5  # seconds between two messages


@contextmanager
def stage_bars(console: Console) -> Iterator[StageProgressCallback]:
    """Draw bars with the loss, the latest validation and the time left.

    Without a terminal, print a line for each stage and each epoch.
    """
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    with bars(console, transient=False) as draw:

        def show(stage: str, done: int, total: int, training: Training | None) -> None:
            note = _note(training) if training is not None else f"{done:,}" if done else ""
            draw(stage, done, total, note)

        yield show


def _plain_lines(console: Console) -> StageProgressCallback:
    last = ""

    def print_line(stage: str, _done: int, _total: int, training: Training | None) -> None:
        nonlocal last
        ended = training is not None and training.step == training.steps
        if stage != last or ended:
            note = ""
            if ended and training is not None:
                note = _note(training) + time_left(training.remaining)
            console.print(f"{stage}  {note}".rstrip())
        last = stage

    return print_line


def job_messages(take: Callable[[dict[str, Any]], None]) -> StageProgressCallback:
    """Return a callback that hands progress to `take` in the form of a job's messages."""
    latest, begun = ("", 0.0), (0, 0.0)  # begun: what was done, and when, as the stage began

    def write(stage: str, done: int, total: int, training: Training | None) -> None:
        nonlocal latest, begun
        now = time.monotonic()
        if stage == latest[0] and now - latest[1] < _MESSAGE_INTERVAL and done != total:
            return
        if stage.partition(":")[0] != latest[0].partition(":")[0]:  # each baseline has its name
            begun = (done, now)
        latest = (stage, now)
        message: dict[str, Any] = {"stage": stage, "step": done, "steps": total}
        remaining = math.nan
        if begun[0] < done <= total:
            remaining = (total - done) * (now - begun[1]) / (done - begun[0])
        if training is not None:
            message |= {"epoch": training.epoch, "epochs": training.epochs, "loss": training.loss}
            remaining = training.remaining
        if math.isfinite(remaining):
            message["eta_s"] = remaining
        if training is not None and training.validation is not None:
            found = training.validation
            message["validation"] = {"hr": found.hr, "ndcg": found.ndcg}
        take(message)

    return write


def print_message(message: dict[str, Any]) -> None:
    """Write a message of a job to stdout: a line of JSON, where NaN is null."""
    typer.echo(orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY))


def said(progress: Mapping[str, Any]) -> str:
    """Say how far a training is, by its last message."""
    epoch = ", epoch {epoch} of at most {epochs}" if "epoch" in progress else ""
    return ("{stage}" + epoch).format_map(progress) + time_left(progress.get("eta_s"))


def time_left(seconds: float | None) -> str:
    """Say how long a stage still takes, after a comma; nothing if that is not known."""
    if seconds is None or not math.isfinite(seconds) or seconds < 1:
        return ""
    time = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f", about {time} left in this stage"


def _note(training: Training) -> str:
    text = f"epoch {training.epoch}/{training.epochs}  loss {training.loss:.3f}"
    if training.validation is not None:
        text += f"  validation NDCG@10 {training.validation.ndcg:.4f}"
    return text
