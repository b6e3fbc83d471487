"""The sentence that says what a training was worth, and what is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ENOUGH = 100  # users, from which shares are said of 100


def training_sentence(result: Mapping[str, Any]) -> str:
    """Say how what was trained compares with what was served, and what is served now.

    Args:
        result: metadata of a model version, with the `verdict` of `service.training.gate`.
    """
    found = result["verdict"]
    against, is_served = found["against"], found["is_served"]
    other = f"the best baseline, {against}"
    if found["against_model"]:
        other = f"{against}, served until now" if is_served else f"the served model {against}"
    elif against.startswith("popularity"):
        other = f"{against}, which answers without a model"
    subject, few = "", found["outcome"] == "unknown"
    if result["served"] != "heed":
        subject = f"{result['served']}, published in place of the trained model, is "
    if few:
        users = "1 user" if found["users"] == 1 else f"{found['users']} users"
        if found["against_model"]:
            users += " that the served model has not learned from"
        head = (
            f"The held-out events of {users} are too few to tell whether {subject or 'it is '}"
            f"better than {other}"
        )
    else:
        outcome = found["outcome"] if subject else found["outcome"].capitalize()
        head = f"{subject}{outcome} than {other}: {_figures(result)}"
    if not is_served:
        stays = against if found["against_model"] else "popularity"
        tail = f"{stays} stays served, and this version is kept: heed models activate serves it"
    elif found["against_model"] or found["outcome"] == "better":
        tail = "it is served"
    else:
        popular = result["metrics"]["popularity_ndcg"]
        tail = f"it is served, since popularity, which answers without a model, has {popular:.4f}"
    sentences = [f"{head}; {tail}.", _share_sentence(result), _epochs_sentence(result)]
    if result["has_times"] and (count := result["without_time"]):
        sentences.append(
            f"Events without a time of their own were learned from as older than all others: "
            f"{count:,}."
        )
    return " ".join(filter(None, sentences))


def _figures(result: Mapping[str, Any]) -> str:
    """Say both figures, their difference and the cases."""
    found = result["verdict"]
    cases = "held-out events" if result["has_times"] else "held-out events, drawn at random"
    if found["new_items"]:
        cases += " on items new to their user"
    if not result["has_times"]:
        cases += " since most have no time of their own"
    difference = found["ndcg"] - found["other"]
    return (
        f"NDCG@10 {found['ndcg']:.4f} instead of {found['other']:.4f} on {found['cases']:,} "
        f"{cases} (difference {difference:+.4f}, 95 % interval {found['low']:+.4f} to "
        f"{found['high']:+.4f})"
    )


def _share_sentence(result: Mapping[str, Any]) -> str:
    """Say for how many users ten recommendations hold a target; nothing if few were judged."""
    found = result.get("new_items", result)
    users, share = result["verdict"]["users"], found["metrics"]["user_hr"]
    if result["verdict"]["outcome"] == "unknown":
        return ""
    target = "the next item"
    if not result["has_times"]:
        target = "the held-out item"
    elif result["next_basket"]:
        target = "something of the next basket"
    if found is not result:
        target += " that is new to the user"
    return f"Its ten recommendations hold {target} for {share_of(users, share)}."


def _epochs_sentence(result: Mapping[str, Any]) -> str:
    """Say why fewer epochs were trained than were asked; nothing otherwise."""
    trained, asked = result["epochs"], result["epochs_asked"]
    if asked is None or trained >= asked:
        return ""
    return (
        f"The training stopped after {trained} of {asked} epochs, since the validation did not "
        "improve any more."
    )


def share_of(users: int, share: float, name: str = "users") -> str:
    """Say a share of users, of 100 only if there are as many."""
    if users < _ENOUGH:
        return f"{share * users:.3g} of {users} {name}"
    return f"{100 * share:.0f} of 100 {name}"
