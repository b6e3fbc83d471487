"""The fit of a query table against a dense solution in float64, and with known teachers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from models.text import query_table_fit
from models.text.query_table import QueryTable
from models.text.query_table_fit import fit_query_table, fit_rows
from tests.support.token_encoder import WIDTH, WORDS, TokenEncoder, sentences


def test_rows_equal_the_dense_solution_of_the_ridge_regression() -> None:
    """The rows equal a dense float64 solution of the normal equations."""
    encoder = TokenEncoder(bend=0.5)
    texts = sentences(200)
    tokens, targets = encoder.tokenize(texts), encoder.encode(texts)
    prior = np.random.default_rng(1).normal(size=(len(encoder.vocabulary), WIDTH))
    for ridge in (0.1, 2.0):
        design = np.zeros((len(texts), len(prior)))
        for row, ids in enumerate(tokens):
            for token in ids:
                design[row, token] += len(ids) ** -0.5
        left = design.T @ design + ridge * np.eye(len(prior))
        expected = np.linalg.solve(left, design.T @ targets + ridge * prior)
        start: NDArray[np.float32] = prior.astype(np.float32)
        found = fit_rows(tokens, targets, start, ridge, iterations=60)
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_tokens_of_no_text_keep_their_prior() -> None:
    """A token that no text has keeps the prior's row exactly."""
    encoder = TokenEncoder()
    texts = sentences(100, words=WORDS[:10])
    prior = np.random.default_rng(1).normal(size=(len(encoder.vocabulary), WIDTH))
    start: NDArray[np.float32] = prior.astype(np.float32)
    rows = fit_rows(encoder.tokenize(texts), encoder.encode(texts), start, 0.1)
    np.testing.assert_array_equal(rows[11:], start[11:])
    assert (rows[1:11] != start[1:11]).any(axis=1).all()


def test_a_table_imitates_the_encoder_on_texts_it_was_not_fitted_to() -> None:
    """On other texts the fitted table agrees far better than the tokens' own vectors do."""
    encoder = TokenEncoder(bend=0.3)
    fitted = fit_query_table(encoder, sentences(1_500))
    others = sentences(300, seed=1)
    expected = encoder.encode(others)

    def agreement(table: QueryTable) -> float:
        return float((table.encode(others) * expected).sum(axis=1).mean())

    alone = QueryTable(encoder, encoder.encode(encoder.vocabulary))
    assert agreement(fitted.table) > 0.97
    assert agreement(alone) < 0.9
    assert fitted.agreement == pytest.approx(agreement(fitted.table), abs=0.02)
    assert fitted.texts == 1_500


def test_a_fit_is_reproducible() -> None:
    """The same texts and seed give the same table."""
    texts = sentences(400)
    first, second = (fit_query_table(TokenEncoder(), texts) for _ in range(2))
    assert first.table.name == second.table.name


def test_texts_are_sampled_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MAX_TEXTS texts are encoded, each token once, and progress reaches each total."""
    monkeypatch.setattr(query_table_fit, "MAX_TEXTS", 50)
    encoder, last = TokenEncoder(), dict[str, tuple[int, int]]()
    texts = list(dict.fromkeys(sentences(200)))
    fitted = fit_query_table(
        encoder, texts, progress=lambda stage, done, total: last.update({stage: (done, total)})
    )
    assert fitted.texts == 50
    assert len(set(encoder.encoded) & set(texts)) == 50
    assert len(encoder.encoded) == 50 + len(encoder.vocabulary)
    assert all(done == total for done, total in last.values())
    assert list(last) == ["encoding sentences", "encoding tokens", "fitting the query table"]


def test_what_cannot_be_fitted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few texts with tokens, and vocabularies too large, are refused before any encoding."""
    encoder = TokenEncoder()
    with pytest.raises(ValueError, match=r"^1 texts are too few"):
        fit_query_table(encoder, ["w1", "", "unknown"])
    monkeypatch.setattr(query_table_fit, "MAX_TOKENS", 60)
    with pytest.raises(ValueError, match="has 61 tokens: a table has 60 at most"):
        fit_query_table(encoder, sentences(10))
    assert encoder.encoded == []
