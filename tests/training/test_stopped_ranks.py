"""A rank stopped (SIGSTOP) at any point of a run, also after another has nothing left to do, ends it soon."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfit.spec.stop import StopSignal
from trainfit.training.ranks import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
HERE = Path(__file__).parent
WATCHED = ("summary",)
"""Points at which the other rank finds out; at those after its watch, and before it, the launcher does."""


@pytest.mark.parametrize(("point", "rank"), [("summary", 0), ("leave", 0), ("join", 1)])
def test_a_stopped_rank_ends_the_run(
    point: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "STOPPED_S", 60.0 if point in WATCHED else 1.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "helpers"), *filter(None, sys.path)])
    environment = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "POINT": point, "STOPPED": str(rank), launch.LAUNCHER: str(os.getpid()),
        "PYTHONPATH": paths, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "stopped_rank.py"), str(tmp_path / "run")], start_new_session=True,
            env=environment | {"RANK": str(number), "LOCAL_RANK": str(number)}, stdout=subprocess.PIPE,
        )
        for number in (0, 1)
    ]  # fmt: skip
    try:
        out = ranks[rank].stdout
        assert out is not None
        assert out.readline() == b"stopped\n"
        began_s = time.monotonic()
        name = f"rank {rank} (process {ranks[rank].pid}"
        with StopSignal() as stop:
            if point in WATCHED:
                assert launch._wait(ranks, stop) == 75
                assert f"{name}, last seen at step " in (said := capfd.readouterr().err)
                assert "has been stopped for 1 s; all ranks end; " in said
            else:
                with pytest.raises(launch.RankKilledError) as found:
                    launch._wait(ranks, stop)
                assert str(found.value) == f"{name}) has been stopped for 1 s"
                assert launch.exit_code_of(found.value) == 75
        assert time.monotonic() - began_s < 40
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
