"""Size of a run's data: documents, tokens, sequences and steps of one pass over it. Free of torch."""

import math
from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.spec.value import Count, PositiveInt, Share, Value

if TYPE_CHECKING:
    from trainfit.training.corpus import Corpora


class RunData(Value):
    """Counts of the data that a recipe trains on."""

    documents: Count  # Documents, conversations or prompts
    tokens: Count
    labels: Count  # Tokens that count in the loss of an epoch
    sequences: Count  # Examples of ``each`` sequences, those without anything to learn left out
    seq: PositiveInt
    sequences_per_step: PositiveInt  # On all ranks
    padding: Share  # Of the sequences' tokens
    cut_tokens: Count  # Tokens that no sequence holds
    eval_documents: Count
    eval_tokens: Count
    eval_sequences: Count
    tokenizer_tokens: Count
    each: PositiveInt = 1  # Sequences of batch.seq tokens of an example: 2 of a pair of answers

    @classmethod
    def of(cls, recipe: Recipe, corpora: "Corpora") -> "RunData":
        """Return the counts of a recipe's data."""
        train, index = corpora.train, corpora.index
        held = len(train) * train.seq if train.is_plain else int(train.pieces.length.sum())
        each = train.each
        return cls(
            documents=index.train.documents // each,
            tokens=index.train.tokens,
            labels=train.epoch_labels,
            sequences=len(train),
            seq=train.seq,
            sequences_per_step=recipe.batch.micro * recipe.batch.accumulate * recipe.mesh.data_ranks,
            padding=max(0.0, train.padding),
            cut_tokens=index.train.tokens - held,
            eval_documents=index.eval.documents // each,
            eval_tokens=index.eval.tokens,
            eval_sequences=len(corpora.eval),
            tokenizer_tokens=index.tokenizer_tokens,
            each=each,
        )

    @property
    def epoch_steps(self) -> float:
        """Steps of one pass over the sequences."""
        return self.sequences / self.sequences_per_step

    @property
    def epoch_tokens(self) -> int:
        """Tokens that the device computes in one pass, padding included."""
        return self.sequences * self.seq * self.each

    def steps_of(self, epochs: float) -> int:
        """Return the steps of ``epochs`` passes, rounded up to a whole step."""
        return max(1, math.ceil(epochs * self.epoch_steps - 1e-9))
