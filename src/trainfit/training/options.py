"""Options of a training run: how many steps of a recipe, on which data, and what is saved. Free of torch."""

import errno
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainfit.spec.data import Data, Format
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import RANDOM
from trainfit.spec.schedule import DECAYING, ScheduleField, contradiction, warmup_of
from trainfit.spec.value import Count, FromPercent, PositiveInt, Value, disagreement

SYNTHETIC: Literal["stories"] = "stories"
MAX_SYNTHETIC = 2**24
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""Of files with a row for each document or conversation."""
TEXT_SUFFIXES = (".txt", ".md", ".text", *ROW_SUFFIXES)


class SyntheticData(Value):
    """Synthetic text from a small grammar (synthetic.py): no download, the same on every machine."""

    kind: Literal["stories"] = SYNTHETIC
    num_documents: PositiveInt = 4000
    seed: Count = 0


class TextData(Value):
    """A file of text, of JSON rows or of Parquet, or a folder of such files.

    ``separator`` ends a document of a text file. None: ``<|endoftext|>`` if the file has it; otherwise the
    file is cut at blank lines into documents of a few thousand characters. ``format`` and ``column``: as a
    recipe's.
    """

    kind: Literal["text"] = "text"
    path: str
    separator: str | None = None
    format: Format | None = None
    column: str | None = None
    max_documents: PositiveInt | None = None


class HubData(Value):
    """A Hugging Face dataset, read by the ``datasets`` library (extra ``datasets``)."""

    kind: Literal["hub"] = "hub"
    name: str
    config: str | None = None
    split: str = "train"
    column: str | None = None
    max_documents: PositiveInt | None = None
    format: Format | None = None


DataSpec = Annotated[SyntheticData | TextData | HubData, Field(discriminator="kind")]


class TrainOptions(Value):
    """Options of one training run. A resumed run may change only the fields in ``MAY_CHANGE``."""

    out: str  # Folder of the run, made if missing
    steps: PositiveInt = 100  # Optimizer steps of the whole run, counted from its first start
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the data, which replace ``steps``: the number of steps follows when the data is read."""
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: DataSpec = SyntheticData()
    eval_data: DataSpec | None = None
    """Held-out data of its own; None: a share of ``data``."""
    eval_fraction: Annotated[float, Field(ge=0, le=0.5), FromPercent] = 0.05
    """Share of documents held out, chosen by a hash of their text; 0: no evaluation."""
    tokenizer: str | None = None
    """A ``tokenizer.json``, a folder or a name on the Hub. None: a byte-level BPE is trained on the training
    documents."""
    chat_template: str | None = None
    """A Jinja file, or ``chatml``; None: the tokenizer's own."""
    eval_every: PositiveInt | None = None  # Steps between evaluations; None: only at the end
    eval_sequences: PositiveInt = 64  # Sequences per evaluation at most
    eval_batch: PositiveInt | None = None  # Sequences per forward of an evaluation; None: batch.micro
    save_every: PositiveInt | None = None
    """Steps between checkpoints; None: at the end, and when a signal stops the run."""
    save_last: bool = True  # Save after the last step
    keep: PositiveInt = 2  # Number of newest checkpoints kept
    keep_best: bool = False
    """Save after each evaluation that is the best so far, and keep that checkpoint in addition to the
    newest."""
    patience: PositiveInt | None = None
    """Number of evaluations in a row without an improvement after which the run ends."""
    schedule: ScheduleField = "constant"
    warmup_steps: Count = 0
    warmup_ratio: Annotated[float, Field(ge=0, lt=1), FromPercent] = 0.0  # Share of the steps, rounded up
    min_lr_share: Annotated[float, Field(ge=0, le=1), FromPercent] | None = None
    """Share of the rate at the end of a decay; None: the schedule's own (spec/schedule.py)."""
    decay_steps: PositiveInt | None = None
    """Steps of the decay of ``warmup_stable_decay``; None: a tenth of the steps."""
    lr_power: Annotated[float, Field(gt=0)] = 1.0  # Exponent of ``polynomial``
    deterministic: bool = True
    """On CUDA, use kernels that repeat bit by bit, as a bit-identical resume requires."""
    tensorboard: bool = True
    hang_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time without progress after which a run on several ranks ends, and names the rank that is behind."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> "TrainOptions":
        # With epochs the number of steps is known once the data is read.
        found = contradiction(self, self.steps if self.epochs is None else MANY_STEPS)
        if found is not None:
            raise disagreement(found[1], found[2], field=found[0])
        if self.patience is not None and self.eval_every is None:
            problem = "patience needs evaluations during the run"
            raise disagreement(problem, "set eval_every", field="patience")
        if (self.keep_best or self.patience) and not self.evaluates:
            problem, remedy = (
                "no data is held out, so no evaluation can be the best",
                "raise eval_fraction, or give eval_data",
            )
            raise disagreement(problem, remedy, field="keep_best" if self.keep_best else "patience")
        return self

    @property
    def evaluates(self) -> bool:
        """Whether some data is held out."""
        return self.eval_fraction > 0 or self.eval_data is not None

    @property
    def held_out_share(self) -> float:
        """The share of ``data`` that is held out."""
        return 0.0 if self.eval_data is not None else self.eval_fraction

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return warmup_of(self.steps, self.warmup_steps, self.warmup_ratio)

    @property
    def depends_on_steps(self) -> bool:
        """Whether the learning rate of a step depends on the number of steps."""
        return self.schedule in DECAYING or self.warmup_ratio > 0

    def over(self, steps: int) -> "TrainOptions":
        """Return the options of a run of ``steps`` steps.

        Raises:
            InputError: the schedule does not fit them.
        """
        if (found := contradiction(self, steps)) is not None:
            raise InputError(found[1], found[2], field=found[0], value=getattr(self, found[0]))
        return self.model_copy(update={"steps": steps})

    @property
    def folder(self) -> Path:
        return Path(self.out)


