"""Explanations: contributions sum to the score, and the closed form equals deleting the row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.attention.attend import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    HeadProjections,
    attend,
    merge_heads,
    split_heads,
)
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.contributions import gains
from models.ranking.scoring import score
from models.recommender.co_occurrence import TransitionCounts
from tests.support import reference
from tests.support.pasts import (
    AT,
    ITEMS,
    TRAINED,
    WINDOW,
    Loop,
    basket_snapshot,
    drawn_snapshot,
    parts_without,
    pasts,
    reasons_of,
    similar_snapshot,
    ways,
    without_event,
)
from tests.support.small import DAY, past, random_model, random_past
from tests.support.small import snapshot as small_snapshot

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
    scores, values, outputs = drawn
    weights = weights_of(scores)  # (T, H, n)
    found = (weights * gains(values, outputs.transpose(0, 1)).transpose(0, 1)).sum(1)
    assert found.shape == (scores.shape[0], scores.shape[2])
    context = torch.einsum("thn,hnv->thv", weights.double(), values.double())
    part = torch.einsum("thv,thv->t", context, outputs.double())
    np.testing.assert_allclose(found.sum(-1).numpy(), part.numpy(), atol=1e-4)
    hidden = (scores == -INF).all(1)
    assert (found[hidden] == 0).all()


def test_contributions_of_the_trained_module_sum_to_the_score() -> None:
    """Through projections and W_O: ⟨target, output⟩ is the sum of signed contributions."""
    torch.manual_seed(0)
    module = HeadProjections(12, 3, 5)
    target, history = torch.randn(4, 12), torch.randn(9, 12)
    with torch.inference_mode():
        keys, values = module.keys_values(history)  # (H, n, d)
        attended = attend(module.queries(target), keys, values)
        output = module.w_o(merge_heads(attended.context))  # [T, 12]
        outward = split_heads(target @ module.w_o.weight, 3)  # o^h of each target (H, T, d)
        found = (attended.weights * gains(values, outward)).sum(0)  # (T, n)
        score = (target * output).sum(-1)
        assert torch.allclose(found.sum(-1), score, atol=1e-4)
        assert (found < 0).any()
        assert merge_heads(outward).shape == (4, 15)


def test_contribution_is_zero_for_an_orthogonal_value() -> None:
    """A row of large weight whose value is orthogonal to the output contributes 0."""
    keys: dict[str, Any] = {"a": [3.0, 0.0], "b": [1.0, 0.0]}
    k = torch.tensor(list(keys.values()))
    v = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    query, outward = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    found = attend(query, k, v)
    part = (found.weights * gains(v, outward))[0]
    assert found.weights[0, 0] > 0.9
    assert part[0] == 0
    assert part[1] == found.weights[0, 1]


# ---------------------------------------------------------------------------- reasons


@pytest.fixture(scope="module", params=[drawn_snapshot, basket_snapshot, similar_snapshot])
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    made: Snapshot = request.param()
    return made


def without_entry(whole: UserHistory, entry: int) -> UserHistory:
    """The past without one entry of its profile."""
    content = whole.profile_content
    return replace(
        whole,
        profile_rows=np.delete(whole.profile_rows, entry),
        profile_content=None if content is None else np.delete(content, entry, axis=0),
    )


@few
@given(made=pasts(least=1), options=ways, target=st.integers(0, ITEMS - 1))
def test_contributions_add_up_to_the_score(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int
) -> None:
    """Σ contributions + prior = the score, as the parts add up to it.

    To 1e-4, however it was attended.
    """
    user = build_memory(snapshot, made, AT)
    scores = score(snapshot, user, np.array([target]), options)
    reasons = reasons_of(snapshot, user, target, 50, options)
    summed = math.fsum(reason.contribution for reason in reasons)
    assert sum(float(part[0]) for part in scores.parts.values()) == pytest.approx(
        float(scores.total[0]), abs=1e-4
    )
    whole = summed + float(scores.prior[0])
    assert whole == pytest.approx(float(scores.total[0]), abs=1e-4)
    sources = [reason.source for reason in reasons]
    assert len(set(sources)) == len(sources)
    assert set(sources) <= set(user.source.tolist())


@few
@given(made=pasts(least=1), options=ways, target=st.integers(0, ITEMS - 1))
def test_reasons_equal_the_loop(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int
) -> None:
    """Weights and contributions of all reasons equal the loop, in descending order."""
    user = build_memory(snapshot, made, AT)
    loop = Loop(snapshot, made, AT)
    alpha, _ = loop.attention(target, options)
    each, margin = loop.contributions(target, options)
    assume(margin > 1e-5)  # rounding decides otherwise which rows share
    place = {source: at for at, source in enumerate(user.source.tolist())}
    reasons = reasons_of(snapshot, user, target, 50, options)
    for reason in reasons:
        at = place[reason.source]
        assert reason.weight == pytest.approx(alpha[:, at].mean(), abs=1e-5)
        # 1 - α, by which is divided, may be 1e-3: float32 knows it to four digits then.
        assert reason.contribution == pytest.approx(each[at], abs=1e-4, rel=1e-4)
    named = [reason.contribution for reason in reasons]
    assert named == sorted(named, reverse=True)
    missing = set(place.values()) - {place[reason.source] for reason in reasons}
    assert all(alpha[:, at].sum() < 1e-6 and each[at] == 0 for at in missing)


@few
@given(
    made=pasts(least=1),
    options=ways,
    target=st.integers(0, ITEMS - 1),
    top=st.integers(1, 6),
)
def test_what_raises_the_score_is_named_before_what_lowers_it(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int, top: int
) -> None:
    """`top` takes the largest positive contributions first, then the most negative."""
    user = build_memory(snapshot, made, AT)
    loop = Loop(snapshot, made, AT)
    alpha, _ = loop.attention(target, options)
    contributed, margin = loop.contributions(target, options)
    assume(margin > 1e-5)  # rounding decides otherwise which rows share
    seen = (alpha.sum(0) > 0) | (contributed != 0)
    each = contributed[seen].tolist()
    raising = sorted((one for one in each if one > 0), reverse=True)
    lowering = sorted(one for one in each if one <= 0)
    wanted = sorted([*raising, *lowering][:top], reverse=True)
    found = [reason.contribution for reason in reasons_of(snapshot, user, target, top, options)]
    assert found == pytest.approx(wanted, abs=1e-4)


def without_row(
    snapshot: Snapshot, made: UserHistory, source: int, target: int, options: AttentionOptions
) -> float:
    """Attention and transitions over what is left of a past, in the states of the whole of it."""
    left = without_event(made, source) if source >= 0 else without_entry(made, -1 - source)
    loop = Loop(snapshot, left, AT)
    loop.use_states_of(Loop(snapshot, made, AT), source)
    alpha, gain = loop.attention(target, options)
    return float((alpha * gain).sum()) + loop.transitions(target, options) + loop.similarity(target)


@few
@given(made=pasts(least=1), options=ways, target=st.integers(0, ITEMS - 1))
def test_the_closed_form_is_what_deleting_the_row_gives(
    snapshot: Snapshot, made: UserHistory, options: AttentionOptions, target: int
) -> None:
    """The closed form equals attention and transitions after deletion of the row, to 1e-4.

    What remains moves one place nearer to the present, so that places shift as they would. The
    encoder's states, of which the λ is a function too, are those of the whole past.
    """
    user = build_memory(snapshot, made, AT)
    for source, part in parts_without(snapshot, user, target, options).items():
        expected = without_row(snapshot, made, source, target, options)
        assert part == pytest.approx(expected, abs=1e-4)


def test_without_a_recent_event_the_ninth_counts_in_the_transitions(snapshot: Snapshot) -> None:
    columns = torch.full((TRAINED, 1), 4, dtype=torch.int32)
    model = random_model(11, window=WINDOW, transitions_per_item=1)
    model.statistics.load(
        TransitionCounts(columns, 1.0 + torch.arange(TRAINED)[:, None]), max_request_gap=2 * DAY
    )
    even = small_snapshot(ITEMS, model)
    made = past([9, 8, 7, 6, 5, 3, 2, 1, 0, 11], np.arange(10) * 3600)
    user = build_memory(even, made, AT)
    with torch.inference_mode():
        scale = float(model.transition_scale(user.user_state))
    reasons = {reason.source: reason for reason in reasons_of(even, user, 4, 50)}
    attended = score(even, user, np.array([4])).attention
    left_out = parts_without(even, user, 4)
    assert len(reasons) == 10
    for event in range(10):
        left = [row for at, row in enumerate(made.rows.tolist()) if at != event]
        loop = Loop(even, without_event(made, event), AT)
        loop.use_states_of(Loop(even, made, AT), event)
        alpha, gain = loop.attention(4, DEFAULT_OPTIONS)
        total = sum(0.3**k * (1 + row) for k, row in enumerate(left[::-1][:8]))
        expected = float((alpha * gain).sum()) + scale * math.log(1 + 2 * total)
        assert left_out[event] == pytest.approx(expected, abs=1e-4)
    total = sum(0.3**k * (1 + row) for k, row in enumerate(made.rows[::-1][:8].tolist()))
    summed = sum(reason.contribution for reason in reasons.values())
    part = float(attended[0]) + scale * math.log(1 + 2 * total)
    assert summed == pytest.approx(part, abs=1e-4)


@pytest.mark.parametrize("hard", [False, True])
def test_without_the_dominant_event_is_the_score_of_the_others(
    snapshot: Snapshot, hard: bool
) -> None:
    made = past([4, 7, 9], [0, DAY, 2 * DAY], [1, 1e30, 2])
    options = AttentionOptions(hard=hard)
    user = build_memory(snapshot, made, AT)
    reasons = reasons_of(snapshot, user, 6, 3, options)
    (reason,) = (reason for reason in reasons if reason.weight > 0.5)
    assert reason.source == 1
    assert reason.weight == pytest.approx(1, abs=1e-6)
    left = parts_without(snapshot, user, 6, options)[1]
    assert left == pytest.approx(without_row(snapshot, made, 1, 6, options), abs=1e-5)


def test_without_the_only_event_nothing_is_attended(snapshot: Snapshot) -> None:
    """Without its only event a memory has neither attention nor transitions."""
    user = build_memory(snapshot, past([3], [0]), AT)
    for target in range(ITEMS):
        scores = score(snapshot, user, np.array([target]))
        (reason,) = reasons_of(snapshot, user, target, 5)
        assert reason.weight == pytest.approx(1, abs=1e-6)
        part = float(scores.total[0]) - float(scores.prior[0])
        assert reason.contribution == pytest.approx(part, abs=1e-5)
        assert parts_without(snapshot, user, target)[0] == pytest.approx(0, abs=1e-6)


def test_without_a_past_there_are_no_reasons(snapshot: Snapshot) -> None:
    """An empty history has no reasons."""
    assert reasons_of(snapshot, build_memory(snapshot, UserHistory.empty(), AT), 0, 5) == []


def test_a_target_that_sees_only_itself_has_no_reasons(snapshot: Snapshot) -> None:
    """With exclude_self a history of the target alone has no reasons and attention 0."""
    user = build_memory(snapshot, past([3, 3], [0, DAY]), AT)
    options = AttentionOptions(exclude_self=True)
    assert score(snapshot, user, np.array([3]), options).attention.tolist() == [0]
    assert reasons_of(snapshot, user, 3, 5, options) == []
    assert len(reasons_of(snapshot, user, 4, 5, options)) == 2


def test_the_closed_form_is_computed_in_blocks(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = build_memory(snapshot, random_past(5, 9, ITEMS), AT)
    whole = parts_without(snapshot, user, 4)
    monkeypatch.setattr("models.ranking.explanation._BLOCK", 60)
    assert parts_without(snapshot, user, 4) == pytest.approx(whole, abs=1e-5)


def test_the_number_of_reasons_changes_none_of_them(snapshot: Snapshot) -> None:
    """A shorter explanation has the same numbers per reason as the full one."""
    user = build_memory(snapshot, random_past(5, 9, ITEMS), AT)
    every = {reason.source: reason for reason in reasons_of(snapshot, user, 4, 50)}
    assert len(every) == 9
    short = reasons_of(snapshot, user, 4, 3)
    assert len(short) == 3
    for few in short:
        whole = every[few.source]
        assert few.contribution == whole.contribution
    assert reasons_of(snapshot, user, 4, 0) == []


@pytest.mark.parametrize("shape", [{"blocks": 0}, {"transitions_per_item": 0}])
def test_a_model_without_transitions_is_explained(shape: dict[str, int]) -> None:
    """Without transitions, contributions sum to the attention; the closed form is deletion."""
    snapshot = small_snapshot(ITEMS, random_model(11, window=WINDOW, **shape))
    made = random_past(5, 9, ITEMS)
    user = build_memory(snapshot, made, AT)
    for target in (2, 6):
        scores = score(snapshot, user, np.array([target]))
        reasons = reasons_of(snapshot, user, target, 50)
        summed = math.fsum(reason.contribution for reason in reasons)
        assert summed == pytest.approx(float(scores.attention[0]), abs=1e-4)
        for source, part in parts_without(snapshot, user, target).items():
            expected = without_row(snapshot, made, source, target, DEFAULT_OPTIONS)
            assert part == pytest.approx(expected, abs=1e-4)
