"""Training in turns: order of turns, counted steps, and steps of Heed as they were ordered."""

from __future__ import annotations

import ast
import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from models.data.interactions import Interactions
from models.training.presets import choose_preset
from service.domain.errors import Unavailable
from tests.benchmarks.training import __main__ as training
from tests.benchmarks.training import trainee
from tests.benchmarks.training.__main__ import HEED, Contestant, contestants, measure

# Trains so many targets in each turn, and writes its name down.
FAKE = """
import json, sys
spec = json.loads(sys.argv[1])
print(json.dumps({"products": "float32"}), flush=True)
for line in sys.stdin:
    with open(spec["diary"], "a") as diary:
        diary.write(f"{spec['name']} {float(line)}\\n")
    targets = spec["targets"].pop(0)
    done = {"targets": targets, "steps": 2, "processor": 2.0, "wall": 3.0, "memory": 2**30}
    print(json.dumps(done), flush=True)
"""


def fake(name: str, diary: Path, *targets: int) -> Contestant:
    """One that claims so many targets in its turns."""
    spec = {"name": name, "diary": str(diary), "targets": targets}
    return Contestant(name, sys.executable, ["-c", FAKE], spec)


def log() -> Interactions:
    """Six users of five events each."""
    return Interactions.from_columns(
        np.repeat(np.arange(6), 5),
        np.random.default_rng(0).integers(0, 9, 30),
        np.arange(30) * 10**6,
        n_users=6,
        n_items=9,
    )


CONTENT = np.eye(9, 8, dtype=np.float32)


def test_each_trains_in_every_round_and_the_first_is_no_figure(tmp_path: Path) -> None:
    """The order turns round by round; rates are targets a second, and ratios are of rounds."""
    diary = tmp_path / "diary"
    wanted = [fake(HEED, diary, 1, 400, 600, 800), fake("slow", diary, 9, 100, 100, 100)]
    found = measure(log(), CONTENT, wanted, rounds=3, seconds=0.5)
    first, second = [f"{HEED} 0.5", "slow 0.5"], ["slow 0.5", f"{HEED} 0.5"]
    assert diary.read_text().splitlines() == [*first, *second, *first, *second]
    assert found[HEED].rates() == [200, 300, 400]
    assert found["slow"].rates() == [50, 50, 50]
    plain = json.loads(json.dumps(training.as_json("some", log(), found)))
    assert plain["trainings"]["slow"]["heed_times_as_fast"] == {"median": 6, "q25": 5, "q75": 7}
    assert plain["trainings"][HEED]["targets_a_second"]["median"] == 300
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(training.shown("some", log(), found))
    assert "6.00 times as fast (5.00–7.00)" in captured.get()
    assert "300 (250–350)" in captured.get()


def test_one_that_ends_says_why() -> None:
    """A contestant that exits raises an error with its last output."""
    gone = Contestant("gone", sys.executable, ["-c", "raise SystemExit('no room')"], {})
    with pytest.raises(Unavailable, match=r"training of gone ended by itself: no room"):
        measure(log(), CONTENT, [gone], rounds=1, seconds=0.1)
    nowhere = Contestant("nowhere", "/nowhere/python", [], {})
    with pytest.raises(Unavailable, match="make bench-training"):
        measure(log(), CONTENT, [nowhere], rounds=1, seconds=0.1)


def test_heed_trains_on_every_event_but_the_first() -> None:
    """A step of all six users has 24 targets; a turn ends with the step in which it is over."""
    mine = contestants(log(), 8, Path(sys.executable))[0]
    spec = json.loads(json.dumps(mine.spec))
    spec["shape"] |= {"dim": 16, "blocks": 1, "transitions_per_item": 4}
    spec["config"] |= {"batch_tokens": 10_000}
    found = measure(log(), CONTENT, [replace(mine, spec=spec)], rounds=3, seconds=0.0)
    turns: list[Any] = found[HEED].turns
    assert [(turn["targets"], turn["steps"]) for turn in turns] == [(24, 1)] * 3
    assert all(turn["processor"] > 0 and turn["wall"] > 0 for turn in turns)
    assert found[HEED].described["products"] in ("bfloat16", "float32")


def test_sasrec_has_the_size_of_the_best_preset() -> None:
    """SASRec has the preset's dimensions; then in bfloat16, then with its own defaults."""
    shape = choose_preset(30, 9, "best").model_config(9, 8)
    wanted = contestants(log(), 8, Path("python"))
    assert wanted[0].spec["shape"] == shape.as_dict()
    assert wanted[0].spec["config"] == asdict(choose_preset(30, 9, "best").train_config)
    options = wanted[1].spec["options"]
    assert (options["n_factors"], options["n_blocks"]) == (shape.dim, shape.blocks)
    assert (options["n_heads"], options["session_max_len"]) == (shape.heads, shape.window)
    assert options["loss"] == "softmax"
    assert wanted[2].spec["options"] == options
    assert [each.spec["precision"] for each in wanted[1:]] == ["32-true", "bf16-mixed", "32-true"]
    assert wanted[3].spec["options"] == {}


def test_the_trainee_needs_nothing_to_be_imported() -> None:
    """The trainee module imports only the standard library at module level."""
    body = ast.parse(Path(trainee.__file__).read_text()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in body if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
