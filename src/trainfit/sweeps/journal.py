"""The journal of a sweep: its records, one a line, each on the disk before the next trial starts.

``FOLDER/records.jsonl`` (Records), ``FOLDER/logs/`` (what failed trials printed), ``FOLDER/report.html``.
One sweep at a time writes to a folder. A line that a killed sweep left half-written is moved to
``records.torn``; a damaged record is refused.
"""

import re
from pathlib import Path
from typing import Any

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.files import Appender, write_text
from trainfit.spec.provenance import from_line, ids_of_today, lines_of, new_record, to_line
from trainfit.spec.result import Outcome, Record
from trainfit.spec.sweep import RESULTS
from trainfit.sweeps.parts import PartRequest, PartResult

RECORDS, LOGS, REPORT = "records.jsonl", "logs", "report.html"
MAX_RECORDS_BYTES = 10**9
SWEEP_TAG, VARIANT_TAG = "sweep:", "variant:"


class Journal:
    """The open journal of a sweep, held by one process at a time.

    Args:
        out: the sweep's folder, made if it is missing; or a file NAME.jsonl, to which records are appended.
        sweep: the sweep's name.
        tags: added to each record.
    """

    def __init__(self, out: Path, sweep: str, tags: tuple[str, ...] = ()):
        self.is_file = out.suffix == ".jsonl"
        self.folder = out.parent if self.is_file else out
        self.path = out if self.is_file else out / RECORDS
        self._tags = (*tags, f"{SWEEP_TAG}{sweep}")
        self._file: Appender | None = None
        self.notes: tuple[str, ...] = ()  # Lines for the user about existing records
        self._newest: dict[str, Record] = {}
        """By the request's id, which is made of the recipes' ids as they were written."""
        self._previous_ids: dict[str, str] = {}  # A recipe's id of today -> its id in older records
        self._measured: dict[str, Record] = {}
        """By recipe: results of measurements that ``trainfit measure`` or older programs recorded."""

    def __enter__(self) -> "Journal":
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError("is a file", "name a folder", field="out", value=str(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            files.open_regular(self.path, MAX_RECORDS_BYTES).close()
        self._file = Appender(self.path)
        try:
            self._file.lock(wait=False)
            self._read(self._file)
        except BlockingIOError:
            self._file.close()
            problem, remedy = "another sweep writes in this folder", "wait for it, or use another folder"
            raise InputError(problem, remedy, field="out", value=str(self.folder)) from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()

    def found(self, request: PartRequest) -> Record | None:
        """Return the newest record of the request, if there is one."""
        found = self._newest.get(request.id) or self._newest.get(request.id_with(self._previous_ids))
        if found is None and request.part == "measure" and (found := self._measured.get(request.recipe.id)):
            assert found.measurement is not None, "only measurements are noted"
            outcome = Outcome(status=found.measurement.status, request_id=request.id)
            found = found.model_copy(update={"outcome": outcome})
        return found

    def append(self, request: PartRequest, result: PartResult) -> Record:
        """Record the result of a part; once this returns it is on the disk."""
        assert self._file is not None, "the journal is open"
        record = new_record(
            request.part, request.recipe,
            estimate=result.estimate, measurement=result.measurement, train=result.train,
            outcome=result.outcome, planned=result.planned.content() if result.planned else None,
            tags=(*self._tags, f"{VARIANT_TAG}{request.variant}"),
        )  # fmt: skip
        self._file.append(to_line(record).encode() + b"\n", sync=True)
        self._newest[request.id] = record
        if result.output and not self.is_file:
            self._log(request, result.output)
        return record

    def _read(self, file: Appender) -> None:
        content = file.read()
        whole, end, torn = content.rpartition(b"\n")
        records = [from_line(line, where) for line, where in lines_of(file.path, whole + end)]
        if torn:
            self._move_torn(file, torn)
        for record in records:
            if record.previous_id is not None:
                today = ids_of_today(record.recipe, record.planned)
                self._previous_ids |= {now: before for before, now in today.items()}
            if record.outcome is not None:
                self._newest[record.outcome.request_id] = record
            elif record.measurement and record.measurement.status in RESULTS:
                self._measured[record.recipe_id] = record

    def _move_torn(self, file: Appender, torn: bytes) -> None:
        """Move the beginning of a record that a killed sweep left; that part was not done, and runs again."""
        kept = file.path.with_suffix(".torn")
        with Appender(kept) as other:
            other.append(torn + b"\n", sync=True)
        file.cut(len(file.read()) - len(torn))
        moved = f"it is moved to {kept.name}, and its part runs again"
        self.notes = (f"{file.path}: the last line was cut off, as by a killed sweep; {moved}",)

    def _log(self, request: PartRequest, output: str) -> None:
        (logs := self.folder / LOGS).mkdir(exist_ok=True)
        safe = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", request.variant)
        write_text(logs / f"{safe}-{request.recipe.id[:8]}-{request.part}.txt", output)
