"""Read a pickle of plain values, such as a memory snapshot, without executing anything.

A pickle is a program for a stack machine; some of its instructions import modules and call functions. Those
that build dicts, lists, tuples, strings and numbers are the only ones here; any other ends with an error.

Worked example. ``pickle.dumps([{"size": 512}], protocol=4)`` is, without its frame's header,

    ]           push an empty list
    \\x94        store the top of the stack in the memo, as number 0
    }           push an empty dict
    \\x94        ... as number 1
    \\x8c4size   push "size"
    \\x94        ... as number 2; later dicts push it with ``h 2``
    M 512       push 512
    s           take the last two off the stack: d["size"] = 512
    a           take the dict off the stack: append it to the list
    .           the result is the top of the stack

A snapshot of a gigabyte has millions of events, each a dict with a list of frames. As dicts they would take
several times the file's size, and the memo keeps every one alive. So dicts that are appended to a list may be
taken over by a function (``take``) and are emptied.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from struct import error as StructError
from struct import unpack_from
from typing import Any

Value = Any
Take = Callable[[list[Any], list[Any]], bool]
"""(list, items about to be appended to it) -> whether it has taken them over."""

LONG_GETS = re.compile(rb"(?:j.{4}){2,}", re.DOTALL)
"""Consecutive values of the memo, such as the frames of a stack."""
MOST_DIGITS = 16
"""Bytes of a whole number: of any that a snapshot has, an address is the largest."""
PROGRESS_BYTES = 1 << 24

PROTO, FRAME, STOP, MARK = 0x80, 0x95, ord("."), ord("(")
MEMOIZE, BINPUT, LONG_BINPUT, BINGET, LONG_BINGET = 0x94, ord("q"), ord("r"), ord("h"), ord("j")
EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE = ord("}"), ord("]"), ord(")")
SETITEM, SETITEMS, APPEND, APPENDS = ord("s"), ord("u"), ord("a"), ord("e")
TUPLE, TUPLE1, TUPLE2, TUPLE3 = ord("t"), 0x85, 0x86, 0x87
BININT, BININT1, BININT2, LONG1 = ord("J"), ord("K"), ord("M"), 0x8A
SHORT_BINUNICODE, BINUNICODE, BINFLOAT = 0x8C, ord("X"), ord("G")
NONE, NEWTRUE, NEWFALSE = ord("N"), 0x88, 0x89


class NotPlainError(ValueError):
    """The pickle is damaged, or would do more than build plain values."""


def loads(
    data: Any, take: Take = lambda target, items: False, advance: Callable[[int], None] = lambda at: None
) -> Value:
    """Return the value that a pickle of plain values describes.

    Args:
        data: the pickle as bytes, such as a memory map of its file.
        take: is offered the items before they are appended to a list; those that it takes are not appended,
            and dicts among them are emptied.
        advance: called now and then with the number of bytes that were read.

    Raises:
        NotPlainError: it is damaged, or has an instruction that plain values do not need.
    """
    try:
        return _run(data, take, advance)
    except (IndexError, KeyError, StructError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise NotPlainError(f"it is damaged ({type(error).__name__}: {error})") from None


def _run(view: Any, take: Take, advance: Callable[[int], None]) -> Value:
    """Run the instructions; the most frequent ones are compared with first."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    push, pop, memoize = stack.append, stack.pop, memo.append
    at, size, reported = 0, len(view), 0
    while True:
        code = view[at]
        at += 1
        if code == BINGET:
            push(memo[view[at]])
            at += 1
        elif code == LONG_BINGET:
            run = LONG_GETS.match(view, at - 1)
            if run is None:
                push(memo[unpack_from("<I", view, at)[0]])
                at += 4
            else:
                end = run.end()
                stack += [
                    memo[index] for index in unpack_from("<" + "xI" * ((end - at + 1) // 5), view, at - 1)
                ]
                at = end
        elif code == MEMOIZE:
            memoize(stack[-1])
        elif code == LONG1:
            length = view[at]
            if length > MOST_DIGITS:
                raise NotPlainError(f"it has a number of {length} bytes")
            push(int.from_bytes(view[at + 1 : at + 1 + length], "little", signed=True))
            at += 1 + length
        elif code == BININT1:
            push(view[at])
            at += 1
        elif code == MARK:
            marks.append(len(stack))
        elif code == EMPTY_DICT:
            push({})
        elif code == EMPTY_LIST:
            push([])
        elif code == SETITEMS:
            begin = marks.pop()
            target = stack[begin - 1]
            if type(target) is not dict or (len(stack) - begin) % 2:
                raise NotPlainError("it sets items of what is no dict")
            keys = stack[begin::2]
            if not all(type(key) is str for key in keys):  # A nested tuple's hash has no bound.
                raise NotPlainError("a key of a dict is no string")
            target.update(zip(keys, stack[begin + 1 :: 2], strict=True))
            del stack[begin:]
        elif code == APPENDS:
            begin = marks.pop()
            _append(stack[begin - 1], stack[begin:], take)
            del stack[begin:]
            if at - reported >= PROGRESS_BYTES:
                advance(at)
                reported = at
        elif code == BININT:
            push(unpack_from("<i", view, at)[0])
            at += 4
        elif code == BININT2:
            push(unpack_from("<H", view, at)[0])
            at += 2
        elif code == SHORT_BINUNICODE:
            end = at + 1 + view[at]
            push(_text(view, at + 1, end, size))
            at = end
        elif code == TUPLE2:
            stack[-2:] = [(stack[-2], stack[-1])]
        elif code == SETITEM:
            value, key = pop(), pop()
            if type(stack[-1]) is not dict or type(key) is not str:
                raise NotPlainError("it sets an item of what is no dict, or by what is no string")
            stack[-1][key] = value
        elif code == APPEND:
            item = pop()
            _append(stack[-1], [item], take)
        elif code == NONE:
            push(None)
        elif code == FRAME:
            at += 8
        elif code in (NEWTRUE, NEWFALSE):
            push(code == NEWTRUE)
        elif code == BINFLOAT:
            push(unpack_from(">d", view, at)[0])
            at += 8
        elif code == BINUNICODE:
            end = at + 4 + unpack_from("<I", view, at)[0]
            push(_text(view, at + 4, end, size))
            at = end
        elif code == BINPUT:
            _put(memo, view[at], stack[-1])
            at += 1
        elif code == LONG_BINPUT:
            _put(memo, unpack_from("<I", view, at)[0], stack[-1])
            at += 4
        elif code == EMPTY_TUPLE:
            push(())
        elif code == TUPLE1:
            stack[-1] = (stack[-1],)
        elif code == TUPLE3:
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif code == TUPLE:
            begin = marks.pop()
            stack[begin:] = [tuple(stack[begin:])]
        elif code == PROTO:
            at += 1
        elif code == STOP:
            advance(size)
            return stack[-1]
        else:
            raise NotPlainError(
                f"it has an instruction, {chr(code)!r} at byte {at - 1:,}, that plain values do not need"
            )


def _append(target: Any, items: list[Any], take: Take) -> None:
    if type(target) is not list:
        raise NotPlainError("it appends to what is no list")
    if not take(target, items):
        target += items
        return
    for item in items:
        if type(item) is dict:
            item.clear()


def _put(memo: list[Any], index: int, value: Any) -> None:
    """Store a value under a number: of protocols before 4, which count from 0 on."""
    if index == len(memo):
        memo.append(value)
    else:
        memo[index] = value


def _text(view: Any, begin: int, end: int, size: int) -> str:
    if end > size:
        raise NotPlainError("it ends within a string")
    return str(view[begin:end], "utf-8", "surrogatepass")
