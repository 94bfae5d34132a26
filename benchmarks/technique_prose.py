"""A technique's own words: its file's docstring, in parts.

A docstring's first paragraph says what the technique is. Of the others, the one that begins with ``Helps`` says when, ``Costs`` what
it costs in quality, ``Refuses`` what only shows once a model is built; the rest says more of what it does.
"""

import inspect
import re
from dataclasses import dataclass

from trainfit.techniques.base import Technique

LEADS = ("Helps", "Costs", "Refuses")


@dataclass(frozen=True)
class Prose:
    """The parts, as Markdown."""

    summary: str
    does: str
    helps: str
    costs: str
    refuses: str


def prose(technique: Technique) -> Prose:
    """The parts of a technique's docstring.

    Raises:
        ValueError: a part is missing or there twice, which is a bug of the technique's file.
    """
    summary, *paragraphs = inspect.cleandoc(technique.doc or "").split("\n\n")
    parts: dict[str, str] = {}
    for lead in LEADS:
        found = [text for text in paragraphs if text.startswith(lead)]
        if len(found) != 1:
            raise ValueError(
                f"{technique.name}: {len(found)} paragraphs of its docstring begin with {lead!r}"
            )
        parts[lead.lower()] = markdown(found[0])
    rest = [markdown(text) for text in paragraphs if not text.startswith(LEADS)]
    return Prose(summary=markdown(summary), does="\n\n".join(rest), **parts)


def markdown(text: str) -> str:
    """A docstring's paragraph: its lines joined (lists apart), code in single quotes, papers linked."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and not line.startswith("- "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    joined = "\n".join(lines).replace("``", "`")
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", joined)
