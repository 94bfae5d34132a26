"""SIGTERM and Ctrl-C at any moment: exit 75, one line on what is saved, and a run that can be resumed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from command_worker import Worker
from machine_speed import slowness
from tiny_training import Listener, asked, losses_in_log, tiny
from trainfit.cli.main import guarded
from trainfit.training import session
from trainfit.training.log import JsonlLog
from trainfit.training.loop import train
from trainfit.training.stop import Stopped, StopSignal

AT = """
import builtins, os, signal, sys
wanted, number = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
plain = builtins.__import__

def importing(name, *arguments, **options):
    if name == wanted and not done:
        done.append(name)
        os.kill(os.getpid(), number)
    return plain(name, *arguments, **options)

done = []
builtins.__import__ = importing
from trainfit.cli.entry import main
sys.exit(main())
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tiny().content()))
    return str(path)


def words(recipe: str, *more: str) -> list[str]:
    return ["train", recipe, "--out", "run", "--data", "stories:60", "--steps", "6", "--json", *more]


def run(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=250,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"TRAINFIT_CACHE": str(cwd / "cache")},  # A cached ledger needs no torch.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # Background jobs ignore it.
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("trainfit.cli", signal.SIGINT),
        ("typer", signal.SIGTERM),
        ("torch", signal.SIGINT),
        ("transformers", signal.SIGTERM),
        ("trainfit.training.loop", signal.SIGINT),
    ],
)
def test_a_signal_during_an_import_says_that_nothing_was_saved(
    module: str, number: int, recipe: str, tmp_path: Path
) -> None:
    ended = run(AT, module, str(int(number)), *words(recipe), cwd=tmp_path)
    early = number == signal.SIGINT and module in ("trainfit.cli", "typer")  # No verb is known yet.
    assert ended.returncode == (130 if early else 75), ended.stderr
    name = signal.Signals(number).name
    line = (
        "error: interrupted"
        if early
        else f"{name}: stopped; nothing had been saved: the same command starts again"
    )
    assert ended.stderr.splitlines()[-1] == f"trainfit: {line}"
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "run" / "run.json").exists()


STOPPED_IN = """
import os, signal, time
import trainfit.training.{module} as module
plain = module.{name}

def stopped(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(600):
        time.sleep(0.1)
    return plain(*arguments, **options)

module.{name} = stopped
"""
PLACES = {"model": ("loop", "assemble"), "data": ("corpus", "_tokenize"), "resume": ("checkpoint", "load")}


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_before_the_first_step_ends_at_once_and_the_run_starts_again(
    place: str, recipe: str, tmp_path: Path, worker: Worker
) -> None:
    more, limits = ["--resume"] if place == "resume" else [], {"folder": tmp_path, "memory_bytes": None}
    if more:
        assert worker.run(*words(recipe, "--steps", "2"), **limits).code == 0
    module, name = PLACES[place]
    ended = worker.run(*words(recipe, *more), first=STOPPED_IN.format(module=module, name=name), **limits)
    assert ended.wall_s < 30 * slowness(), "it did not wait for the work"
    assert (ended.code, ended.out) == (75, "")
    saved = (
        "--resume goes on from run/checkpoints/step-00000002" if more
        else "nothing had been saved: the same command starts again"
    )  # fmt: skip
    assert ended.err.splitlines()[-1] == f"trainfit: SIGTERM: stopped; {saved}"
    assert not list((tmp_path / "run").rglob(".unfinished*"))
    assert worker.run(*words(recipe, *more), **limits).code == 0


TWICE = """
import os, signal
import trainfit.training.durable as durable
plain = durable._seal

def seal(work):
    if "step-00000002" in work.name:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    plain(work)

durable._seal = seal
"""


