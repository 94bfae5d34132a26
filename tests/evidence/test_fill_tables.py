"""The program that fills marked tables and figures, and that the committed pages are filled."""

from importlib.metadata import version
from pathlib import Path

import pytest

from evidence.scripts import fill_tables

CONSTRAINTS = Path(__file__).parents[2] / "requirements" / "constraints.txt"
TABLE = "<!-- table: fakes.rows name=x -->\n<!-- end -->\n"
FIGURE = '<!-- figure: fakes.drawing plots/a.svg "A drawing" -->\n<!-- end -->\n'


class Fakes:
    """Stands for a module of tables."""

    @staticmethod
    def rows(name: str = "none") -> str:
        return f"| {name} |\n| --- |\n"

    @staticmethod
    def drawing() -> str:
        return "<svg></svg>"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    real = fill_tables.importlib.import_module

    def load(name: str) -> object:
        return Fakes if name == "evidence.scripts.tables.fakes" else real(name)

    monkeypatch.setattr(fill_tables.importlib, "import_module", load)
    return tmp_path / "page.md"


def test_the_committed_pages_are_filled(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("peft")
    pytest.importorskip("torchao")
    fill_tables.main(["--check"])
    stale = capsys.readouterr().out.splitlines()
    if f"matplotlib=={version('matplotlib')}" not in CONSTRAINTS.read_text().split():
        stale = [line for line in stale if not line.endswith(".svg")]  # Another version draws other lines.
    assert stale == []


def test_tables_and_figures_are_written_between_the_markers(page: Path) -> None:
    page.write_text(f"Before.\n\n{TABLE}\nBetween.\n\n{FIGURE}\nAfter.\n")
    assert fill_tables.main([str(page)]) == 0
    text = page.read_text()
    assert "<!-- table: fakes.rows name=x -->\n\n| x |\n| --- |\n\n<!-- end -->" in text
    assert "![A drawing](plots/a.svg)" in text
    assert [part in text for part in ("Before.", "Between.", "After.")] == [True] * 3
    assert (page.parent / "plots/a.svg").read_text() == "<svg></svg>"


def test_filling_again_changes_nothing_and_check_names_what_is_stale(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(TABLE + FIGURE)
    assert fill_tables.main(["--check", str(page)]) == 1
    assert page.read_text() == TABLE + FIGURE
    assert not (page.parent / "plots").exists()
    assert capsys.readouterr().out.count("stale: ") == 2
    assert fill_tables.main([str(page)]) == 0
    filled = page.read_text()
    assert fill_tables.main(["--check", str(page)]) == 0
    assert fill_tables.main([str(page)]) == 0
    assert page.read_text() == filled
    page.write_text(filled.replace("| x |", "| edited |"))
    assert fill_tables.main(["--check", str(page)]) == 1
    (page.parent / "plots/a.svg").unlink()
    assert fill_tables.main(["--check", str(page)]) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- table: fakes.rows -->\nno end\n", "without <!-- end -->"),
        (f"<!-- table: fakes.rows -->\n{TABLE}", "without <!-- end -->"),
        ("<!-- table: fakes.nothing -->\n<!-- end -->\n", "fakes.nothing"),
        ("<!-- table: absent.rows -->\n<!-- end -->\n", "absent.rows"),
        ("<!-- table: rows -->\n<!-- end -->\n", "rows"),
        ("<!-- table: fakes.rows color=red -->\n<!-- end -->\n", "fakes.rows"),
        ("<!-- figure: fakes.drawing plots/a.svg -->\n<!-- end -->\n", "fakes.drawing"),
        ('<!-- figure: fakes.drawing plots/a.svg "A -->\n<!-- end -->\n', "fakes.drawing"),
    ],
)
def test_a_wrong_marker_is_named_and_nothing_is_written(text: str, words: str, page: Path) -> None:
    page.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        fill_tables.main([str(page)])
    assert str(page) in str(stopped.value)
    assert words in str(stopped.value)
    assert page.read_text() == text


def test_a_page_without_markers_is_left_alone(page: Path) -> None:
    page.write_text("Text with `<!-- table: x -->` in a line.\n")
    assert fill_tables.main([str(page)]) == 0
    assert page.read_text() == "Text with `<!-- table: x -->` in a line.\n"
