"""Records of the training data: a text, a prompt with its completion, a conversation, or two answers.

Forms of a row: ``text``; ``messages`` (role, content); ShareGPT's ``conversations`` (from, value);
``prompt`` and ``completion``, texts or messages; Alpaca's ``instruction``, ``input`` and ``output``. Rows of
preferences have ``chosen`` and ``rejected``, and ``prompt`` where these do not begin with it (TRL's formats).
Free of torch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.value import canonical_json

Message = dict[str, Any]
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "developer": "developer", "ipython": "ipython",
}  # fmt: skip
"""ShareGPT's ``from`` -> a role."""
TEXTS, MESSAGES = ("text",), ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
)
PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"
EXPECTED = "text, messages, conversations, prompt and completion, or instruction and output"


@dataclass(frozen=True)
class Text:
    """A document, of which every token is trained on."""

    text: str
    place: str = ""

    @property
    def key(self) -> str:
        """Text that identifies the content; the evaluation split hashes it."""
        return self.text

    @property
    def plain(self) -> str:
        """The text alone, as a tokenizer is trained on."""
        return self.text


@dataclass(frozen=True)
class Completion:
    """A prompt, and the answer that follows it without a template."""

    prompt: str
    completion: str
    place: str = ""

    @property
    def key(self) -> str:
        return canonical_json([self.prompt, self.completion])

    @property
    def plain(self) -> str:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Conversation:
    """Messages, which the tokenizer's template turns into text.

    ``first_answer``: index of the first message whose answers count; those of a prompt do not.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    first_answer: int = 0
    place: str = ""

    @property
    def key(self) -> str:
        return canonical_json([list(self.messages), list(self.tools)])

    @property
    def plain(self) -> str:
        return "\n".join(str(message.get("content") or "") for message in self.messages)

    def answers(self) -> list[int]:
        """Return the indices of the messages that are learned."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and index >= self.first_answer and message.get("weight") != 0
        ]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, of which the first is preferred."""

    chosen: Completion | Conversation
    rejected: Completion | Conversation
    place: str = ""

    @property
    def key(self) -> str:
        return canonical_json([self.chosen.key, self.rejected.key])

    @property
    def plain(self) -> str:
        return f"{self.chosen.plain}\n{self.rejected.plain}"


Single = Text | Completion | Conversation
Record = Single | Pair


@dataclass(frozen=True)
class Layout:
    """Columns of a file's rows that hold the record: one of text or messages, or two of a pair."""

    columns: tuple[str, ...]
    is_chat: bool = False  # One column, which holds messages: text in it is their JSON

    def record(self, row: dict[str, Any], place: str, file: str) -> Record | None:
        """Return a row's record; None: its text is empty.

        Raises:
            InputError: a column is missing, or not of the kind that it should be.
        """
        for name in self.columns:
            if row.get(name) is None:
                known = ", ".join(list(row)[:20]) or "none"
                problem = f"{place} has no {name}; its columns are {known}"
                raise InputError(
                    problem, "give each row the same columns, or name one by data.column", file=file
                )
        first = row[self.columns[0]]
        where = _Where(place, file)
        place = where.full
        if len(self.columns) == 1:
            if isinstance(first, str) and not self.is_chat:
                return Text(first.strip(), place) if first.strip() else None
            if not self.is_chat and not isinstance(first, list):
                kind = type(first).__name__
                raise where.wrong(
                    f"no text: its {self.columns[0]} is of type {kind}", "write text in each row"
                )
            return where.conversation(first, row, self.columns[0])
        second = row[self.columns[1]]
        if self.columns[0] == "instruction":
            return where.alpaca(row, self.columns[1])
        if isinstance(first, str) and isinstance(second, str):
            if not second.strip():
                raise where.wrong(f"an empty {self.columns[1]}", "remove the row")
            return Completion(first, second, place)
        prompt, answer = where.messages(first, self.columns[0]), where.messages(second, self.columns[1])
        return Conversation((*prompt, *answer), where.tools(row), len(prompt), place)


