"""Keywords in the softmax of search: each that matches is a key that no meaning comes near.

    logit = (l + μ + level) / τ        of a keyword that was typed as a whole (level 2), or begun

No sum of cosine and BM25 is more than l + μ. A beginning that may also be a word, as `lan*`, weighs
no more than the best match in words: l · share / τ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.data.vocabulary import RowIndices
from models.ranking.matching.field_matches import FieldMatches
from models.ranking.matching.search_results import SearchResults
from models.text.terms import KeywordHits


def allowed_keywords(keywords: KeywordHits, allowed: NDArray[np.bool_]) -> KeywordHits:
    """Return the keywords of allowed items [N]."""
    at = np.flatnonzero(allowed[keywords.rows])
    fields = tuple(keywords.fields[place] for place in at.tolist())
    return KeywordHits(keywords.rows[at], keywords.levels[at], fields, keywords.is_cut)


def keyword_scores(
    matches: FieldMatches, rows: RowIndices, scores: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Add the keys of keywords to the scores of items.

    Args:
        matches: of the query.
        rows: items [R] with field keys, ascending.
        scores: of these, [R].

    Returns:
        The rows of all items with a score, ascending, and their scores.
    """
    keywords = matches.keywords
    if not len(keywords.rows):
        return rows.astype(np.int64), scores.astype(np.float64)
    every = np.union1d(rows, keywords.rows).astype(np.int64)
    found = np.full(len(every), -np.inf)
    if not (matches.options.hard and len(keywords.rows)):
        found[np.searchsorted(every, rows)] = scores
    np.logaddexp.at(found, np.searchsorted(every, keywords.rows), _logits(matches))
    return every[found > -np.inf], found[found > -np.inf]


def with_keywords(found: SearchResults, matches: FieldMatches, total: float) -> SearchResults:
    """Merge the keys of keywords into the softmax over field keys.

    Args:
        found: items by their field keys.
        matches: of the query.
        total: log of the sum of exponentials over all field keys.

    Returns:
        SearchResults: these items and all with keywords, by falling scores.
    """
    keywords = matches.keywords
    if not len(keywords.rows):
        return found
    logits = _logits(matches)
    if matches.options.hard:
        total = -np.inf
    whole = np.logaddexp(total, np.logaddexp.reduce(logits))
    scores, personal = dict[int, float](), dict[int, float]()
    if total > -np.inf:
        scores = dict(zip(found.rows.tolist(), found.scores.tolist(), strict=True))
    if found.personal is not None:
        personal = dict(zip(found.rows.tolist(), found.personal.tolist(), strict=True))
    # What the items would score without a memory: it adds to field keys alone.
    plain = {row: score - personal.get(row, 0.0) for row, score in scores.items()}
    matched = dict(zip(found.rows.tolist(), found.matched, strict=True))
    for row, logit, field in zip(
        keywords.rows.tolist(), logits.tolist(), keywords.fields, strict=True
    ):
        scores[row] = float(np.logaddexp(scores.get(row, -np.inf), logit))
        plain[row] = float(np.logaddexp(plain.get(row, -np.inf), logit))
        share = float(np.exp(logit - scores[row])) if scores[row] > -np.inf else 0.0
        rest = {name: part * (1 - share) for name, part in matched.get(row, {}).items()}
        matched[row] = {field: share, **rest}
    order = sorted((row for row in scores if scores[row] > -np.inf), key=lambda row: -scores[row])
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
        personal=None
        if found.personal is None
        else np.array([scores[row] - plain[row] for row in order], np.float32),
    )


def _logits(matches: FieldMatches) -> NDArray[np.float64]:
    """Return the logits of the keywords [M]; hard attention leaves the largest."""
    logits = _scores(matches) / (matches.parameters.temperature * matches.options.temperature)
    if matches.prior is not None:
        logits += matches.prior[matches.keywords.rows]
    if matches.options.hard and len(logits):
        logits[logits < logits.max()] = -np.inf
    return logits


def _scores(matches: FieldMatches) -> NDArray[np.float64]:
    """Return the scores of the keywords [M], in units of the cosine."""
    levels, parameters = matches.keywords.levels.astype(np.float64), matches.parameters
    words = parameters.lexical * (1 + levels)
    return np.where(levels > 0, parameters.lexical + parameters.meaning + levels, words)
