"""Traces at once, by free memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

from trainfit.planning.room import HELD_BYTES, TRACE_BYTES, Room


def most_at_once(room: Room, count: int) -> int:
    """Run traces that wait for one another as long as the room lets more begin; return the most at once."""
    lock, running, most = threading.Lock(), 0, 0

    def trace(_: int) -> None:
        nonlocal running, most
        with room.one():
            with lock:
                running += 1
                most = max(most, running)
            threading.Event().wait(0.3)
            with lock:
                running -= 1

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(trace, range(count)))
    return most


def test_as_many_traces_begin_as_fit_into_free_memory() -> None:
    assert most_at_once(plenty := Room(lambda: 100 * TRACE_BYTES), 4) == 4
    assert not plenty.note
    assert most_at_once(tight := Room(lambda: 2 * TRACE_BYTES), 4) == 2
    assert tight.note.startswith("at times only 2 recipes were traced at once: one takes up to 512.00 MiB")


def test_a_trace_is_expected_to_take_as_much_as_the_largest_before() -> None:
    room = Room(lambda: 4 * TRACE_BYTES)
    room.took(3 * TRACE_BYTES)
    room.took(TRACE_BYTES)
    assert most_at_once(room, 3) == 1
    assert "only 1 recipe was traced at once: one takes up to 1.50 GiB" in room.note


def test_one_trace_begins_whatever_is_free() -> None:
    assert most_at_once(Room(lambda: 0), 2) == 1


def test_one_that_is_to_be_alone_waits_for_the_others() -> None:
    room, began, order = Room(lambda: 100 * TRACE_BYTES), threading.Event(), list[str]()

    def first() -> None:
        with room.one():
            began.set()
            threading.Event().wait(0.3)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    began.wait()
    with room.one(alone=True):
        order.append("alone")
    thread.join()
    assert order == ["first", "alone"]


def test_a_process_that_keeps_much_is_replaced_sooner_where_memory_is_scarce() -> None:
    plenty, scarce = Room(lambda: 100 * TRACE_BYTES), Room(lambda: TRACE_BYTES)
    assert [room.is_too_large(HELD_BYTES // 2) for room in (plenty, scarce)] == [False, True]
    assert plenty.is_too_large(HELD_BYTES + 1)
    assert not scarce.is_too_large(2**20)