@dataclass(frozen=True)
class PairLayout:
    """Columns of a file's rows that hold pairs of answers."""

    columns: tuple[str, ...] = (CHOSEN, REJECTED)

    def record(self, row: dict[str, Any], place: str, file: str) -> Pair | None:
        """Return a row's pair; None: its two answers are equal, so that there is nothing to learn.

        Raises:
            InputError: a column is missing, or not of the kind that it should be.
        """
        where = _Where(place, file)
        for name in self.columns:
            if row.get(name) is None:
                known = ", ".join(list(row)[:20]) or "none"
                problem = f"no {name}; its columns are {known}"
                raise where.wrong(problem, "give each row a prompt, a chosen and a rejected answer")
        answers = [row[name] for name in self.columns]
        if answers[0] == answers[1]:
            return None
        if all(isinstance(answer, str) for answer in answers):
            return where.texts(row.get(PROMPT), *answers)
        if any(isinstance(answer, str) for answer in answers):
            problem = "a chosen and a rejected answer of which one is text, the other messages"
            raise where.wrong(problem, "write both alike")
        return where.conversations(row, *answers)


def layout_of(row: dict[str, Any], place: str, file: str, *, chat: bool, column: str | None) -> Layout:
    """Return which columns of the first row hold the records.

    Args:
        chat: only conversations and pairs are wanted (``format: chat``).
        column: the column that the user names.

    Raises:
        InputError: none does; it names the columns that there are.
    """
    known = ", ".join(list(row)[:20]) or "none"
    if column is not None:
        if column not in row:
            raise InputError("no such column", f"use one of {known}", field="data.column", value=column)
        return Layout((column,), chat)
    candidates = [(name,) for name in MESSAGES] + list(PAIRS)
    candidates = candidates if chat else [(name,) for name in TEXTS] + candidates
    found = next((names for names in candidates if all(row.get(name) is not None for name in names)), None)
    if found is None:
        wanted = EXPECTED.removeprefix("text, ") if chat else EXPECTED
        problem = f"{place} has no text: none of its columns ({known}) is {wanted}"
        if chat:
            problem = f"{place} has no conversation: none of its columns ({known}) is {wanted}"
        raise InputError(problem, "name the column by data.column", file=file)
    return Layout(found, found[0] in MESSAGES)


