"""Watch over the ranks of a run: end all of them when one is killed, stopped, hung or has failed.

Ranks watch each other until every one has finished: the last ones may be stopped while the others, and the
store, wait for them.

A thread of each rank publishes a heartbeat (step, phase, count of events) in a store, and reads the others'.
Another thread judges the heartbeats and ends the process, because a main thread that waits for a collective
runs no signal handler.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from trainfit.measurement.process import process_state
from trainfit.spec.errors import EXIT_STOPPED
from trainfit.spec.printable import say
from trainfit.training.ranks.launch import LAUNCHER

BEAT_S = 0.5
STOPPED_S = 10.0  # A process that is stopped for so long (SIGSTOP) ends the run
SILENT_S = 30.0  # A rank on another host without a heartbeat for so long ends the run
ANSWER_S = 2.0  # Longest wait for the store, whose process may be the one that is stopped
LONG_PHASES = ("start", "checkpoint")  # "start" makes data and model
LONG_TIMES = 6  # Factor of the limit in a long phase
LINGER_S = 5.0
"""Time after which a failed rank is ended: its communicator may wait for its peers."""
VERDICT = "trainfit/verdict"
T = TypeVar("T")


class Beat(NamedTuple):
    """Heartbeat of one rank."""

    pid: int
    started: int  # Start time of the process, to detect a reused process id
    host: str
    events: int  # Phases entered so far; the rank with the lowest count is behind
    step: int
    phase: str
    age_s: float  # Time since the last event
    number: int
    ended: bool

    def where(self, rank: int) -> str:
        return f"rank {rank} (process {self.pid}, last seen at step {self.step}, {self.phase})"


class Watch:
    """Context manager around a run on several ranks.

    Args:
        hang_timeout_s: the run is ended if no rank enters another phase within this time.
        how_to_resume: returns the end of a message.
    """

    def __init__(self, rank: int, world_size: int, hang_timeout_s: float, how_to_resume: Callable[[], str]):
        self.rank, self.hang_timeout_s = rank, hang_timeout_s
        self._resume = how_to_resume
        # A connection of its own: a call that waits in another thread would hold up the heartbeat.
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
            timeout=timedelta(seconds=SILENT_S), wait_for_workers=False,
        )  # fmt: skip
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._host, self._started = _host(), process_state(os.getpid())[1]
        self._events, self._at, self._since_s = 0, (0, "start"), time.monotonic()
        self._number = 0
        self._beats: dict[int, Beat] = {}  # Last heartbeats of the others
        self._heard_s = time.monotonic()
        """Time of the last exchange with the store, which rank 0 or torchrun's agent holds."""
        self._seen: dict[int, tuple[int, float]] = {}
        self._stopped_since_s: dict[int, float] = {}
        self._ended = False  # This rank has finished, and waits for the others
        self._done = threading.Event()
        self._failed: tuple[int, float] | None = None  # Exit code and time

    def publish(self) -> None:
        """Publish the first heartbeat. Every rank must have done so before one starts to watch."""
        self._beat(ended=False)

    def start(self) -> None:
        """Start to watch."""
        self._exchange()
        # The store of a rank that is stopped does not answer, and the judgement must not wait for it.
        for loop in (self._talk, self._watch):
            threading.Thread(target=loop, name=f"watch {loop.__name__}", daemon=True).start()

    def enter(self, step: int, phase: str) -> None:
        """Note that this rank begins ``phase`` of ``step`` (from 1)."""
        self._events += 1
        self._at, self._since_s = (step, phase), time.monotonic()

    def finish(self) -> None:
        """Note that this rank has finished. The others are watched until ``leave``."""
        self._ended = True
        _answer(lambda: self._beat(ended=True))  # If this fails, the next exchange publishes it.

    def leave(self) -> None:
        """End the watch, once every rank has finished."""
        self._done.set()

    def fail(self, code: int, message: str) -> bool:
        """Publish that this rank failed, so that all end; return whether it is the first one.

        The process is ended after a few seconds if it does not end by then.
        """
        first = self._give_verdict(code, message)
        self._failed = code, time.monotonic()
        return first is not False

    def _beat(self, ended: bool) -> None:
        self._number += 1
        age_s = time.monotonic() - self._since_s
        beat = Beat(
            os.getpid(), self._started, self._host, self._events, *self._at, age_s, self._number, ended
        )
        self._store.set(_key(self.rank), json.dumps(beat))

    def _exchange(self) -> None:
        """Publish this rank's heartbeat and read the others'; end this process if a verdict was given."""
        self._beat(ended=self._ended)
        if self._store.check([VERDICT]):
            _end(json.loads(self._store.get(VERDICT))["code"])
        values = self._store.multi_get([_key(peer) for peer in self._peers])
        self._beats = {
            peer: Beat(*json.loads(value)) for peer, value in zip(self._peers, values, strict=True)
        }
        self._heard_s = time.monotonic()

    def _talk(self) -> None:
        with suppress(RuntimeError):  # The store is gone, and with it the process that held it.
            while not self._done.wait(BEAT_S):
                if self._failed is None:
                    self._exchange()

    def _watch(self) -> None:
        while not self._done.wait(BEAT_S):
            if self._failed is None:
                self._judge()
            elif time.monotonic() - self._failed[1] > LINGER_S:
                _end(self._failed[0])

    def _judge(self) -> None:
        """End this process if a rank is gone, is stopped or hangs."""
        for rank, beat in self._beats.items():
            self._judge_process(rank, beat)
        beats = {rank: beat for rank, beat in self._beats.items() if not beat.ended}
        now_s = time.monotonic()
        if now_s - self._heard_s > SILENT_S:
            problem = f"no answer of the store that rank 0 or its agent holds for {SILENT_S:.0f} s"
            self._end_all(problem, 0, beats.get(0))
        own = self._own(now_s)
        if own.age_s < self._limit_s(own.phase):
            return
        alive = beats | {self.rank: own}
        if all(beat.age_s >= self._limit_s(beat.phase) for beat in alive.values()):
            rank = min(alive, key=lambda one: (alive[one].events, -alive[one].age_s, one))
            problem = f"no progress for {own.age_s:.0f} s"
            if len({beat.events for beat in alive.values()}) > 1:
                problem += f"; {alive[rank].where(rank)} is behind"
            else:
                problem += f" in any rank at step {own.step}, {own.phase}"
            self._end_all(problem, rank, alive[rank])

    def _judge_process(self, rank: int, beat: Beat) -> None:
        now_s = time.monotonic()
        if beat.host != self._host:
            number, since_s = self._seen.get(rank, (-1, now_s))
            self._seen[rank] = (beat.number, since_s if number == beat.number else now_s)
            if now_s - self._seen[rank][1] > SILENT_S:
                self._end_all(f"no heartbeat of {beat.where(rank)} for {SILENT_S:.0f} s", rank, beat)
            return
        state, started = process_state(beat.pid)
        if state in "ZX" or started != beat.started:
            if self._ended and self._done.wait(ANSWER_S):
                return  # The other rank left after the last exchange, as this one does.
            _answer(self._exchange)  # The other rank may have published the reason.
            self._end_all(f"{beat.where(rank)} was killed", rank, beat, reported=LAUNCHER in os.environ)
        elif state == "T":
            since_s = self._stopped_since_s.setdefault(rank, now_s)
            if now_s - since_s > STOPPED_S:
                self._end_all(f"{beat.where(rank)} has been stopped for {STOPPED_S:.0f} s", rank, beat)
        else:
            self._stopped_since_s.pop(rank, None)

    def _is_here(self, beat: Beat) -> bool:
        """Return whether a heartbeat's process is another one of this host, its process id not reused."""
        here = beat.host == self._host and beat.pid != os.getpid()
        return here and process_state(beat.pid)[1] == beat.started

    def _limit_s(self, phase: str) -> float:
        return self.hang_timeout_s * (LONG_TIMES if phase in LONG_PHASES else 1)

    def _own(self, now_s: float) -> Beat:
        return Beat(os.getpid(), 0, self._host, self._events, *self._at, now_s - self._since_s, 0, False)

    def _give_verdict(self, code: int, message: str) -> bool | None:
        """Publish why the run ends; return whether no rank did so before, None if the store is silent."""
        mine = json.dumps({"rank": self.rank, "code": code, "message": message})
        return _answer(lambda: self._store.compare_set(VERDICT, "", mine).decode() == mine)

    def _end_all(self, problem: str, rank: int, culprit: Beat | None, reported: bool = False) -> None:
        """End every rank; the first one to find the problem reports it.

        Args:
            rank: the one with the problem.
            culprit: its heartbeat. It is ended too, if it is on this host: a stopped process receives no
                other signal.
            reported: the launcher reports it.
        """
        message = f"{problem}; all ranks end; {self._resume()}"
        first = self._give_verdict(EXIT_STOPPED, message)
        if first is None:  # Without a store the lowest of the other ranks reports.
            first = self.rank == min({self.rank, *self._peers} - {rank})
        if first and not reported:
            _print(message)
        # The launcher ends the ranks that are left; torchrun waits for 30 s.
        if LAUNCHER not in os.environ and culprit is not None and self._is_here(culprit):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(culprit.pid, signal.SIGKILL)
        _end(EXIT_STOPPED)


def _answer(ask: Callable[[], T]) -> T | None:
    """Return what ``ask`` returns, or None if it fails or takes longer than ``ANSWER_S``."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return answers[0] if answers else None


def _print(message: str) -> None:
    with suppress(OSError):
        say(f"trainfit: error: {message}", err=True)


def _end(code: int) -> None:
    """End this process at once, whatever its main thread waits for."""
    os._exit(code)


def _key(rank: int) -> str:
    return f"trainfit/beat/{rank}"


def _host() -> str:
    """Return a name of this host and its process ids' namespace; without /proc a name of its own."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
