"""Metrics of several workers in one text, each series with the number of its worker.

Workers are not summed up: a worker that is started again counts from 0, which a reader of the sums
could not tell from a worker that has ended.
"""

from __future__ import annotations

from collections.abc import Mapping


def merge_workers(texts: Mapping[int, bytes]) -> bytes:
    """Merge what each worker renders, by its number; each series gets its `worker` label.

    The label is put into the lines of the text. prometheus_client's parser would take ten times as
    long, on the event loop.
    """
    heads: dict[str, list[str]] = {}  # of each family, its HELP and TYPE
    samples: dict[str, list[str]] = {}
    for number, text in sorted(texts.items()):
        label = f'worker="{number}"'
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join([*lines, ""]).encode()


def _labelled(line: str, label: str) -> str:
    """Put one more label into a sample's line; the value has no brace, whatever labels have."""
    name, brace, value = line.rpartition("} ")
    if brace:
        return f"{name},{label}}} {value}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
