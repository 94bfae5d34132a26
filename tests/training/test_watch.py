"""The watch over the ranks: a rank that is killed, stopped, hung or failed is named, and ends the others."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from trainfit.measurement.process import StoppedProcesses, process_state
from trainfit.training.ranks import watch
from trainfit.training.ranks.launch import LAUNCHER
from trainfit.training.ranks.watch import Watch


class EndedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, Watch]]:
    """The watches of two ranks, without their threads; both in this process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv(LAUNCHER, raising=False)

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(watch, "_end", end)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    both = Watch(0, 2, 0.05, lambda: "how to resume"), Watch(1, 2, 0.05, lambda: "how to resume")
    for one in both:
        one.publish()
    yield both
    del store


def look(one: Watch) -> None:
    one._exchange()
    one._judge()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def lives_in(one: Watch, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank's heartbeat be that of another process."""
    one._started = process_state(process.pid)[1]
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: process.pid)
        one.publish()


def test_nothing_happens_while_all_make_progress(pair) -> None:
    for one in pair:
        one.enter(3, "forward")
        one.publish()
    look(pair[0])


def test_the_rank_that_is_behind_is_named(pair, capsys) -> None:
    first, second = pair
    first.enter(3, "forward")
    second.enter(3, "forward")
    first.enter(3, "backward")
    for one in pair:
        one._since_s -= 1
        one.publish()
    with pytest.raises(EndedError, match="75"):
        look(first)
    line = capsys.readouterr().err
    assert line.startswith("trainfit: error: no progress for 1 s; rank 1 (process ")
    assert "last seen at step 3, forward) is behind; all ranks end; how to resume" in line
    with pytest.raises(EndedError, match="75"):
        look(second)
    assert not capsys.readouterr().err, "one rank reports"


@pytest.mark.parametrize("phase", ["start", "checkpoint"])
def test_a_start_or_checkpoint_may_take_longer_than_a_phase_but_not_forever(pair, phase, capsys) -> None:
    for one in pair:
        one.enter(3, phase)
        one._since_s -= 0.1
        one.publish()
    look(pair[0])
    for one in pair:
        one._since_s -= 10
        one.publish()
    with pytest.raises(EndedError, match="75"):
        look(pair[0])
    assert f"no progress for 10 s in any rank at step 3, {phase}" in capsys.readouterr().err


def test_a_killed_rank_is_named(pair, sleeper, monkeypatch, capsys) -> None:
    pair[1].enter(7, "optimizer")
    lives_in(pair[1], sleeper, monkeypatch)
    look(pair[0])
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(EndedError, match="75"):
        look(pair[0])
    assert (
        f"rank 1 (process {sleeper.pid}, last seen at step 7, optimizer) was killed"
        in capsys.readouterr().err
    )


def test_a_stopped_rank_is_named_and_ended(pair, sleeper, monkeypatch, capsys) -> None:
    pair[1].enter(7, "forward")
    lives_in(pair[1], sleeper, monkeypatch)
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    look(pair[0])
    monkeypatch.setattr(watch, "STOPPED_S", 0.0)
    with pytest.raises(EndedError, match="75"):
        look(pair[0])
    assert (
        f"(process {sleeper.pid}, last seen at step 7, forward) has been stopped" in capsys.readouterr().err
    )
    assert sleeper.wait(timeout=20) == -signal.SIGKILL


@pytest.mark.parametrize("which", ["stopped one", "one that looks"])
def test_a_stopped_rank_is_named_after_one_of_them_came_to_its_end(
    which, pair, sleeper, monkeypatch, capsys
) -> None:
    lives_in(pair[1], sleeper, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: sleeper.pid if which == "stopped one" else 0)
        pair[which == "stopped one"].finish()
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    look(pair[0])
    monkeypatch.setattr(watch, "STOPPED_S", 0.0)
    with pytest.raises(EndedError, match="75"):
        look(pair[0])
    assert (
        f"rank 1 (process {sleeper.pid}, last seen at step 0, start) has been stopped"
        in capsys.readouterr().err
    )


def test_a_rank_that_left_is_not_missed_and_one_that_died_at_the_end_is(
    pair, sleeper, monkeypatch, capsys
) -> None:
    lives_in(pair[1], sleeper, monkeypatch)
    monkeypatch.setattr(watch, "ANSWER_S", 0.5)
    pair[0].finish()
    look(pair[0])
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(EndedError, match="75"):
        look(pair[0])
    assert "was killed" in capsys.readouterr().err
    pair[0].leave()
    pair[0]._judge()


def test_a_process_is_found_once_it_has_been_stopped_for_long(sleeper) -> None:
    stopped = StoppedProcesses(0.0)
    assert stopped.first([os.getpid(), sleeper.pid]) is None
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert stopped.first([os.getpid(), sleeper.pid]) is None, "since now"
    assert stopped.first([os.getpid(), sleeper.pid]) == sleeper.pid
    sleeper.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
    assert stopped.first([sleeper.pid]) is None


def test_a_rank_of_another_host_is_named_once_its_heartbeat_stops(pair, monkeypatch, capsys) -> None:
    pair[1]._host = "elsewhere"
    pair[1].publish()
    look(pair[0])
    monkeypatch.setattr(watch, "SILENT_S", -1.0)
    with pytest.raises(EndedError, match="75"):
        look(pair[0])
    assert "no heartbeat of rank 1" in capsys.readouterr().err


def test_one_rank_reports_a_failure_and_the_others_end_with_its_exit_code(pair) -> None:
    assert pair[1].fail(65, "bad data")
    assert not pair[0].fail(74, "full disk")
    with pytest.raises(EndedError, match="65"):
        look(pair[0])
