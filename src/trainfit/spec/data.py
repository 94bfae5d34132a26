"""The data section of a recipe: what is trained on, and how it becomes sequences."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainfit.spec.value import FromPercent, PositiveInt, Value, disagreement

Format = Literal["auto", "text", "jsonl", "parquet", "chat"]
"""``auto``: by the file's suffix and the columns of its first row. ``chat``: rows that hold conversations."""
Pack = Literal[True, "documents", False]
"""True: documents follow each other without padding, and attention crosses their ends. ``documents``: several
whole documents a sequence, and none attends to another. False: one document a sequence, cut or padded."""


class Data(Value):
    """Data of a run. Only ``pack`` changes the step; the other fields change which tokens it sees.

    Attributes:
        train: a file, a folder, ``hub:NAME`` or ``stories[:N]``; None: ``stories``.
        eval: held-out data of its own, written as ``train``; None: a share of ``train``.
        eval_share: share of the documents of ``train`` that is held out, by a hash of their content.
        column: the column of text or messages; None: found by its name.
        tokenizer: a tokenizer.json, a folder or a name on the Hub; None: one is trained.
        chat_template: a Jinja file, or ``chatml``; None: the tokenizer's own.
        answers_only: of conversations and of prompts with completions, only answers count in the loss.
        separator: what ends a document in a text file.
        split, eval_split, subset, max_documents: of a dataset of the Hub.
    """

    train: str | None = None
    eval: str | None = None
    eval_share: Annotated[float, Field(ge=0, le=0.5), FromPercent] = 0.05
    format: Format = "auto"
    column: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    answers_only: bool = True
    pack: Pack = True
    separator: Annotated[str, Field(min_length=1)] | None = None
    split: str = "train"
    eval_split: str | None = None
    subset: str | None = None
    max_documents: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_evaluation(self) -> Self:
        if self.eval is not None and self.eval_split is not None:
            remedy = "leave one of them out"
            raise disagreement("data.eval and data.eval_split both name it", remedy, field="data.eval_split")
        return self
