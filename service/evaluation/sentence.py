"""Sentence that says what an evaluation found, for readers who do not know its metrics."""

from __future__ import annotations

from collections.abc import Mapping


def sentence(heed: float, baselines: Mapping[str, float], *, is_basket: bool) -> str:
    """Say for how many of 100 customers something they take next is recommended.

    Args:
        heed: share of the users with a target among the ten that Heed recommends.
        baselines: the same share of each baseline, by name.
        is_basket: the targets are the items of the next basket, not the next item alone.
    """
    best = max(baselines, key=baselines.__getitem__)
    right = "basket holds one of" if is_basket else "item is one of"
    return (
        f"For {100 * heed:.0f} of 100 customers the next {right} the ten recommended; "
        f"for {100 * baselines[best]:.0f} with the best baseline, {best}."
    )
