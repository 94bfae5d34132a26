"""SIGTERM and Ctrl-C at any moment: one line, and where there is something to resume exit 75 and how."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_worker import Ending, Worker
from tiny_sweep import BASE
from tiny_training import Listener, losses_in_log, options_for, tiny
from trainfit.cli.main import guarded
from trainfit.spec.stop import Stopped, StopSignal
from trainfit.training import session
from trainfit.training.log import JsonlLog
from trainfit.training.loop import train

SIGNAL_AT_IMPORT = """
import builtins, os
plain, done = builtins.__import__, []

def importing(name, *arguments, **options):
    if name == {module!r} and not done:
        done.append(name)
        os.kill(os.getpid(), {number})
    return plain(name, *arguments, **options)

builtins.__import__ = importing
"""
COMMAND = "import sys\nfrom trainfit.cli.entry import main\nsys.exit(main())"
NOTHING_SAVED = "nothing had been saved: the same command starts again"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tiny().content()))
    return ["train", str(path), "--out", "run", "--data", "stories:60", "--steps", "6", "--json"]


def run(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=250,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # Background jobs ignore it.
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "number"),
    [("trainfit.cli", signal.SIGINT), ("typer", signal.SIGTERM), ("torch", signal.SIGINT)],
)
def test_a_signal_during_an_import_says_that_nothing_was_saved(
    module: str, number: int, command: list[str], tmp_path: Path
) -> None:
    code = SIGNAL_AT_IMPORT.format(module=module, number=int(number)) + COMMAND
    ended = run(code, *command, cwd=tmp_path)
    early = module == "trainfit.cli"  # No verb is known yet.
    line = "error: interrupted" if early else f"{signal.Signals(number).name}: stopped; {NOTHING_SAVED}"
    assert (ended.returncode, ended.stdout) == (130 if early else 75, ""), ended.stderr
    assert ended.stderr.splitlines()[-1] == f"trainfit: {line}"
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("module", "number", "words"),
    [
        (
            "transformers.models.auto.modeling_auto",
            signal.SIGTERM,
            "train tiny.yaml --out run --data stories:60",
        ),
        ("trainfit.training.loop", signal.SIGINT, "train tiny.yaml --out run --data stories:60"),
        ("trainfit.sweeps.run", signal.SIGTERM, "sweep sweep.yaml"),
    ],
)
def test_a_signal_during_a_late_import_too(
    module: str, number: int, words: str, command: list[str], tmp_path: Path, worker: Worker
) -> None:
    (tmp_path / "sweep.yaml").write_text(BASE + "list: [{name: one}]\n")
    first = SIGNAL_AT_IMPORT.format(module=module, number=int(number))
    cache = f"os.environ['TRAINFIT_CACHE'] = {str(tmp_path / 'cache')!r}\n"  # A cached ledger needs no model.
    ended = worker.run(*words.split(), first=first + cache, folder=tmp_path, memory_bytes=None)
    assert (ended.code, ended.out) == (75, ""), ended.err
    line = ended.err.splitlines()[-1]
    assert line.startswith(f"trainfit: {signal.Signals(number).name}: stopped; ")
    assert NOTHING_SAVED in line or ("sweep" in words and "the same command" in line)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_verb_that_saves_nothing_says_nothing_of_it(
    number: int, code: int, command: list[str], tmp_path: Path, worker: Worker
) -> None:
    cache = f"os.environ['TRAINFIT_CACHE'] = {str(tmp_path / 'cache')!r}\n"
    first = SIGNAL_AT_IMPORT.format(module="torch", number=int(number)) + cache
    ended = worker.run("predict", "tiny.yaml", first=first, folder=tmp_path, memory_bytes=None)
    line = "trainfit: SIGTERM: stopped" if code == 143 else "trainfit: error: interrupted"
    assert (ended.code, ended.out, ended.err.splitlines()[-1]) == (code, "", line)


STOPPED_IN = """
import os, signal, time
import trainfit.training.{module} as module