@dataclass(frozen=True)
class _Where:
    """Reads parts of a row, and names its place in refusals."""

    place: str
    file: str

    @property
    def full(self) -> str:
        """The place with its file, for refusals that come later."""
        return f"{self.file}: {self.place}" if self.file else self.place

    def wrong(self, problem: str, remedy: str) -> InputError:
        return InputError(f"{self.place} has {problem}", remedy, file=self.file)

    def conversation(self, value: Any, row: dict[str, Any], column: str) -> Conversation:
        messages = self.messages(value, column)
        system = row.get("system")
        if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return Conversation(tuple(messages), self.tools(row), 0, self.full)

    def alpaca(self, row: dict[str, Any], answer: str) -> Conversation:
        """Return the conversation of an Alpaca row; ``history`` holds earlier pairs."""
        parts = [row["instruction"], row.get("input") or ""]
        if not all(isinstance(part, str) for part in (*parts, row[answer])):
            raise self.wrong("an instruction, input or output that is no text", "write text")
        messages: list[Message] = []
        if isinstance(row.get("system"), str) and row["system"].strip():
            messages.append({"role": "system", "content": row["system"]})
        for pair in row.get("history") or ():
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise self.wrong("a history that is no list of pairs", "write [[question, answer], ...]")
            messages += self.pair(*pair)
        prompt = "\n".join(part for part in parts if part.strip())
        return Conversation((*messages, *self.pair(prompt, row[answer])), self.tools(row), 0, self.full)

    def texts(self, prompt: Any, chosen: str, rejected: str) -> Pair:
        """Return a pair of texts; without a prompt it is what both begin with, up to a space."""
        if prompt is None:
            both = enumerate(zip(chosen, rejected, strict=False))
            shared = next((at for at, (a, b) in both if a != b), min(len(chosen), len(rejected)))
            shared -= chosen[:shared].endswith(" ")  # Which belongs to the answer, as in TRL's trainer.
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not isinstance(prompt, str):
            raise self.wrong("answers that are text after a prompt that is none", "write all three alike")
        for name, answer in ((CHOSEN, chosen), (REJECTED, rejected)):
            if not answer.strip():
                raise self.wrong(f"an empty {name} answer", "remove the row")
        return Pair(Completion(prompt, chosen, self.full), Completion(prompt, rejected, self.full), self.full)

    def conversations(self, row: dict[str, Any], chosen: Any, rejected: Any) -> Pair:
        """Return a pair of conversations; without messages as a prompt it is what both begin with."""
        is_turn = isinstance(chosen, dict)  # One message, after the conversation so far.
        given = row.get("conversations") if is_turn and row.get(PROMPT) is None else row.get(PROMPT)
        first, second = (
            self.messages([answer] if isinstance(answer, dict) else answer, name)
            for name, answer in ((CHOSEN, chosen), (REJECTED, rejected))
        )
        if isinstance(given, list):
            prompt = self.messages(given, PROMPT)
        else:
            shared = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
            shared = min(len(first), len(second)) if shared is None else shared
            prompt, first, second = first[:shared], first[shared:], second[shared:]
            if not prompt and isinstance(given, str):
                prompt = [{"role": "user", "content": given}]
        if not prompt:
            raise self.wrong("answers without a prompt", 'add a prompt: [{"role": "user", "content": ...}]')
        system = row.get("system")
        if isinstance(system, str) and system.strip() and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": system}, *prompt]
        tools = self.tools(row)
        return Pair(
            Conversation((*prompt, *first), tools, len(prompt), self.full),
            Conversation((*prompt, *second), tools, len(prompt), self.full),
            self.full,
        )

    def pair(self, prompt: Any, answer: Any) -> list[Message]:
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise self.wrong("a history that is not text", "write [[question, answer], ...]")
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    def messages(self, value: Any, column: str) -> list[Message]:
        if isinstance(value, str):
            # Datasets that were written as CSV hold JSON as text.
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.wrong(
                    f"a {column} that is text, not messages", 'write [{"role", "content"}]'
                ) from None
        if not isinstance(value, list) or not value:
            kind = "an empty list" if value == [] else f"a {type(value).__name__}"
            raise self.wrong(f"a {column} that is {kind}, no list of messages", 'write [{"role", "content"}]')
        return list(self._each(value, column))

    def _each(self, value: list[Any], column: str) -> Iterator[Message]:
        for number, given in enumerate(value, 1):
            what = f"message {number} of {column}"
            if not isinstance(given, dict):
                raise self.wrong(f"a {what} that is no mapping", 'write {"role": ..., "content": ...}')
            message = {key: one for key, one in given.items() if one is not None}  # Arrow fills in nulls.
            if "from" in message:
                role = ROLES.get(str(message.pop("from")).lower())
                if role is None:
                    remedy = f"use one of {', '.join(dict.fromkeys(ROLES))}"
                    raise self.wrong(f"a {what} from {str(given['from'])[:40]!r}", remedy)
                message = {"role": role, "content": message.pop("value", None), **message}
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not role:
                raise self.wrong(f"a {what} without a role", 'write {"role": ..., "content": ...}')
            calls = message.get("tool_calls")
            if not isinstance(content, str) and not (content is None and calls):
                content = self._text_parts(content, what)
            yield {**message, "role": role, "content": content if content is not None else ""}

    def _text_parts(self, content: Any, what: str) -> str:
        """Return the text of content in parts: ``[{"type": "text", "text": ...}]``."""
        parts = content if isinstance(content, list) else []
        if not parts or not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in parts):
            kinds = {str(one.get("type")) for one in parts if isinstance(one, dict)} - {"text"}
            problem = (
                f"a {what} with {', '.join(sorted(kinds))}" if kinds else f"a {what} whose content is no text"
            )
            raise self.wrong(problem, "write text")
        return "".join(one["text"] for one in parts)

    def tools(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """Return the row's tools, a list or its JSON text."""
        tools = row.get("tools")
        if isinstance(tools, str) and tools.strip():
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError):
                raise self.wrong("tools that are not JSON", "write a list of tools") from None
        if tools in (None, "", [], {}):
            return ()
        if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
            raise self.wrong("tools that are no list of mappings", "write a list of tools")
        return tuple(tools)
