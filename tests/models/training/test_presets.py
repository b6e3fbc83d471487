"""Training presets: their choice by size, and bounds on work and memory."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.recommender.co_occurrence import SEQUENCE_WINDOW, SMALL_LOG_WINDOW
from models.recommender.recommender import Recommender
from models.training.log_profile import hold_out
from models.training.presets import PRESET_NAMES, SMALL_LOG, choose_preset

ITEMS = [500, 3_500, 20_000, 100_000, 500_000]
EVENTS = [10**power for power in range(2, 9)]
INPUTS = {"quick": 7_000_000, "best": 12_000_000}  # of all epochs, on a few thousand items
SIZES = [(name, items, events) for name in PRESET_NAMES for items in ITEMS for events in EVENTS]


def test_best_is_larger_than_quick() -> None:
    assert PRESET_NAMES == ("quick", "best")
    for items in ITEMS:
        for events in EVENTS:
            quick, best = (choose_preset(events, items, name) for name in PRESET_NAMES)
            assert (quick.name, best.name) == PRESET_NAMES
            assert quick.dim < best.dim
            assert quick.blocks < best.blocks
            assert quick.train_config.epochs <= best.train_config.epochs


def test_preset_is_chosen_by_size_by_default() -> None:
    """Logs of up to 300,000 events get `quick`, larger logs `best`."""
    assert SMALL_LOG == 300_000
    for events, name in (
        (100, "quick"),
        (SMALL_LOG, "quick"),
        (SMALL_LOG + 1, "best"),
        (10**8, "best"),
    ):
        assert choose_preset(events, 3_500) == choose_preset(events, 3_500, name)
        assert choose_preset(events, 3_500).name == name


@pytest.mark.parametrize("name", ["", "Quick", "slow", "best "])
def test_another_name_is_refused(name: str) -> None:
    """An unknown preset is refused with the known names."""
    with pytest.raises(ValueError, match=rf"preset must be one of quick, best, not '{name}'"):
        choose_preset(1000, 100, name)


@pytest.mark.parametrize("name", [None, *PRESET_NAMES])
@pytest.mark.parametrize("epochs", [1, 3, 500])
def test_epochs_may_be_given(name: str | None, epochs: int) -> None:
    own, given = choose_preset(10**6, 4_000, name), choose_preset(10**6, 4_000, name, epochs=epochs)
    assert given == replace(own, train_config=replace(own.train_config, asked_epochs=epochs))
    for has_final in (True, False):
        for config in (given.train_config, given.train_config.for_next_basket()):
            stages = config.divided(has_final=has_final)
            each = (stages.epochs, stages.attention_epochs, stages.final_epochs)
            assert sum(each) == stages.total_epochs == epochs
            assert stages.epochs >= max(each[1:])
            assert stages.final_epochs == (min(2, epochs // 3) if has_final else 0)


@pytest.mark.parametrize(("in_baskets", "epochs"), [(True, 20 + 1 + 2), (False, 40 + 2 + 2)])
def test_a_report_shows_the_epochs_of_the_training(in_baskets: bool, epochs: int) -> None:
    users, at = np.divmod(np.arange(40 * 12), 12)
    times = at // 3 * 86_400_000_000 + (0 if in_baskets else at)
    log = Interactions.from_columns(
        users, (7 * users + at * at) % 30, times, n_users=40, n_items=30
    )
    preset = choose_preset(len(log), log.n_items)
    assert str(preset).endswith("2 blocks, 44 epochs at most)")
    history, cases = hold_out(log)
    used = preset.as_trained(history, cases)
    assert str(used).endswith(f"2 blocks, {epochs} epochs at most)")
    # A second report of the same training says the same, as `fit` is given the preset's own.
    assert (used == preset) is not in_baskets
    alone = preset.as_trained(log, None)
    assert alone.train_config.total_epochs == 40 + 2


@pytest.mark.parametrize(("name", "items", "events"), SIZES)
def test_the_work_is_bounded(name: str, items: int, events: int) -> None:
    """The work of all epochs stays within the preset's budget, or the epochs are 2.

    From a few thousand items on the softmax decides what an input costs, up to where its items
    are sampled; from a hundred thousand on, the update of all items' vectors in each step does.
    """
    config = choose_preset(events, items, name).train_config
    most = 40 if events < 50_000 else 10 if events < 20 * items else 20
    assert 2 <= config.epochs <= most
    sampled = min(items, config.sampled_negatives + config.batch_tokens)
    columns = items if items <= config.full_softmax_items else sampled
    update = 0.004 * items / config.batch_tokens
    cost = max(1.0, 0.4 + 0.6 * columns / 3_500 + update)
    inputs = config.epochs * events * cost
    assert inputs <= 1.25 * INPUTS[name] or config.epochs == 2
    # Nothing is saved that could be afforded.
    assert inputs + events * cost > 0.75 * INPUTS[name] or config.epochs == most
    assert config.attention_epochs <= 2


@pytest.mark.parametrize(("name", "items", "events"), SIZES)
def test_the_memory_is_bounded(name: str, items: int, events: int) -> None:
    """Transition counts, and the logits of an attention batch, take at most 128 MB each."""
    preset = choose_preset(events, items, name)
    config, shape = preset.train_config, preset.model_config(items, 256)
    assert 8 * shape.transitions_per_item * items <= 128_000_000
    assert shape.transitions_per_item >= 16
    assert config.attention_batch_tokens <= config.batch_tokens <= 1_600
    candidates = min(items, config.full_softmax_items)
    assert 4 * config.attention_batch_tokens * candidates <= 128_000_000


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_small_logs_are_cut_into_small_batches(name: str) -> None:
    configs = [choose_preset(events, 3_500, name).train_config for events in EVENTS]
    assert [config.batch_tokens for config in configs] == [400] * 3 + [1_600] * 4
    baskets = [config.for_next_basket().batch_tokens for config in configs]
    assert baskets == [100, 100, 100, 416, 1_600, 1_600, 1_600]
    assert choose_preset(90_000, 3_500, name).train_config.batch_tokens == 1_500


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_sparse_logs_overfit_sooner(name: str) -> None:
    """With fewer than 20 events an item, epochs are 10, batches half as long and dropout 0.5."""
    sparse, other = (choose_preset(90_000, items, name) for items in (4_501, 4_500))
    assert (sparse.train_config.epochs, sparse.dropout) == (10, 0.5)
    assert other.dropout == 0.3
    assert other.train_config.batch_tokens == 2 * sparse.train_config.batch_tokens


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_small_logs_count_transitions_from_more_events(name: str) -> None:
    for events, window in ((SMALL_LOG, SMALL_LOG_WINDOW), (SMALL_LOG + 1, SEQUENCE_WINDOW)):
        shape = choose_preset(events, 500, name).model_config(500, 8)
        assert Recommender(shape).statistics.cooccurrence_window == window
    assert (SMALL_LOG_WINDOW.depth, SEQUENCE_WINDOW.depth) == (32, 8)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_more_data_take_no_more_epochs(name: str) -> None:
    by_events = [choose_preset(events, 3_500, name).train_config.epochs for events in EVENTS]
    by_items = [choose_preset(10**6, items, name).train_config.epochs for items in ITEMS]
    for epochs in (by_events, by_items):
        assert all(more <= less for less, more in pairwise(epochs))
    assert by_events[0] == 40
    assert by_events[-1] == 2
