"""The study of explanations: its figures on cases of known numbers, and on a served model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.studies.explanations import Case, measure, summarise
from tests.benchmarks.workload.data import prepare_data


def case(contributed: list[float], estimated: list[float], exact: list[float]) -> Case:
    one, two, three = (np.array(column) for column in (contributed, estimated, exact))
    return Case(len(exact), 1e-6, one, two, three, 1.0, 2.0, 0.5, 3.0, 4.0)


def test_figures_of_known_cases() -> None:
    """Correlations, the strongest event and losses are those computed by hand."""
    cases = [
        case([1, 2, 3, 4], [1, 2, 3, 4], [2, 4, 6, 8]),
        case([4, 3, 2, -1], [9, 8, 7, 6], [1, 2, 3, 4]),
    ]
    found = summarise(cases)
    assert (found.cases, found.events, found.remainder) == (2, 4, 1e-6)
    assert found.contribution_pearson == pytest.approx(0.5 * (1 - 0.9562), abs=1e-3)
    assert found.contribution_spearman == pytest.approx(0)
    assert found.contribution_signs == (1 + 0.75) / 2
    assert found.effect_pearson == pytest.approx(0)
    assert found.strongest_among_three == 0.5
    assert (found.deletion, found.random_deletion) == (0.5, 0.25)
    assert (found.explain_ms, found.effects_ms) == (3, 4)


def test_a_served_model_is_measured(tmp_path: Path) -> None:
    """Contributions and the prior sum to the scores of a generated model, to 1e-4."""
    with prepare_data(None, items=150, users=6) as ground:
        done: list[int] = []
        found = measure(ground.data, 3, progress=done.append)
    assert done == [1, 2, 3]
    assert found.cases == 3
    assert found.remainder < 1e-4
    assert found.effect_pearson > 0.5
    assert np.isfinite([found.deletion, found.random_deletion]).all()
