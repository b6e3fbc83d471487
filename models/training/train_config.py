"""Hyperparameters of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Hyperparameters of a training. Every default was chosen on validation data."""

    epochs: int = 20  # of all but the target's part of the queries; without an encoder, of all
    attention_epochs: int = 1  # of the target attention, with everything else frozen
    final_epochs: int = 2  # on all events, the validation cases included
    patience: int = 3  # validations without a better NDCG before training stops
    validate_every: int = 2  # epochs
    validation_users: int = 3_000  # at most, drawn once under the seed
    weight_cases: int = 12_000  # at most, likewise: they choose the weights of the score's parts
    learning_rate: float = 1e-3
    warmup_steps: int = 200
    # Padded positions. On MovieLens 1M, four epochs of these rank better than seven of 6,400
    # positions with the model of `quick`, and twelve as well as 32 with that of `best`.
    batch_tokens: int = 1_600
    basket_batch_tokens: int = 1_600  # the same of a next-basket model
    attention_batch_tokens: int = 1_600  # padded positions while the target attention is trained
    id_dropout: float = 0.1  # share of items that lose their id in a step, so that text must work
    request_time_share: float = 0.75  # of windows that see their targets' times, as a service does
    item_rows_share: float = 0.25  # of windows whose older rows have no state, as in long histories
    ema_decay: float = 0.998  # of the exponential moving average of the weights, which is served
    sampled_negatives: int = 4_096  # for catalogues beyond `full_softmax_items`
    full_softmax_items: int = 5_000
    asked_epochs: int | None = None  # of all stages together; None: each stage has its own number

    @property
    def total_epochs(self) -> int:
        """Number of epochs of all stages together, if none stops early."""
        return self.asked_epochs or self.epochs + self.attention_epochs + self.final_epochs

    def divided(self, *, has_final: bool) -> TrainConfig:
        """Return the hyperparameters with the epochs that were asked divided among the stages.

        The later stages have no more than their own numbers, and a third of all at most.
        """
        if self.asked_epochs is None:
            return self if has_final else replace(self, final_epochs=0)
        most = self.asked_epochs // 3
        attention = min(self.attention_epochs, most)
        final = min(self.final_epochs, most) if has_final else 0
        epochs = self.asked_epochs - attention - final
        return replace(self, epochs=epochs, attention_epochs=attention, final_epochs=final)

    def for_next_basket(self) -> TrainConfig:
        """Return the hyperparameters for a next-basket model.

        The targets of one basket share one prediction, so a batch of the same size has fewer:
        batches are smaller, and with more steps an epoch half of the epochs suffice. After the best
        epoch the NDCG falls, and one epoch of the attention is as good as two.
        """
        return replace(
            self,
            epochs=max(1, self.epochs // 2),
            attention_epochs=min(1, self.attention_epochs),
            patience=min(2, self.patience),
            validate_every=1,
            batch_tokens=self.basket_batch_tokens,
        )
