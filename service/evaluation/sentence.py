"""Sentences that say what an evaluation found, for readers who do not know its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def training_sentence(result: Mapping[str, Any]) -> str:
    """Say it of a published model, from its metadata as `Judgement.as_dict` returns them."""
    is_basket = result["next_basket"]
    said = sentence(*_user_shares(result), is_basket=is_basket)
    if "new_items" not in result:
        return said
    return f"{said} {new_items_sentence(*_user_shares(result['new_items']), is_basket=is_basket)}"


def metrics_line(found: Mapping[str, Any]) -> str:
    """Format NDCG and HR of one question, from its metadata, beside those of the best baseline."""
    metrics, best = found["metrics"], found["best_baseline"]
    row = found["baselines"][best]
    return (
        f"NDCG@10 {metrics['ndcg']:.4f} ({best} {row['ndcg']:.4f}), "
        f"HR@10 {metrics['hr']:.4f} ({best} {row['hr']:.4f})"
    )


def sentence(heed: float, baselines: Mapping[str, float], *, is_basket: bool) -> str:
    """Say for how many of 100 customers something they take next is recommended.

    Args:
        heed: share of the users with a target among the ten that Heed recommends.
        baselines: the same share of each baseline, by name.
        is_basket: the targets are the items of the next basket, not the next item alone.
    """
    right = "basket holds one of" if is_basket else "item is one of"
    return (
        f"For {100 * heed:.0f} of 100 customers the next {right} the ten recommended; "
        f"{_beside(baselines)}."
    )


def new_items_sentence(heed: float, baselines: Mapping[str, float], *, is_basket: bool) -> str:
    """Say the same where customers take items again, of items that they did not have before.

    The arguments are as in `sentence`, of the customers who take such an item next.
    """
    taken = "next basket holds" if is_basket else "next item is"
    return (
        'That is with "exclude_seen": false. By default, what a customer had is left out: for '
        f"{100 * heed:.0f} of 100 customers whose {taken} something new to them, it is among the "
        f"ten recommended; {_beside(baselines)}."
    )


def _beside(baselines: Mapping[str, float]) -> str:
    """Say the figure of the best baseline."""
    best = max(baselines, key=baselines.__getitem__)
    return f"for {100 * baselines[best]:.0f} with the best baseline, {best}"


def _user_shares(found: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the shares of users of Heed and of each baseline, from the metadata of a question."""
    baselines = {name: row["user_hr"] for name, row in found["baselines"].items()}
    return found["metrics"]["user_hr"], baselines