def stopped(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(0.1)

module.{name} = stopped
"""
TWICE = """
import os, signal
import trainfit.training.durable as durable
plain = durable._seal

def seal(work, known):
    if "step-00000002" in work.name:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    plain(work, known)

durable._seal = seal
"""


def test_a_run_that_is_ended_at_every_stage_has_the_losses_of_an_unbroken_one(
    command: list[str], tmp_path: Path, worker: Worker
) -> None:
    """While the model is built, the data made, a checkpoint written (twice, as by ``timeout``), and read."""
    straight = train(tiny(), options_for(tmp_path / "straight", 6, eval_fraction=0.05, eval_sequences=64))

    def go(*more: str, first: str = "") -> Ending:
        return worker.run(*command, *more, first=first, folder=tmp_path, memory_bytes=None)

    def stopped_in(module: str, name: str, saved: str, *more: str) -> None:
        ended = go(*more, first=STOPPED_IN.format(module=module, name=name))
        assert (ended.code, ended.out) == (75, ""), "it does not wait for the work"
        assert ended.err.splitlines()[-1] == f"trainfit: SIGTERM: stopped; {saved}"
        assert not list((tmp_path / "run").rglob(".unfinished*"))

    stopped_in("loop", "assemble", NOTHING_SAVED)
    stopped_in("corpus", "_split", NOTHING_SAVED)
    ended = go("--save-every", "2", first=TWICE)
    assert ended.code == 75, ended.err
    assert json.loads(ended.out)["message"] == "SIGTERM after step 2 of 6; --resume goes on from it"
    newest = "--resume goes on from run/checkpoints/step-00000002"
    stopped_in("checkpoint", "load", newest, "--resume")
    resumed = go("--resume")
    assert resumed.code == 0, resumed.err
    losses = [json.loads(out)["losses"] for out in (ended.out, resumed.out)]
    assert losses[0] + losses[1] == list(straight.losses)


def test_a_signal_in_the_last_evaluation_saves_and_resume_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = train(tiny(), options_for(tmp_path / "straight", 4))
    plain = session.Session._evaluation

    def evaluation(*arguments: Any) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments)

    monkeypatch.setattr(session.Session, "_evaluation", evaluation)
    ended = train(tiny(), options_for(tmp_path / "run", 4), observers=[JsonlLog()])
    assert (ended.status, ended.exit_code, ended.evaluations) == ("stopped", 75, ())
    assert ended.message == "SIGTERM before the last evaluation; --resume evaluates"
    monkeypatch.undo()
    resumed = train(tiny(), options_for(tmp_path / "run", 4, resume=True), observers=[JsonlLog()])
    assert (resumed.status, resumed.eval_perplexity) == ("done", straight.eval_perplexity)
    assert losses_in_log(tmp_path / "run") == dict(enumerate(straight.losses, 1))


def test_a_signal_in_the_first_step_ends_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling it may take minutes, and there is nothing to save."""

    class Slow(session.Feed):
        def __next__(self) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__next__()

    monkeypatch.setattr(session, "Feed", Slow)
    listener = Listener()
    ended = train(tiny(), options_for(tmp_path, 4), observers=[listener])
    assert (ended.status, ended.steps, ended.checkpoint) == ("stopped", 0, None)
    message = "SIGTERM after step 0 of 4; nothing had been saved, --resume begins with the first step"
    assert ended.message == message
    assert listener.events == ["start", "end"]
    monkeypatch.undo()
    assert train(tiny(), options_for(tmp_path, 4, resume=True)).status == "done"


def test_a_second_signal_ends_at_once_but_an_echo_does_not(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\nfrom trainfit.spec import stop\n"
        "with stop.StopSignal() as one:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(one.name, flush=True)\n"
        "    stop.REPEATED_S = {}\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('not reached')\n"
    )
    ended = run(code, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "SIGTERM\n")


def test_a_stop_whose_exception_a_library_lost_is_still_a_stop() -> None:
    def lost() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Stopped:
            with StopSignal() as inner:
                assert inner.name == "SIGTERM"
            raise RuntimeError("made of it by a library") from None

    assert guarded(lost) == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
