"""The first minute: ``trainfit`` alone, the commands it shows, and the work before an answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfit.cli.main import main
from trainfit.cli.text import welcome

Captured = pytest.CaptureFixture[str]
COMMAND = "import sys; from trainfit.cli.entry import command; sys.exit(command())"
IMPORTS = "import torch; from transformers import LlamaForCausalLM"
SLOWER_AT_MOST = 3.0
"""Processor time of a first prediction of an 8B model over that of ``IMPORTS``; measured: docs/log.md."""


def test_trainfit_alone_shows_commands_and_asks_nothing(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert max(map(len, lines)) < 80
    assert len(lines) <= 16
    shown = [line.strip() for line in lines if line.startswith("  trainfit ")]
    assert shown == [command for command, _ in welcome.COMMANDS]
    assert len(shown) == 3


def test_trainfit_alone_imports_no_verb() -> None:
    """A module of a verb takes tens of milliseconds."""
    code = (
        "import sys; from trainfit.cli.main import main; code = main([])\n"
        "print({'torch', 'numpy', 'trainfit.cli.predict'} & set(sys.modules) or 'none', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "none\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command, _ in welcome.COMMANDS])
def test_a_command_to_begin_with_works(command: str, tmp_path: Path) -> None:
    program, *words = command.split()
    assert program == "trainfit"
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], cwd=tmp_path, stdin=subprocess.DEVNULL,
        env=os.environ | {"TRAINFIT_CACHE": str(tmp_path / "cache"), "COLUMNS": "80"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "llama-3.1-8b" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert (tmp_path / "plan.yaml").exists() == (words[0] == "plan")


def processor_s(arguments: list[str], cache: Path) -> float:
    """Return the user and system time of a new process of Python."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"TRAINFIT_CACHE": str(cache)},
    )  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0
    process.returncode = 0
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_a_first_prediction_takes_little_more_than_the_imports(tmp_path: Path) -> None:
    """Of an 8B model, with no ledger kept and no private name checked; the smaller of two each."""
    words = ["predict", "llama-3.1-8b"]
    imports = min(processor_s(["-c", IMPORTS], tmp_path) for _ in range(2))
    predictions = min(processor_s(["-c", COMMAND, *words], tmp_path / str(number)) for number in range(2))
    assert predictions < SLOWER_AT_MOST * imports
    assert len(list((tmp_path / "0").glob("*.json.gz"))) == 1  # It was traced.


NOT_NEEDED = {"matplotlib", "fastapi", "uvicorn", "tensorboard", "datasets", "trl", "ray", "pandas", "scipy"}
"""Packages that a prediction needs nothing of. A first one imports PEFT, to check its private name."""


@pytest.mark.slow
def test_a_first_prediction_imports_no_package_that_it_does_not_need(tmp_path: Path) -> None:
    code = (
        "import sys; from trainfit.cli.main import main; code = main(['predict', 'llama-3.1-8b'])\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRAINFIT_CACHE": str(tmp_path)},
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    imported = set(done.stderr.splitlines()[-1].split())
    assert {"torch", "transformers"} <= imported
    assert imported & NOT_NEEDED == set()


def test_progress_is_written_to_a_pipe_while_torch_is_imported(tmp_path: Path) -> None:
    """A torch in whose place a module waits: the line does not wait for it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, sys\nsys.stdin.readline()\nos.write(2, b'torch goes on\\n')\nos._exit(3)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "predict", "gpt2"], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"TRAINFIT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": paths},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        assert process.stderr.readline().startswith("predicting gpt2 on h200")
        _, rest = process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert rest.endswith("torch goes on\n")
    assert process.returncode == 3
