"""The book of a sweep: its records, one a line, each on the disk before the next trial's is. What resuming reads.

``FOLDER/records.jsonl`` (Records), ``FOLDER/logs/`` (what failed trials printed), ``FOLDER/report.html``.
One sweep at a time writes to a folder. A line that a killed sweep left half-written is cut off.
"""

import fcntl
import os
import re
from pathlib import Path
from types import TracebackType
from typing import IO

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.plain_data import parse_json
from trainfit.spec.provenance import new_record
from trainfit.spec.result import Record
from trainfit.spec.value import parse
from trainfit.sweep.parts import PartRequest, PartResult

RECORDS, LOGS, REPORT = "records.jsonl", "logs", "report.html"
MAX_RECORDS_BYTES = 10**9
SWEEP_TAG, VARIANT_TAG = "sweep:", "variant:"


class Book:
    """The open book of ``folder``, made if it is not there; held by one process at a time."""

    def __init__(self, folder: Path, sweep: str):
        self.folder = folder
        self._sweep = sweep
        self._file: IO[bytes] | None = None
        self._newest: dict[str, Record] = {}

    def __enter__(self) -> "Book":
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError("is a file", "name a folder", field="out", value=str(self.folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / RECORDS).exists():
            files.open_regular(self.folder / RECORDS, MAX_RECORDS_BYTES).close()
        self._file = (self.folder / RECORDS).open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(self._file)
        except BlockingIOError:
            self._file.close()
            remedy = "wait for it, or use another folder"
            raise InputError(
                "another sweep writes in this folder", remedy, field="out", value=str(self.folder)
            ) from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def found(self, request: PartRequest) -> Record | None:
        """The newest record of what is asked, if there is one."""
        return self._newest.get(request.id)

    def append(self, request: PartRequest, result: PartResult) -> Record:
        """Keep what came of a part; once this returns it is on the disk."""
        assert self._file is not None, "the book is open"
        record = new_record(
            request.part, request.recipe,
            estimate=result.estimate, measurement=result.measurement, train=result.train, outcome=result.outcome,
            tags=(f"{SWEEP_TAG}{self._sweep}", f"{VARIANT_TAG}{request.variant}"),
            planned=result.planned.content() if result.planned else None,
        )  # fmt: skip
        self._file.write(record.model_dump_json().encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._newest[request.id] = record
        if result.output:
            self._log(request, result.output)
        return record

    def _read(self, file: IO[bytes]) -> None:
        file.seek(0)
        text = file.read()
        whole, _, torn = text.rpartition(b"\n")
        if torn:
            file.truncate(len(text) - len(torn))
        path = self.folder / RECORDS
        for number, line in enumerate(whole.splitlines(), 1):
            if not line.strip():
                continue
            record = parse(Record, parse_json(line, f"{path}:{number}"), file=f"{path}:{number}")
            if record.outcome is not None:
                self._newest[record.outcome.request_id] = record

    def _log(self, request: PartRequest, output: str) -> None:
        logs = self.folder / LOGS
        logs.mkdir(exist_ok=True)
        safe = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", request.variant)
        (logs / f"{safe}-{request.recipe.id[:8]}-{request.part}.txt").write_text(output)
