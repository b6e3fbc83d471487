"""Progress output: JSON messages, lines for pipes, and bars for terminals."""

from __future__ import annotations

import io
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from models.evaluation.full_ranking import RankingMetrics
from models.training.fit import TrainingProgress
from service.cli import progress_bars
from service.jobs.job import Job

FOUND = RankingMetrics(10, 0.25, 0.125, 0.1, 1.0, 4, np.zeros(4, np.int64))


def progress(epoch: int, step: int, *, left: float = 3.5, judged: bool = False) -> TrainingProgress:
    """Of three epochs with two steps each."""
    return TrainingProgress(epoch, 3, step, 2, 1.5, left, FOUND if judged else None)


def test_messages_say_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON messages have step, loss, remaining time and validation, as jobs read them."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told = progress_bars.job_messages(progress_bars.print_message)
    told("reading events", 7, 0, None)
    told("training", 1, 6, progress(1, 1, left=math.nan))
    now[0] = 10.0
    told("training", 4, 6, progress(2, 2, judged=True))
    first, second, third = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {"stage": "reading events", "step": 7, "steps": 0}
    expected: dict[str, Any] = {
        "stage": "training", "step": 1, "steps": 6, "epoch": 1, "epochs": 3, "loss": 1.5,
    }  # fmt: skip
    assert json.loads(second) == expected
    judged = {"hr": 0.25, "ndcg": 0.125}
    expected |= {"step": 4, "epoch": 2, "eta_s": 3.5, "validation": judged}
    assert json.loads(third) == expected
    job = Job("j", "running", {}, 0)
    for line in (first, second, third):
        job = job.with_stdout(line)
    assert job.progress == expected
    assert job.metrics == judged
    assert job.log == ()


def test_every_stage_with_known_steps_says_its_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pace is that of the stage; baselines, each with its name, are one stage."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told = progress_bars.job_messages(progress_bars.print_message)
    for stage, seconds in (("encoding texts", 1.0), ("baseline: {}", 20.0), ("comparing", 5.0)):
        for step in range(4):
            told(stage.format(step), step, 0 if stage == "comparing" else 4, None)
            now[0] += seconds
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    left = [message.get("eta_s") for message in messages]
    assert left == [None, 3, 2, 1, None, 60, 40, 20, *[None] * 4]
    said = [progress_bars.said(message) for message in messages]
    assert said[1] == "encoding texts, about 3 s left in this stage"
    assert said[4:7:2] == ["baseline: 0", "baseline: 2, about 40 s left in this stage"]


def test_messages_come_twice_a_second_at_most(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two messages per second are written, plus each stage's first and last."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told = progress_bars.job_messages(progress_bars.print_message)
    for stage in ("one", "two"):
        for step in range(1, 11):
            told(stage, step, 10, None)
            now[0] += 0.2
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for stage in ("one", "two"):
        assert [m["step"] for m in messages if m["stage"] == stage] == [1, 4, 7, 10]


def test_a_pipe_gets_a_line_for_each_stage_and_epoch() -> None:
    out = Console(file=io.StringIO(), width=200)
    with progress_bars.stage_bars(out) as told:
        told("reading events", 10, 0, None)
        told("reading events", 20, 0, None)
        for epoch in (1, 2):
            for step in (1, 2):
                told("training", 0, 6, progress(epoch, step, judged=epoch == 2))
    assert isinstance(out.file, io.StringIO)
    assert out.file.getvalue().splitlines() == [
        "reading events",
        "training",
        "training  epoch 1/3  loss 1.500, about 4 s left in this stage",
        "training  epoch 2/3  loss 1.500  validation NDCG@10 0.1250, about 4 s left in this stage",
    ]


def test_a_terminal_gets_a_bar() -> None:
    out = Console(file=io.StringIO(), width=200, force_terminal=True)
    with progress_bars.stage_bars(out) as told:
        told("reading events", 12_345, 0, None)
        told("training", 3, 6, progress(2, 1, judged=True))
    assert isinstance(out.file, io.StringIO)
    shown = out.file.getvalue()
    assert " 50%" in shown
    assert "epoch 2/3  loss 1.500  validation NDCG@10 0.1250" in shown


def test_rates_are_of_one_stage_after_the_other() -> None:
    """A bar is drawn for the stage of the latest call, with its rate once there is one."""
    now = [0.0]
    out = Console(file=io.StringIO(), width=100, force_terminal=True, get_time=lambda: now[0])
    with progress_bars.bars(out, "users") as draw:
        draw("loading", 0, None)
        for done in (0, 250, 500):
            draw("recommending", done, 1_000)
            now[0] += 1
        draw("recommending", 500, 1_000)
    assert isinstance(out.file, io.StringIO)
    *_, last = out.file.getvalue().split("recommending")
    assert "loading" not in last
    assert " 50%" in last
    assert "250 users/s" in last
