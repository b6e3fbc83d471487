"""Contributions add up, and the score without a row is the score with the row deleted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention import attend
from models.explain import contributions, explain, gains
from models.heads import MultiHeadAttention, merge_heads, split_heads
from models.scoring import Attending, score
from models.snapshot import Snapshot
from models.user_memory import Past, remember
from tests.models import reference
from tests.models.pasts import (
    AT,
    EVERY,
    ITEMS,
    Loop,
    drawn_snapshot,
    long_user,
    pasts,
    ways,
    without_event,
)
from tests.models.small import DAY, past, random_past

quick = settings(max_examples=80, deadline=None, derandomize=True)
few = settings(max_examples=25, deadline=None, derandomize=True)
INF = math.inf


@st.composite
def heads(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, H, n], values [H, n, V], outputs [T, H, V]; diffuse, or one row holding all."""
    targets, h = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n, width = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0, 20.0]))
    scores = scale * torch.randn(targets, h, n, generator=generator)
    ahead = draw(st.sampled_from([0.0, 0.0, 8.0, 16.0, 25.0, 60.0]))
    scores[..., draw(st.integers(0, n - 1))] += ahead
    if draw(st.booleans()):
        scores[torch.rand(scores.shape, generator=generator) < 0.4] = -INF
    values = torch.randn(h, n, width, generator=generator)
    return scores, values, torch.randn(targets, h, width, generator=generator)


def weights_of(scores: Tensor) -> Tensor:
    """The loop's weights in float32."""
    flat = [reference.softmax(row) for row in scores.flatten(0, -2).tolist()]
    return torch.tensor(flat, dtype=torch.float64).reshape(scores.shape).float()


@quick
@given(heads())
def test_contributions_sum_to_the_attention_part(drawn: tuple[Tensor, ...]) -> None:
    """Σ_j contribution_j is what W_O makes of the contexts, to 1e-4, and signs survive."""
    scores, values, outputs = drawn
    weights = weights_of(scores)
    found = contributions(weights, gains(values, outputs))
    assert found.shape == (scores.shape[0], scores.shape[2])
    context = torch.einsum("thn,hnv->thv", weights.double(), values.double())
    part = torch.einsum("thv,thv->t", context, outputs.double())
    np.testing.assert_allclose(found.sum(-1).numpy(), part.numpy(), atol=1e-4)
    hidden = (scores == -INF).all(1)
    assert (found[hidden] == 0).all()


def test_explaining_a_whole_module_adds_up() -> None:
    """Through projections and W_O: ⟨target, output⟩ is the sum of signed contributions."""
    torch.manual_seed(0)
    module = MultiHeadAttention(12, 3)
    target, history = torch.randn(4, 12), torch.randn(9, 12)
    with torch.inference_mode():
        output = module(target, history)
        outward = split_heads(target @ module.w_o.weight, 3)  # o^h of each target (H, T, d)
        values = module.values(history)  # (H, n, d)
        gain = outward @ values.mT  # (H, T, n)
        found = contributions(output.weights.transpose(0, 1), gain.transpose(0, 1))
        score = (target * output.context).sum(-1)
        assert torch.allclose(found.sum(-1), score, atol=1e-4)
        assert (found < 0).any()
        assert merge_heads(outward).shape == (4, 12)


def test_a_large_weight_on_a_value_that_does_not_matter_explains_nothing() -> None:
    """Weights say where attention went; contributions say what it brought."""
    keys: dict[str, Any] = {"a": [3.0, 0.0], "b": [1.0, 0.0]}
    k = torch.tensor(list(keys.values()))
    v = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    query, outward = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    found = attend(query, k, v)
    part = contributions(found.weights, gains(v, outward)[0][None])
    assert found.weights[0, 0] > 0.9
    assert part[0] == 0
    assert part[1] == found.weights[0, 1]


# ---------------------------------------------------------------------------- reasons


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return drawn_snapshot()


def without_entry(whole: Past, entry: int) -> Past:
    """The past without one entry of its profile."""
    content = whole.profile_content
    return replace(
        whole,
        profile_rows=np.delete(whole.profile_rows, entry),
        profile_content=None if content is None else np.delete(content, entry, axis=0),
    )


@few
@given(made=pasts(least=1), how=ways, target=st.integers(0, ITEMS - 1))
def test_contributions_add_up_to_the_score(
    snapshot: Snapshot, made: Past, how: Attending, target: int
) -> None:
    """sequence + every row's contribution + prior = score, to 1e-4, however it was attended."""
    user = remember(snapshot, made, AT)
    scores = score(snapshot, user, np.array([target]), how)
    reasons = explain(snapshot, user, target, 50, how)
    summed = math.fsum(reason.contribution for reason in reasons)
    whole = float(scores.sequence[0]) + summed + float(scores.prior[0])
    assert whole == pytest.approx(float(scores.total[0]), abs=1e-4)
    sources = [reason.source for reason in reasons]
    assert len(set(sources)) == len(sources)
    assert set(sources) <= set(user.source.tolist())


