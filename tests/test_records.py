"""Records survive writers that are killed, and refuse files that are not theirs."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainfit import records
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import commit, new_record
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Record


def record(index: int = 0, kind: str = "train", gpu: str = "h200", model: str = "gpt2") -> Record:
    recipe = parse(Recipe, {"model": {"config": model}, "hardware": {"gpu": gpu}, "seed": index})
    return new_record(kind, recipe, train={"steps": index})  # type: ignore[arg-type]


def test_what_goes_in_comes_out_in_order(tmp_path: Path):
    path = tmp_path / "r.sqlite"
    kinds = ["train", "predict", "measure", "train"]
    written = [record(index, kind, gpu="h200" if index % 2 else "a100") for index, kind in enumerate(kinds)]
    for one in written:
        records.append(path, one)
    assert records.read(path) == written
    assert records.read(path, "train") == [written[0], written[3]]
    assert records.read(path, "measure") == [one for one in written if one.kind == "measure"]


def test_rollback_journal_not_wal(tmp_path: Path):
    path = tmp_path / "r.sqlite"
    records.append(path, record())
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_export_and_import_are_the_same_records(tmp_path: Path):
    path, lines, again = tmp_path / "r.sqlite", tmp_path / "r.jsonl", tmp_path / "again.sqlite"
    written = [record(index) for index in range(3)]
    assert records.append_all(path, written) == 3
    assert records.export(path, lines) == 3
    assert records.import_jsonl(again, lines) == 3
    assert records.import_jsonl(again, lines) == 0  # nothing twice
    assert records.read(again) == records.load(path) == records.load(lines) == written


WRITER = """
import sys, trainfit.records as records
sys.path.insert(0, {tests!r})
from test_records import record
writer = int(sys.argv[1])
for index in range(int(sys.argv[2])):
    records.append({path!r}, record(writer * 100000 + index))
    print(index, flush=True)  # only now may the writer be believed
"""


@pytest.mark.processes
def test_five_writers_some_killed_lose_nothing(tmp_path: Path):
    path = tmp_path / "r.sqlite"
    script = WRITER.format(tests=str(Path(__file__).parent), path=str(path))
    environment = os.environ | {"TRAINFIT_COMMIT": "abc"}  # no git process for each record
    outs = [tmp_path / f"out{writer}" for writer in range(5)]
    writers = []
    for writer, out in enumerate(outs):
        count = "40" if writer >= 3 else "100000"  # three are killed long before they could end
        with open(out, "w") as file:
            writers.append(
                subprocess.Popen(
                    [sys.executable, "-c", script, str(writer), count], stdout=file, env=environment
                )
            )
    rng = random.Random(0)
    for victim in range(3):
        while len(outs[victim].read_text().splitlines()) < 3:
            assert writers[victim].poll() is None
            time.sleep(0.01)
        time.sleep(rng.random() / 2)
        writers[victim].send_signal(signal.SIGKILL)
    codes = [process.wait(timeout=200) for process in writers]
    assert codes == [-signal.SIGKILL] * 3 + [0] * 2

    found = records.read(path)
    seeds = [one.recipe["seed"] for one in found]
    assert len(seeds) == len(set(seeds))
    for writer, out in enumerate(outs):
        announced = [int(line) for line in out.read_text().splitlines()]
        assert {writer * 100000 + index for index in announced} <= set(seeds)
        # A killed writer may have stored one more than it could say.
        stored = sum(seed // 100000 == writer for seed in seeds)
        assert len(announced) <= stored <= len(announced) + 1
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    records.append(path, record(999))
    assert len(records.read(path)) == len(found) + 1


def test_a_file_made_while_it_is_looked_at_is_no_foreign_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another writer makes the file between two of the looks at what it is."""
    path = tmp_path / "r.sqlite"
    other = threading.Thread(target=lambda: records.append(path, record(1)))
    plain = sqlite3.connect

    def watched(*args: Any, **settings: Any) -> sqlite3.Connection:
        database = plain(*args, **settings)

        def look(statement: str) -> None:
            if statement.startswith("PRAGMA user_version") and not other.ident:
                monkeypatch.setattr(sqlite3, "connect", plain)
                other.start()
                other.join(1.0)

        database.set_trace_callback(look)
        return database

    monkeypatch.setattr(sqlite3, "connect", watched)
    records.append(path, record(2))
    other.join()
    assert {one.recipe["seed"] for one in records.read(path)} == {1, 2}


