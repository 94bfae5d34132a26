"""The commands whose work is saved and resumed. Free of slow imports: a signal may come before them."""

from collections.abc import Sequence

from trainfit.spec.stop import NOTHING_SAVED

RESUMABLE = ("train", "sweep")
"""Verbs whose work is saved and resumed."""


def saved_by(words: Sequence[str]) -> str:
    """Return what a command line has saved before its verb begins; empty: it saves nothing."""
    return NOTHING_SAVED if words[:1] and words[0] in RESUMABLE else ""