@few
@given(made=pasts(least=1), how=ways, target=st.integers(0, ITEMS - 1))
def test_reasons_equal_the_loop(
    snapshot: Snapshot, made: Past, how: Attending, target: int
) -> None:
    """Mean weights and signed contributions of every row, largest first."""
    user = remember(snapshot, made, AT)
    _, alpha, gain = Loop(snapshot, made, AT).parts(target, how)
    place = {source: at for at, source in enumerate(user.source.tolist())}
    reasons = explain(snapshot, user, target, 50, how)
    for reason in reasons:
        at = place[reason.source]
        assert reason.weight == pytest.approx(alpha[:, at].mean(), abs=1e-5)
        expected = (alpha[:, at] * gain[:, at]).sum()
        assert reason.contribution == pytest.approx(expected, abs=1e-4)
    sizes = [abs(reason.contribution) for reason in reasons]
    assert sizes == sorted(sizes, reverse=True)
    missing = set(place.values()) - {place[reason.source] for reason in reasons}
    assert all(alpha[:, at].sum() < 1e-6 for at in missing)


@few
@given(made=pasts(least=1), how=ways, target=st.integers(0, ITEMS - 1))
def test_without_is_what_deleting_the_row_gives(
    snapshot: Snapshot, made: Past, how: Attending, target: int
) -> None:
    """Each event and each profile entry, really deleted: the attention part to 1e-4.

    What remains moves one place nearer to the present, so that places shift as they would.
    """
    user = remember(snapshot, made, AT)
    scores = score(snapshot, user, np.array([target]), how)
    rest = float(scores.sequence[0] + scores.prior[0])
    for reason in explain(snapshot, user, target, 50, how, rest=rest):
        if reason.source >= 0:
            less = without_event(made, reason.source)
        else:
            less = without_entry(made, -1 - reason.source)
        again = score(snapshot, remember(snapshot, less, AT), np.array([target]), how)
        assert reason.without == pytest.approx(rest + float(again.attention[0]), abs=1e-4)


@pytest.mark.parametrize("hard", [False, True])
def test_without_the_event_that_held_everything_the_others_speak(
    snapshot: Snapshot, hard: bool
) -> None:
    """Its weight leaves the others none, and without it they share as if it had never been."""
    made = past([4, 7, 9], [0, DAY, 2 * DAY], [1, 1e30, 2])
    how = Attending(hard=hard)
    (reason,) = explain(snapshot, remember(snapshot, made, AT), 6, 1, how)
    less = score(snapshot, remember(snapshot, without_event(made, 1), AT), np.array([6]), how)
    assert reason.source == 1
    assert reason.weight == pytest.approx(1, abs=1e-6)
    assert reason.without == pytest.approx(float(less.attention[0]), abs=1e-5)


def test_without_the_only_event_nothing_is_attended(snapshot: Snapshot) -> None:
    """One event: it has all the weight, and without it there is the rest."""
    user = remember(snapshot, past([3], [0]), AT)
    scores = score(snapshot, user, np.array([6]))
    (reason,) = explain(snapshot, user, 6, 5, rest=1.25)
    assert reason.weight == pytest.approx(1, abs=1e-6)
    assert reason.contribution == pytest.approx(float(scores.attention[0]), abs=1e-5)
    assert reason.without == pytest.approx(1.25, abs=1e-6)


def test_without_a_past_there_are_no_reasons(snapshot: Snapshot) -> None:
    """Nothing to explain, and no error."""
    assert explain(snapshot, remember(snapshot, Past.nothing(), AT), 0, 5) == []


def test_a_target_that_sees_only_itself_has_no_reasons(snapshot: Snapshot) -> None:
    """With `exclude_self` nothing is left of a past of one item: weight nowhere, attention 0."""
    user = remember(snapshot, past([3, 3], [0, DAY]), AT)
    how = Attending(exclude_self=True)
    assert score(snapshot, user, np.array([3]), how).attention.tolist() == [0]
    assert explain(snapshot, user, 3, 5, how) == []
    assert len(explain(snapshot, user, 4, 5, how)) == 2


def test_long_explanations_are_made_in_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the block, the reasons are the same."""
    user = remember(snapshot, random_past(5, 9, ITEMS), AT)
    whole = explain(snapshot, user, 4, 50)
    monkeypatch.setattr("models.explain._BLOCK", 60)
    for one, other in zip(explain(snapshot, user, 4, 50), whole, strict=True):
        assert one.source == other.source
        assert one.without == pytest.approx(other.without, abs=1e-5)


def test_only_the_largest_reasons_are_named(snapshot: Snapshot) -> None:
    """`top` cuts the list, it does not change what is in it."""
    user = remember(snapshot, random_past(5, 9, ITEMS), AT)
    every = explain(snapshot, user, 4, 50)
    assert len(every) == 9
    for few, whole in zip(explain(snapshot, user, 4, 3), every[:3], strict=True):
        assert few.source == whole.source
        assert few.without == pytest.approx(whole.without, abs=1e-5)
    assert explain(snapshot, user, 4, 0) == []


@pytest.mark.parametrize("exclude_self", [False, True])
def test_coarse_explanations_add_up_too(snapshot: Snapshot, exclude_self: bool) -> None:
    """Over the rows that were kept, and no others."""
    user = long_user(snapshot, 80)
    how = Attending(mode="coarse", k=6, exclude_self=exclude_self)
    found = score(snapshot, user, EVERY, how)
    assert found.within is not None
    for target in range(ITEMS):
        reasons = explain(snapshot, user, target, 200, how, within=found.within[target])
        summed = math.fsum(reason.contribution for reason in reasons)
        assert summed == pytest.approx(float(found.attention[target]), abs=1e-4)
        kept = found.within[target].any(0).nonzero().flatten().tolist()
        assert {reason.source for reason in reasons} <= set(kept)
        if exclude_self:
            assert all(int(user.rows[row]) != target for row in kept)