def test_foreign_and_damaged_files_are_refused(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database at all, only text " * 100)
    with pytest.raises(InputError, match="not an SQLite file"):
        records.append(text, record())
    assert text.read_text().startswith("not a database")

    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE other (x)")
    for attempt in (lambda: records.append(foreign, record()), lambda: records.read(foreign)):
        with pytest.raises(InputError, match="not one of records"):
            attempt()

    damaged = tmp_path / "damaged.sqlite"
    records.append_all(damaged, [record(index) for index in range(200)])
    content = bytearray(damaged.read_bytes())
    content[4096 : len(content)] = os.urandom(len(content) - 4096)
    damaged.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        records.read(damaged)


def test_a_newer_version_is_refused(tmp_path: Path):
    path = tmp_path / "r.sqlite"
    records.append(path, record())
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(InputError, match="version 2"):
        records.read(path)


def test_missing_empty_and_unwritable(tmp_path: Path):
    with pytest.raises(InputError, match="no such record file"):
        records.read(tmp_path / "none.sqlite")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="holds no records"):
        records.read(tmp_path / "empty")
    with pytest.raises(OSError, match="unable to open"):
        records.append(tmp_path / "no" / "folder.sqlite", record())


def test_a_wrong_line_names_its_place(tmp_path: Path):
    lines = tmp_path / "r.jsonl"
    lines.write_text(record().model_dump_json() + '\n{"kind": "predict"}\n')
    with pytest.raises(InputError, match=r"r\.jsonl:2"):
        records.read_jsonl(lines)
    lines.write_text("{\n")
    with pytest.raises(InputError, match=r"r\.jsonl:1.*not JSON"):
        records.import_jsonl(tmp_path / "r.sqlite", lines)


def test_a_text_that_looks_like_sql_is_only_text(tmp_path: Path):
    path = tmp_path / "r.sqlite"
    name = "x'); DROP TABLE records; --"
    recipe = parse(Recipe, {"model": {"config": {"model_type": "llama"}, "name": name}})
    records.append(path, new_record("train", recipe, train={}))
    assert records.read(path, name) == []
    assert [one.recipe["model"]["name"] for one in records.read(path)] == [name]


def test_commit_is_this_checkouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("TRAINFIT_COMMIT", raising=False)
    head = subprocess.run(
        ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if head.returncode:
        pytest.skip("not a git checkout")
    assert (commit() or "").removesuffix("-dirty") == head.stdout.strip()
    # A package that lies in no repository has no commit.
    copy = tmp_path / "trainfit" / "__init__.py"
    copy.parent.mkdir()
    copy.write_text("")
    monkeypatch.setattr("trainfit.__file__", str(copy))
    assert commit() is None


def test_evidence_is_never_written_over(tmp_path: Path):
    file = tmp_path / "records.sqlite"
    records.append(file, record())
    before = file.read_bytes()
    with pytest.raises(InputError, match="is an SQLite file, which would be lost; name another file"):
        records.export(file, file)
    assert file.read_bytes() == before
    out = tmp_path / "out.jsonl"
    assert records.export(file, out) == records.export(file, out) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "records.sqlite"]
    with pytest.raises(FileNotFoundError, match="missing/out"):
        records.export(file, tmp_path / "missing" / "out.jsonl")


def test_whether_a_record_can_be_kept_is_known_before_the_work(tmp_path: Path):
    file = tmp_path / "records.sqlite"
    records.check_can_append(file)
    assert not file.exists()
    file.touch()
    records.check_can_append(file)  # append makes a record file of an empty one
    records.append(file, record())
    records.check_can_append(file)
    (tmp_path / "text").write_text("no record file at all")
    with pytest.raises(InputError, match="not an SQLite file"):
        records.check_can_append(tmp_path / "text")
    with pytest.raises(InputError, match="is not a file"):
        records.check_can_append(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        records.check_can_append(tmp_path / "nowhere" / "records.sqlite")