def test_a_run_that_is_ended_while_a_checkpoint_is_written_is_whole(
    recipe: str, tmp_path: Path, worker: Worker
) -> None:
    """Two signals in the middle of a checkpoint's write: ``timeout`` signals the process and its group."""
    straight = train(tiny(), asked(tmp_path / "straight", 6, eval_fraction=0.05, eval_sequences=64))
    limits = {"folder": tmp_path, "memory_bytes": None}
    ended = worker.run(*words(recipe, "--save-every", "2"), first=TWICE, **limits)
    assert ended.code == 75, ended.err
    assert json.loads(ended.out)["message"] == "SIGTERM after step 2 of 6; --resume goes on from it"
    resumed = worker.run(*words(recipe, "--resume"), **limits)
    assert resumed.code == 0, resumed.err
    losses = [json.loads(out)["losses"] for out in (ended.out, resumed.out)]
    assert losses[0] + losses[1] == list(straight.losses)


def stopped_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    plain = session.evaluate

    def evaluate(*arguments: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("trainfit.training.session.evaluate", evaluate)
    return evaluate


def test_a_signal_in_the_last_evaluation_saves_and_resume_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = train(tiny(), asked(tmp_path / "straight", 4))
    stopped_in_evaluation(monkeypatch)
    ended = train(tiny(), asked(tmp_path / "run", 4), observers=[JsonlLog()])
    assert (ended.status, ended.exit_code, ended.evaluations) == ("stopped", 75, ())
    assert ended.message == "SIGTERM before the last evaluation; --resume evaluates"
    monkeypatch.undo()
    resumed = train(tiny(), asked(tmp_path / "run", 4, resume=True), observers=[JsonlLog()])
    assert (resumed.status, resumed.eval_perplexity) == ("done", straight.eval_perplexity)
    assert losses_in_log(tmp_path / "run") == dict(enumerate(straight.losses, 1))


def test_a_signal_in_the_first_step_ends_without_a_checkpoint(tmp_path: Path) -> None:
    """Compiling it may take minutes, and there is nothing to save."""
    listener = Listener()
    plain = listener.on_start

    def at_start(metrics: object) -> None:
        plain(metrics)  # type: ignore[arg-type]
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    listener.on_start = at_start  # type: ignore[method-assign]

    class Slow(session.Feed):
        def __next__(self) -> object:  # type: ignore[override]
            os.kill(os.getpid(), signal.SIGTERM)
            return super().__next__()

    before, session.Feed = session.Feed, Slow  # type: ignore[misc]
    try:
        ended = train(tiny(), asked(tmp_path, 4), observers=[listener])
    finally:
        session.Feed = before  # type: ignore[misc]
    assert (ended.status, ended.steps, ended.checkpoint) == ("stopped", 0, None)
    assert ended.message == (
        "SIGTERM after step 0 of 4; nothing had been saved, --resume begins with the first step"
    )
    assert listener.heard == ["start", "end"]
    assert train(tiny(), asked(tmp_path, 4, resume=True)).status == "done"


def test_a_second_signal_ends_at_once_but_an_echo_does_not() -> None:
    code = (
        "import os, signal, time\nfrom trainfit.training import stop\n"
        "with stop.StopSignal() as one:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(one.name, flush=True)\n"
        "    stop.REPEATED_S = 0.0\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('not reached')\n"
    )
    ended = run(code, cwd=Path.cwd())
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "SIGTERM\n")


def test_a_stop_whose_exception_a_library_lost_is_still_a_stop() -> None:
    def lost() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Stopped:
            with StopSignal() as inner:
                assert inner.name == "SIGTERM"
            raise RuntimeError("made of it by a library") from None

    assert guarded(lost) == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_prediction_ends_with_75_too(tmp_path: Path) -> None:
    ended = run(AT, "torch", str(int(signal.SIGTERM)), "predict", "tiny-cpu", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (75, "")
    assert (
        ended.stderr == "trainfit: SIGTERM: stopped; nothing had been saved: the same command starts again\n"
    )


def test_a_sweep_that_has_not_begun_says_that_the_same_command_goes_on(tmp_path: Path) -> None:
    from tiny_sweep import BASE

    (tmp_path / "sweep.yaml").write_text(BASE + "list: [{name: one}]\n")
    ended = run(AT, "trainfit.sweeps.run", str(int(signal.SIGTERM)), "sweep", "sweep.yaml", cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("trainfit: SIGTERM: stopped; ")
    assert "the same command" in ended.stderr
