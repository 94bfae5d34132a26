"""Control characters of names, paths, records and errors reach no terminal: they are shown escaped."""

import ast
import io
import json
import logging
import unicodedata
import warnings
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from trainfit.cli.main import guarded, main, plain_messages
from trainfit.cli.options import print_json
from trainfit.report.console import heading, notes, rows
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import JOINERS, printable, say
from trainfit.spec.terminal import Terminal

Captured = pytest.CaptureFixture[str]
SOURCE = Path(__file__).parents[2] / "src" / "trainfit"
HOSTILE = "a\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\x08\r\u202eevil\u2066\u200b\u2028\ufeff[red]x[/red]"
SHOWN = r"a\x1b[31mred\x1b]0;title\x07\x9b2J\x7f\x08\x0d\u202eevil\u2066\u200b\u2028\ufeff[red]x[/red]"


PRINTING = ("print", "typer.echo", "Console", "traceback.print_exception", "sys.stderr.write")


def raw(text: str) -> set[str]:
    """Characters that a terminal acts on."""
    kept = "\n\t" + JOINERS
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in kept}


def test_every_control_character_is_escaped_and_every_other_kept() -> None:
    assert printable(HOSTILE) == SHOWN
    every = "".join(map(chr, range(0x110000)))
    shown = printable(every)
    assert raw(shown) == set()
    assert "\n" not in shown
    assert printable("a\n\tb", lines=True) == "a\n\tb"
    assert printable("a\nb") == r"a\x0ab"
    plain = "Modèle 模型 नमस्ते می\u200cخواهم 🤦🏽\u200d♂️ █▎·"
    assert printable(plain) == plain


def test_nothing_that_is_printed_by_a_console_is_raw() -> None:
    out = Terminal(file=io.StringIO(), width=60, force_terminal=True, color_system="truecolor")
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_column(Text(HOSTILE, style="bold"))
    table.add_row(HOSTILE, Text(HOSTILE))
    out.print(table)
    out.print(HOSTILE, style="bold red")
    heading(out, HOSTILE)
    notes(out, HOSTILE, [HOSTILE])
    rows(out, [[HOSTILE, Text(HOSTILE)]], "left", "wrap")
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1" in text, "styles of our own are there"
    without_styles = "".join(part.partition("m")[2] for part in ("m" + text).split("\x1b["))
    assert raw(without_styles) == set()
    assert "[31mred" in text, "shown, not acted on"
    assert "[red]x" in text.replace("\n", "")


def test_a_live_progress_bar_shows_a_hostile_name_escaped(tmp_path: Path) -> None:
    from tiny_training import options_for, tiny
    from trainfit.training.loop import train
    from trainfit.training.progress import ProgressBar

    out = Terminal(file=io.StringIO(), width=300, force_terminal=True)
    named = tiny().model_copy(update={"model": tiny().model.model_copy(update={"name": HOSTILE})})
    train(named, options_for(tmp_path / "r\x1b[2Jn", 2), observers=[ProgressBar(out)])
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert r"a\x1b[31mred" in text
    assert r"saved " in text
    assert "\x1b[2J" not in text
    assert "\x1b[31mred" not in text
    assert "\u202e" not in text


def test_an_error_is_one_line_without_control_characters(capsys: Captured, tmp_path: Path) -> None:
    for error, code in (
        (InputError(HOSTILE, HOSTILE, field=HOSTILE, value=HOSTILE, file=HOSTILE), 65),
        (OSError(28, "full", f"/x/{HOSTILE}\n{HOSTILE}"), 74),
        (RuntimeError(f"{HOSTILE}\n{HOSTILE}"), 70),
    ):
        assert guarded(lambda error=error: (_ for _ in ()).throw(error)) == code
        out, err = capsys.readouterr()
        assert (out, raw(err)) == ("", set())
        assert len(err.splitlines()) == 1 or code == 70
    assert main(["predict", f"{tmp_path}/{HOSTILE}.yaml"]) in (65, 74)
    assert main([HOSTILE]) == 2
    assert main(["gpus", HOSTILE]) == 65
    _, err = capsys.readouterr()
    assert raw(err) == set()
    assert len(err.splitlines()) == 3


def test_a_hostile_recipe_and_record_are_shown_escaped(capsys: Captured, tmp_path: Path) -> None:
    recipe = tmp_path / "re\x1b[2Jcipe.yaml"
    content = recipe_from({"model": {"config": "gpt2", "name": HOSTILE}}, []).content()
    content["hardware"]["gpu"] = "cpu"
    content["batch"] = {"micro": 1, "seq": 16}
    recipe.write_text(json.dumps(content))
    record = str(tmp_path / "r\x1b]0;x\x07.sqlite")
    assert main(["predict", str(recipe), "--record", record]) == 0
    assert main(["predict", str(recipe), "--json"]) == 0
    assert main(["records", "list", record]) == 0
    assert main(["records", "list", record, "--json"]) == 0
    assert main(["records", "export", record, str(tmp_path / "o\x1b[2J.jsonl")]) == 0
    assert main(["report", record, "--markdown"]) == 0
    assert main(["report", record]) == 0
    out, err = capsys.readouterr()
    assert (raw(out), raw(err)) == (set(), set())
    assert r"\x1b[31mred" in out


def test_json_is_ascii_without_control_characters_and_reads_back(capsys: Captured) -> None:
    print_json({"name": HOSTILE})
    out = capsys.readouterr().out
    assert raw(out) == set()
    assert out.isascii()
    assert json.loads(out) == {"name": HOSTILE}


def test_warnings_and_log_lines_of_libraries_are_escaped() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("test_printable")
    logger.addHandler(handler := logging.StreamHandler(stream))
    with plain_messages():
        logger.warning("type %s of %d", HOSTILE, 3)
        text = warnings.formatwarning(HOSTILE, UserWarning, "f", 1)
    logger.removeHandler(handler)
    assert stream.getvalue() == f"type {SHOWN} of 3\n"
    assert raw(text) == set()


def test_say_keeps_lines(capsys: Captured) -> None:
    say(f"one\n{HOSTILE}", err=True)
    assert capsys.readouterr().err == f"one\n{SHOWN}\n"


def test_nothing_prints_past_the_boundary() -> None:
    """Every terminal text goes through ``say`` or ``Terminal``.

    What is listed here is a child process's protocol.
    """
    allowed = {"spec/printable.py", "spec/terminal.py", "cli/entry.py"}
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in PRINTING:
                    found.add(str(path.relative_to(SOURCE)))
    assert found <= allowed
