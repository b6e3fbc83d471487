"""Keywords in the softmax of search: each that matches is a key that no meaning comes near.

    logit = (l + μ + level) / τ        of a keyword that was typed as a whole (level 2), or begun

No sum of cosine and BM25 is more than l + μ. A beginning that may also be a word, as `lan*`, weighs
no more than the best match in words: l · share / τ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.ranking.matching.field_matches import FieldMatches
from models.ranking.matching.search_results import SearchResults
from models.text.keywords import KeywordHits


def allowed_keywords(keywords: KeywordHits, allowed: NDArray[np.bool_]) -> KeywordHits:
    """Return the keywords of allowed items [N]."""
    at = np.flatnonzero(allowed[keywords.rows])
    fields = tuple(keywords.fields[place] for place in at.tolist())
    return KeywordHits(keywords.rows[at], keywords.levels[at], fields)


def with_keywords(found: SearchResults, matches: FieldMatches, limit: int) -> SearchResults:
    """Merge the keys of keywords into the softmax over field keys.

    Args:
        found: the best items by their field keys.
        matches: what they were found by.
        limit: the most items.
    """
    keywords, parameters = matches.keywords, matches.parameters
    if not len(keywords.rows):
        return found
    temperature = parameters.temperature * matches.options.temperature
    logits = _scores(matches) / temperature
    if matches.options.hard:
        logits[logits < logits.max()] = -np.inf
        found = replace(found, weights=np.zeros_like(found.weights))
    # Of log-weights before normalising; a score less the log of its weight is the total's.
    with np.errstate(divide="ignore"):
        before = np.log(found.weights)
    total = found.scores[0] - before[0] if len(found.rows) and before[0] > -np.inf else -np.inf
    whole = np.logaddexp(total, np.logaddexp.reduce(logits))
    scores = dict(zip(found.rows.tolist(), (before + total).tolist(), strict=True))
    matched = dict(zip(found.rows.tolist(), found.matched, strict=True))
    for row, logit, field in zip(
        keywords.rows.tolist(), logits.tolist(), keywords.fields, strict=True
    ):
        others = scores.get(row, -np.inf)
        scores[row] = float(np.logaddexp(others, logit))
        share = float(np.exp(logit - scores[row])) if scores[row] > -np.inf else 0.0
        rest = {name: part * (1 - share) for name, part in matched.get(row, {}).items()}
        matched[row] = {field: share, **rest}
    order = sorted((row for row in scores if scores[row] > -np.inf), key=lambda row: -scores[row])
    del order[limit:]
    ranked = np.array([scores[row] for row in order])
    share = float(np.exp(total - whole))  # of the field keys
    return replace(
        found,
        rows=np.array(order, np.int64),
        weights=np.exp(ranked - whole).astype(np.float32),
        scores=ranked.astype(np.float32),
        matched=tuple(
            dict(sorted(matched[row].items(), key=lambda pair: -pair[1])) for row in order
        ),
        mass=1 - share * (1 - found.mass),
    )


def _scores(matches: FieldMatches) -> NDArray[np.float64]:
    """Return the scores of the keywords [M], in units of the cosine."""
    levels, parameters = matches.keywords.levels.astype(np.float64), matches.parameters
    words = parameters.lexical * (1 + levels)
    return np.where(levels > 0, parameters.lexical + parameters.meaning + levels, words)
