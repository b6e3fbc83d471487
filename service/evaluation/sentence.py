"""Sentences that say what an evaluation found, for readers who do not know its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from service.training.train_and_publish import share_of


def sentence(heed: float, baselines: Mapping[str, float], *, users: int, is_basket: bool) -> str:
    """Say for how many customers something they take next is recommended.

    Args:
        heed: share of the users with a target among the ten that Heed recommends.
        baselines: the same share of each baseline, by name.
        users: number of the users.
        is_basket: the targets are the items of the next basket, not the next item alone.
    """
    right = "basket holds one of" if is_basket else "item is one of"
    return (
        f"For {share_of(users, heed, 'customers')} the next {right} the ten recommended; "
        f"{_beside(baselines, users)}."
    )


def new_items_sentence(
    heed: float, baselines: Mapping[str, float], *, users: int, is_basket: bool
) -> str:
    """Say the same where customers take items again, of items that they did not have before.

    The arguments are as in `sentence`, of the customers who take such an item next.
    """
    taken = "next basket holds" if is_basket else "next item is"
    return (
        'That is with "exclude_seen": false. By default, what a customer had is left out: for '
        f"{share_of(users, heed, 'customers')} whose {taken} something new to them, it is among "
        f"the ten recommended; {_beside(baselines, users)}."
    )


def _beside(baselines: Mapping[str, float], users: int) -> str:
    """Say the figure of the best baseline."""
    best = max(baselines, key=baselines.__getitem__)
    count, *_ = share_of(users, baselines[best]).split()
    return f"for {count} with the best baseline, {best}"