MANY_STEPS = 2**24
MAY_CHANGE = (
    "out", "steps", "epochs", "resume", "device", "eval_every", "eval_sequences", "eval_batch", "save_every",
    "save_last", "keep", "keep_best", "patience", "tensorboard", "hang_timeout_s",
)  # fmt: skip
"""Fields that a resumed run may change: none has influence on the losses, but for ``steps`` under a schedule
that decays, of which the run prints a note."""


def is_there(path: Path) -> bool:
    """Return whether the path exists; a name that is too long for the file system does not."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def data_from(text: str, field: str = "data") -> SyntheticData | TextData | HubData:
    """Parse ``--data``: ``SYNTHETIC``, alone or with a count of documents, ``hub:NAME`` or a path."""
    kind, colon, rest = text.partition(":")
    if "\0" in text or not text.strip():
        problem, remedy = "not a path", "name a text file or a folder"
    elif is_there(Path(text)) and not text.startswith("hub:"):
        return TextData(path=text)
    elif kind == SYNTHETIC:
        if not colon:
            return SyntheticData()
        if rest.isascii() and rest.isdigit() and 0 < int(rest[:20]) <= MAX_SYNTHETIC:
            return SyntheticData(num_documents=int(rest))
        problem, remedy = (
            "not a number of documents",
            f"write such as {kind}:5000, at most {kind}:{MAX_SYNTHETIC}",
        )
    elif kind == "hub" and colon:
        if rest:
            return HubData(name=rest)
        problem, remedy = "no dataset named", "write such as hub:roneneldan/TinyStories"
    else:
        problem, remedy = "no such file or folder", f"name a text file, a folder, '{SYNTHETIC}' or 'hub:NAME'"
    raise InputError(problem, remedy, field=field, value=text)


def train_options(data: str | None, section: Data, *, weights: str = RANDOM, **fields: Any) -> TrainOptions:
    """Return a run's options, checked.

    Args:
        data: as the command line writes it, in place of the section's ``train``.
        section: the recipe's ``data``, for what is not given.
        weights: the recipe's ``model.weights``, whose tokenizer is taken where none is given.
        fields: of TrainOptions; None: the section's, or the default.

    Raises:
        InputError: options that contradict each other, or no such data.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if "steps" in given and "epochs" in given:
        raise InputError("steps and epochs both set the run's length", "keep one of them", field="epochs")
    more: dict[str, Any] = {"eval_fraction": section.eval_share, "chat_template": section.chat_template}
    if "tokenizer" not in given:
        more["tokenizer"] = section.tokenizer or _tokenizer_of(weights)
    return parse(TrainOptions, {**more, **sources(section, data), **given})


def _tokenizer_of(weights: str) -> str | None:
    """Return the folder or the name of the tokenizer that weights were trained with; None: none is known."""
    if weights == RANDOM:
        return None
    from trainfit.models.weights.folder import located

    path = located(weights, fetch=False)
    if path is None:  # On the Hub, not in this machine's cache.
        return weights.partition("@")[0]
    files = ("tokenizer.json", "tokenizer_config.json")
    return str(path) if any((path / name).is_file() for name in files) else None


def sources(data: Data, train: str | None = None) -> dict[str, Any]:
    """Return ``data`` and ``eval_data`` of the options, for a recipe's data section.

    Args:
        train: ``--data``, in place of the section's ``train``.
    """
    field = "data" if train is not None else "data.train"
    found = _with(data_from(train or data.train or SYNTHETIC, field), data, data.split)
    held_out = None
    if data.eval is not None:
        held_out = _with(data_from(data.eval, "data.eval"), data, data.split)
    elif data.eval_split is not None:
        if not isinstance(found, HubData):
            problem, remedy = "only a dataset of the Hub has splits", "name held-out data by data.eval"
            raise InputError(problem, remedy, field="data.eval_split", value=data.eval_split)
        held_out = found.model_copy(update={"split": data.eval_split})
    return {"data": found.model_dump(), "eval_data": held_out and held_out.model_dump()}


def _with(source: SyntheticData | TextData | HubData, data: Data, split: str) -> Any:
    """Return a source with the fields of a recipe's data section that concern it."""
    format = None if data.format == "auto" else data.format
    common = {"format": format, "column": data.column, "max_documents": data.max_documents}
    if isinstance(source, HubData):
        return source.model_copy(update={**common, "config": data.subset, "split": split})
    if isinstance(source, TextData):
        return source.model_copy(update={**common, "separator": data.separator})
    return source
