"""Choice between a query table and the transformer that it imitates, on a catalogue's own texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from models.evaluation.full_ranking import standard_error
from models.text.query_table import FittedTable, TokenizingEncoder, fit_query_table
from service.domain.errors import Invalid
from service.domain.records import Item
from service.evaluation.search_calibration import (
    SENTENCE_END,
    Calibration,
    HeldOut,
    calibrate_held_out,
    hold_out,
    plain_text,
    sample_items,
)
from service.snapshots.text_embeddings import EmbeddingCache
from service.training.training_corpus import StageProgressCallback

_PIECE = 11  # words of a piece of a sentence
_KEPT = 0.5  # of what the transformer's queries add to words alone, a table adds more


@dataclass(frozen=True, slots=True, eq=False)
class QueryEncoding:
    """A table fitted to a catalogue, and searches calibrated with it and with the transformer.

    Attributes:
        fitted: the table.
        by_table: the calibration of searches whose queries the table encodes.
        by_encoder: that of searches whose queries the transformer encodes.
    """

    fitted: FittedTable
    by_table: Calibration
    by_encoder: Calibration

    @property
    def is_table_good(self) -> bool:
        """Report whether the table shall encode queries.

        It shall where its queries add to words alone more than a standard error, and more than half
        of what the transformer's add; or where the transformer's add no more, or nothing.
        """
        words = self.by_table.gains[:, 0]
        table, encoder = (each.chosen - words for each in (self.by_table, self.by_encoder))
        if table.mean() >= encoder.mean() or self.by_encoder.parameters.meaning == 0:
            return True
        return bool(table.mean() > max(standard_error(table), _KEPT * encoder.mean()))


def fit_query_encoding(
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    *,
    seed: int = 0,
    progress: StageProgressCallback | None = None,
) -> QueryEncoding:
    """Fit a table to the titles and sentences of a catalogue, and compare it on held-out ones.

    Takes minutes, most of them for encoding up to 30,000 sentences and pieces of them, and the time
    to embed the texts that are new to `embeddings`. `seed` is of the samples.

    Raises:
        Invalid: the encoder of `embeddings` needs no table, or too few items have several texts, or
            its vocabulary is too large.
    """
    encoder = embeddings.encoder
    if encoder.quick or not isinstance(encoder, TokenizingEncoder):
        raise Invalid("", f"{encoder.name} needs no query table: it encodes queries itself")

    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, done, total, None)

    searched = sample_items(items, seed)
    parts = hold_out(searched, seed)
    try:
        fitted = fit_query_table(encoder, _texts(searched, parts), seed=seed, progress=report)
    except ValueError as error:
        raise Invalid("", f"no query table can be fitted: {error}") from error
    by_table, by_encoder = calibrate_held_out(
        parts,
        embeddings,
        [lambda text: fitted.table.encode([text])[0], embeddings.query],
        progress,
    )
    return QueryEncoding(fitted, by_table, by_encoder)


def _texts(items: Sequence[Item], parts: Sequence[HeldOut]) -> list[str]:
    """Return the titles and sentences of items, without those that are held out as queries.

    Every other one is cut into pieces of about the length of a query: for the same time of the
    encoder, a table that was fitted to these too agrees better with it on whole sentences.
    """
    held = {text for part in parts for text, _ in part.queries}
    texts = (
        text
        for item in items
        for text in (item.title, *SENTENCE_END.split(item.description))
        if text.strip() and plain_text(text) not in held
    )
    found: list[str] = []
    for at, text in enumerate(dict.fromkeys(texts)):
        words = text.split()
        count = max(1, round(len(words) / _PIECE)) if at % 2 else 1
        if count == 1:
            found.append(text)
        else:
            ends = [len(words) * part // count for part in range(count + 1)]
            found += [" ".join(words[start:end]) for start, end in pairwise(ends)]
    return list(dict.fromkeys(found))
