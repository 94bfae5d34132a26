"""The command line: fast without torch, one line for a mistake, the exit codes of sysexits."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import counted_calls
from trainfit.cli.main import guarded, main
from trainfit.spec.errors import InputError

Captured = pytest.CaptureFixture[str]
PINS = dict(
    line.split("==")
    for line in (Path(__file__).parents[2] / "requirements" / "constraints.txt").read_text().splitlines()
    if "==" in line
)
PINNED = all(version(name) == PINS[name] for name in ("pydantic", "typer", "rich", "jinja2"))
MAIN = "import sys; from trainfit.cli.main import main; sys.exit(main())"


def trainfit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "most_calls"),
    [
        ("import trainfit", 5_000),
        ("from trainfit.cli.main import main; main(['--help'])", 226_000),
        ("from trainfit.cli.main import main; main(['gpus'])", 680_000),
        ("from trainfit.cli.main import main; main(['predict', 'gpt2', '--set', 'batch.micro=0'])", 510_000),
    ],
)
def test_fast_and_without_torch(code: str, most_calls: int, tmp_path: Path) -> None:
    """Bounds a tenth above what it takes, with the pinned packages; 430,000 calls are 0.4 to 0.55 s."""
    heavy = "{'torch', 'transformers', 'numpy', 'matplotlib'} & set(__import__('sys').modules)"
    done = subprocess.run(
        counted_calls.command(f"{code}\nprint('heavy:', {heavy} or 'none')", tmp_path / "calls"),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "heavy: none"
    if PINNED:
        assert int((tmp_path / "calls").read_text()) < most_calls


def test_help_lists_every_verb(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    words = capsys.readouterr().out.split()
    for verb in ("predict", "measure", "train", "report", "records", "mfu", "gpus", "models"):
        assert verb in words
    assert main([]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {config: gpt2}\nseed: 1\nseed: 1", "duplicate key 'seed'"),
        ("model: {config: gpt3}", "model.config = 'gpt3': no model of that name; did you mean"),
        (
            "model: {config: gpt2}\nhardware: {gpu: h2000}",
            "hardware.gpu = 'h2000': no accelerator of that name",
        ),
        ("extends: r.yaml", "break the cycle r.yaml -> r.yaml"),
    ],
)
def test_bad_recipe_is_65_and_one_line(text: str, says: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert main(["predict", str(path)]) == 65
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("trainfit: error: ")
    assert says in line


def test_bad_words_are_65_and_one_line(capsys: Captured, tmp_path: Path) -> None:
    assert main(["predict", "gpt2", "--set", "batch.micro=4 GiB"]) == 65
    out, err = capsys.readouterr()
    remedy = "should be a whole number; write the number alone, without a unit"
    assert (out, err) == ("", f"trainfit: error: --set: batch.micro = '4 GiB': {remedy}\n")
    assert main(["predict", "llama-3.1-8x"]) == 65
    assert "did you mean llama-3.1-8b" in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "nope.yaml")]) == 74
    found = capsys.readouterr().err
    assert found == f"trainfit: error: {tmp_path}/nope.yaml: No such file or directory\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nope", "No such command 'nope'; see trainfit --help"),
        ("predict", "Missing argument 'RECIPE'; see trainfit predict --help"),
        ("predict gpt2 --nope", "see trainfit predict --help"),
        ("measure gpt2 --steps -1", "see trainfit measure --help"),
        ("records", "Missing command; see trainfit records --help"),
        ("predict tiny-cpu --batch-size 3", "here it is --batch"),
        ("predict tiny-cpu --gradient-checkpointing 3", "recompute: full"),
        ("export run out --dtype int8", "'--dtype': 'int8' is not one of"),
    ],
)
def test_wrong_usage_is_2(arguments: str, says: str, capsys: Captured) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert says in line


def raises(error: BaseException) -> Callable[[], object]:
    def run() -> object:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (lambda: None, 0),
        (lambda: 75, 75),
        (raises(InputError("bad", "mend it")), 65),
        (raises(OSError(28, "No space left on device", "x")), 74),
        (raises(KeyboardInterrupt()), 130),
        (raises(RuntimeError("odd")), 70),
        (raises(ValueError("odd")), 70),
    ],
)
def test_exit_codes(run: Callable[[], object], code: int, capsys: Captured) -> None:
    assert guarded(run) == code
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (code == 70)
    assert ("a bug in trainfit" in err) == (code == 70)


def test_a_process_prints_its_version_and_an_ascii_terminal_gets_question_marks(capsys: Captured) -> None:
    words = ["predict", "tiny-cpu", "--set", "batch.seq=16"]
    assert main(["--version"]) == main(words) == 0  # The other process finds its ledger in the cache.
    out = capsys.readouterr().out
    assert out.startswith("trainfit 0.2.0\n")
    assert "parameters · recipe" in out
    done = trainfit(*words, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "parameters ? recipe" in done.stdout  # a middle dot in UTF-8
    assert "####" in done.stdout


def test_reader_that_leaves(tmp_path: Path) -> None:
    """``trainfit gpus | head -1``: no traceback."""
    done = subprocess.run(
        f"{sys.executable} -c '{MAIN}' models --json | head -c 10",
        shell=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""


def test_catalog_lists(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without a price that could be dated has a dash."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["gpus"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    row = {words[0]: words for line in lines if (words := line.split())}
    assert "989" in row["h200"]
    assert row["h20"][-2] == "-"
    assert main(["gpus", "h20"]) == 0
    out = capsys.readouterr().out
    assert "none that could be dated" in out
    assert "450 GB/s in one direction" in out  # NVLink 4: 900 GB/s in both (the data sheet)
    assert main(["models", "gpt2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["n_embd"] == 768


def test_text_is_only_text(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name, or torch's "[enforce fail at alloc_cpu.cpp:121]", is not read as a style."""
    from trainfit.report.console import console, notes

    monkeypatch.setenv("COLUMNS", "80")
    out = console()
    out.print("[/foo] [red]x :smile:", style="bold")
    notes(out, "Notes", ["[enforce fail at alloc_cpu.cpp:121] no memory"])
    text = capsys.readouterr().out
    assert "[/foo] [red]x :smile:" in text
    assert "[enforce fail at alloc_cpu.cpp:121] no memory" in text


def test_the_verbose_version_prints_the_state_of_the_libraries(capsys: Captured) -> None:
    assert main(["--version", "--verbose"]) == 0
    version, libraries, names, *_ = capsys.readouterr().out.splitlines()
    assert version.startswith("trainfit ")
    assert re.search(r", torch [^ ]+, transformers [^ ]+, ", libraries)
    assert re.fullmatch(r"private names of these libraries: \d+ entries, all as in .*", names)
    assert main(["-v"]) == 2
    assert "-v stands with --version" in capsys.readouterr().err
