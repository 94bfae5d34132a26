"""Conversations as text by a tokenizer's chat template, and which characters of it are answers.

A template with ``{% generation %}`` marks its answers. With another template, an answer is the text that its
message adds to the conversation: it begins where the conversation before it ends, with the prompt for an
answer, and ends where the conversation with it ends. Where a template writes earlier turns differently from
the last one, the message's own content and what followed it as the last turn must stand there. A conversation
whose answers cannot be found so is refused, because labels on other tokens would train something else.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.training.data.records import Conversation, Message

Span = tuple[int, int]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The ChatML format, with its answers marked. Tools and their calls are not written."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_TEMPLATE_BYTES = 2**20
DATE = "26 Jul 2024"
"""The date that templates of Llama 3 write; today's would make other tokens every day."""
FAILURES = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)
"""Exceptions of Python that a template can raise, other than Jinja's."""
REMEDY = "mark the answers with {% generation %} in a template of your own (data.chat_template)"


def template_text(given: str | None) -> str | None:
    """Return the template that ``data.chat_template`` names: ``chatml``, or a Jinja file."""
    if given is None:
        return None
    if given.lower() == "chatml":
        return CHATML
    try:
        return files.read_text(Path(given), MAX_TEMPLATE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        remedy = "name a Jinja file, or chatml"
        raise InputError("no such file", remedy, field="data.chat_template", value=given) from None


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and the special tokens that it may write (``bos_token``: its text)."""

    text: str
    special: dict[str, Any]
    ends: tuple[str, ...] = ()
    """Texts of special tokens; white space after one is no part of an answer."""

    def render(self, conversation: Conversation, *, answers_only: bool) -> tuple[str, list[Span] | None]:
        """Return the text of a conversation, and the spans of its answers; None: everything is learned.

        Raises:
            InputError: the template refuses it, it has no answer, or its answers cannot be found in the text.
        """
        self._refuse_lost_tools(conversation)
        if not answers_only:
            return self._text(conversation, conversation.messages), None
        answers = conversation.answers()
        if not answers:
            problem = f"{conversation.place} has no answer: no message of role assistant that counts"
            raise InputError(problem, "remove the row, or set data.answers_only: false", field="data")
        if MARKED.search(self.text):
            return self._marked(conversation, answers)
        text = self._text(conversation, conversation.messages)
        spans = [self._trimmed(text, self._span(conversation, text, index)) for index in answers]
        return text, spans

    def _refuse_lost_tools(self, conversation: Conversation) -> None:
        """Refuse tools and calls of them that the template never reads: answers would be empty."""
        calls = any(message.get("tool_calls") for message in conversation.messages)
        for key, is_there in (("tool_calls", calls), ("tools", bool(conversation.tools))):
            if is_there and key not in self.text:
                problem = f"{conversation.place} has {key}, which the chat template does not write"
                remedy = f"name a template that writes {key}, or remove them from the data"
                raise InputError(problem, remedy, field="data.chat_template")

    def _marked(self, conversation: Conversation, answers: list[int]) -> tuple[str, list[Span]]:
        """Return the text and the spans that the template marks, one for each message of the assistant."""
        rendered, spans = self._rendered(conversation, conversation.messages, marks=True)
        text, found = rendered[0], [(int(start), int(end)) for start, end in spans[0]]
        roles = [index for index, one in enumerate(conversation.messages) if one["role"] == "assistant"]
        if len(found) != len(roles):
            if answers == roles and found:
                return text, found
            problem = f"{conversation.place}: the chat template marks {len(found)} answers of {len(roles)}"
            raise InputError(
                problem, "mark each answer once with {% generation %}", field="data.chat_template"
            )
        return text, [span for span, index in zip(found, roles, strict=True) if index in answers]

    def _span(self, conversation: Conversation, text: str, index: int) -> Span:
        """Return where the answer ``index`` stands in the whole conversation's text."""
        messages = conversation.messages
        before = self._text(conversation, messages[:index], asks=True)
        after = self._text(conversation, messages[: index + 1])
        if text.startswith(before):
            if after.startswith(before) and text.startswith(after):
                return len(before), len(after)
            content = str(messages[index]["content"]).strip()
            at = after.rfind(content) if content and after.startswith(before) else -1
            start = len(before) + len(text[len(before) :]) - len(text[len(before) :].lstrip())
            whole = content + after[at + len(content) :]
            if at >= len(before) and text.startswith(whole, start):
                return len(before), start + len(whole)
        problem = (
            f"{conversation.place}: the chat template writes message {index + 1} differently within the "
            "whole conversation, so that the answer cannot be found in it"
        )
        raise InputError(problem, f"{REMEDY}, or set data.answers_only: false", field="data.chat_template")

    def _trimmed(self, text: str, span: Span) -> Span:
        """Return a span without the white space after its last special token."""
        start, end = span
        bare = text[start:end].rstrip()
        return (start, start + len(bare)) if bare.endswith(self.ends or ("\0",)) else span

    def _text(self, conversation: Conversation, messages: Sequence[Message], asks: bool = False) -> str:
        return self._rendered(conversation, messages, asks=asks)[0][0] if messages or asks else ""

    def _rendered(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        *,
        asks: bool = False,
        marks: bool = False,
    ) -> tuple[list[str], Any]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Callable[..., Any] = render_jinja_template
        try:
            return render(
                [list(messages)], tools=list(conversation.tools) or None, chat_template=self.text,
                add_generation_prompt=asks, return_assistant_tokens_mask=marks, date_string=DATE,
                **self.special,
            )  # fmt: skip
        except (jinja2.TemplateError, *FAILURES) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            problem = f"{conversation.place}: the chat template refuses it ({reason})".lstrip(": ")
            remedy = "correct the row, or give another template by data.chat_template"
            raise InputError(problem, remedy, field="data") from None


def answer_mask(text: str, offsets: Sequence[Span], spans: list[Span] | None) -> np.ndarray:
    """Return for each token whether it is learned, bool [tokens].

    A token counts if it holds characters of an answer, and before the answer only white space.

    Args:
        offsets: first and last character of each token.
        spans: of the answers, in order; None: all tokens count.
    """
    if spans is None:
        return np.ones(len(offsets), dtype=bool)
    edges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    first, last = edges[:, 0], edges[:, 1]
    mask = np.zeros(len(edges), dtype=bool)
    for start, end in spans:
        mask |= (first >= start) & (first < end) & (last > first)
        for index in np.flatnonzero((first < start) & (last > start)):
            mask[index] |= text[first[index] : start].isspace()
    return mask
