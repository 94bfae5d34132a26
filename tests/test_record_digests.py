"""Records carry digests: a changed one is refused, and nothing is appended to a damaged file."""

import json
import sqlite3
from pathlib import Path

import pytest

from test_records import record
from tiny_sweep import BASE, sweep_of
from trainfit import records
from trainfit.cli.main import main
from trainfit.spec.errors import InputError
from trainfit.spec.provenance import DIGEST, digest_of, from_line, to_line
from trainfit.sweeps.journal import RECORDS, Journal

ROOT = Path(__file__).parents[1]


def test_a_line_has_the_digest_of_its_content_whatever_its_order() -> None:
    one = record(3)
    data = json.loads(to_line(one))
    assert data["digest"] == digest_of(data)
    assert len(data["digest"]) == 64
    assert from_line(to_line(one), "x") == one
    turned = json.dumps(dict(reversed(data.items())), indent=1).replace("\n", " ")
    assert from_line(turned, "x") == one
    assert DIGEST in json.loads(to_line(one))
    assert DIGEST not in json.loads(one.model_dump_json())
    assert from_line(one.model_dump_json(), "x") == one, "written before there were digests"


@pytest.mark.parametrize(
    ("before", "after"), [('"steps":3', '"steps":4'), ('"h200"', '"h100"'), ('"tags":[]', '"tags":["x"]')]
)
def test_a_changed_line_is_refused_with_its_place(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    lines = [to_line(record(index)) for index in range(5)]
    assert before in lines[3]
    lines[3] = lines[3].replace(before, after)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        InputError, match=r"r\.jsonl:4: the content is not what was written .*SHA-256.*recover"
    ):
        records.read_jsonl(path)
    with pytest.raises(InputError, match=r"r\.jsonl:4"):
        records.import_jsonl(tmp_path / "r.sqlite", path)
    with pytest.raises(InputError, match=r"r\.jsonl:4"), Journal(path, "sweep"):
        pass


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET payload = replace(payload, '\"steps\":3', '\"steps\":4') WHERE number = 3",
        "UPDATE records SET gpu = 'l4' WHERE number = 3",
        "UPDATE records SET created_at = '2001' WHERE number = 3",
        "UPDATE records SET payload = 'not json' WHERE number = 3",
        "UPDATE records SET payload = x'00ff' WHERE number = 3",
    ],
)
def test_a_changed_row_is_refused_when_read_and_before_work_begins(change: str, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    records.append_all(path, [record(index) for index in range(1, 5)])
    with sqlite3.connect(path) as database:
        assert database.execute(change).rowcount == 1
    before = path.read_bytes()
    for attempt in (lambda: records.read(path), lambda: records.check_can_append(path)):
        with pytest.raises(InputError, match=r"r\.sqlite, record 3"):
            attempt()
    assert main(["predict", "tiny-cpu", "--record", str(path)]) == 65
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "newest row"])
def test_nothing_is_appended_to_a_damaged_database(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    records.append_all(path, [record(index) for index in range(200)])
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "overwritten":
        path.write_bytes(content[:8192] + bytes(8192) + content[16384:])
    else:
        path.write_bytes(content.replace(b'"steps":199', b'"steps":198'))
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"recover FILE NEW\.jsonl") as refused:
        records.append(path, record(999))
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
def test_recover_writes_what_is_whole_and_names_what_is_not(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / f"r.{kind}", tmp_path / "new.jsonl"
    written = [record(index) for index in range(1, 5)]
    if kind == "sqlite":
        records.append_all(path, written)
        with sqlite3.connect(path) as database:
            database.execute("UPDATE records SET gpu = 'l4' WHERE number = 2")
            database.execute("DELETE FROM records WHERE number = 3")
    else:
        lines = [to_line(one) for one in written]
        path.write_text("\n".join([lines[0], lines[1].replace("h200", "l4"), lines[2][:50], lines[3]]) + "\n")
    before = path.read_bytes()
    assert main(["records", "recover", str(path), str(out)]) == 65
    printed = capsys.readouterr().err.splitlines()
    assert [line.startswith("lost: ") for line in printed] == [True, True, False]
    assert printed[-1] == f"2 records written to {out}, 2 lost"
    assert records.read_jsonl(out) == [written[0], written[3]]
    assert path.read_bytes() == before
    assert main(["records", "recover", str(path), str(out)]) == 65


def test_a_sweep_moves_a_torn_line_away_and_says_so_but_refuses_a_changed_one(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, BASE + "list: [{name: one}]\n")
    path = tmp_path / "out" / RECORDS
    path.parent.mkdir()
    lines = [to_line(record(index)) for index in (1, 2)]
    path.write_text(f"{lines[0]}\n{lines[1][:99]}")
    with Journal(path.parent, sweep.name) as journal:
        assert "its part runs again" in journal.notes[0]
    assert path.read_text() == f"{lines[0]}\n"
    assert (path.parent / "records.torn").read_text() == f"{lines[1][:99]}\n"
    path.write_text(lines[0].replace("h200", "h100") + "\n")
    with (
        pytest.raises(InputError, match=r"records\.jsonl:1: the content is not what was written"),
        Journal(path.parent, sweep.name),
    ):
        pass


def test_the_repositorys_records_have_digests_and_are_whole() -> None:
    files = [
        ROOT / "evidence" / "records" / name
        for name in ("bench.jsonl", "h200-measured.jsonl", "h200-predicted.jsonl")
    ]
    for file in files:
        found = file.read_text().splitlines()
        assert all(DIGEST in json.loads(line) for line in found), file
        assert len(records.read_jsonl(file)) == len(found)
