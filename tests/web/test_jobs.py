"""Questions that are traced one at a time: turns, and leaving at any moment."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from served import TINY
from trainfit.web.jobs import BusyError, Tracing
from trainfit.web.limits import Bounds
from trainfit.web.questions import Question, question_of

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))


def _question(seq: int) -> Question:
    return question_of("predict", {"recipe": {**TINY, "batch": {"micro": 1, "seq": seq}}})


async def _asked(tracing: Tracing, seq: int, patience_s: float) -> dict[str, Any] | None:
    """Ask, and leave after so many seconds; return the last event."""
    events = tracing.events(_question(seq))
    last: dict[str, Any] | None = None

    async def follow() -> None:
        nonlocal last
        async for event in events:
            last = event

    task = asyncio.create_task(follow())
    await asyncio.wait([task], timeout=patience_s)
    task.cancel()
    await asyncio.wait([task])
    await events.aclose()
    return last


def test_each_gets_the_answer_to_its_own_question_whoever_leaves() -> None:
    async def run() -> None:
        tracing = Tracing(Bounds(waiting=100))
        first = await _asked(tracing, 16, 60)
        assert first is not None
        process = tracing._process
        seeded, patient = random.Random(7), 0
        for number in range(3):
            seqs = [17 + 6 * number + at for at in range(6)]
            waits = [seeded.choice([0.0, 0.02, 0.2, 0.6, 60.0]) for _ in seqs]
            pairs = list(zip(seqs, waits, strict=True))
            events = await asyncio.gather(*(_asked(tracing, *pair) for pair in pairs))
            for (seq, wait), last in zip(pairs, events, strict=True):
                if wait == 60.0:
                    patient += 1
                    assert last is not None
                    assert f"batch 1 x {seq}," in last["answer"]["subject"]
        assert patient >= 2
        assert tracing._process is process  # Nobody's leaving cost the others an import of torch.
        await tracing.close()

    asyncio.run(run())


def test_leaving_at_the_moment_of_the_answer_leaves_nothing_behind() -> None:
    async def run() -> None:
        tracing = Tracing(Bounds())
        for seq in range(16, 22):
            events = tracing.events(_question(seq))
            while "answer" not in (event := await anext(events)):
                pass
            assert f"1 x {seq}," in event["answer"]["subject"]
            rest = asyncio.ensure_future(anext(events))  # Which waits for the end of the fork.
            await asyncio.sleep(0)
            rest.cancel()
            await asyncio.wait([rest])
            await events.aclose()
        assert tracing.num_ended == 0
        await tracing.close()

    asyncio.run(run())


def test_too_many_questions_are_refused() -> None:
    async def run() -> None:
        tracing = Tracing(Bounds(waiting=1))
        first, second, third = (tracing.events(_question(seq)) for seq in (16, 17, 18))
        assert "progress" in await anext(first)
        waiting = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0.05)
        with pytest.raises(BusyError):
            await anext(third)
        waiting.cancel()
        await asyncio.wait([waiting])
        for events in (first, second):
            await events.aclose()
        await tracing.close()

    asyncio.run(run())
