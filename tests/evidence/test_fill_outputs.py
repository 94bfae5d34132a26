"""The program that fills console blocks, and that the committed blocks are what their commands print."""

import shlex
from pathlib import Path

import pytest
import torch

from command_worker import Worker
from evidence.scripts.fill_outputs import commands, fill, refreshed
from page_claims import ROOT

TASKS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/tasks").glob("*.md"))
PAGES = (*TASKS, "docs/guide/predict.md", "docs/reference/gpus.md", "docs/reference/models.md",
         "docs/internals/communication.md")  # fmt: skip
"""The ten tasks, and some. The others take a minute of processor time: ``make outputs``."""


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the pages show torch 2.13's output")
@pytest.mark.parametrize("page", PAGES)
def test_the_committed_pages_show_what_is_printed(page: str, worker: Worker) -> None:
    def run(command: str, folder: Path) -> str:
        words = shlex.split(command.replace("\\\n", ""))[1:]
        columns = "import os; os.environ['COLUMNS'] = '80'"
        done = worker.run(*words, folder=folder, memory_bytes=None, first=columns)
        assert done.code in (0, 1), done.err
        return done.out

    text = (ROOT / page).read_text("utf-8")
    assert fill(text, run) == text, f"python -m evidence.scripts.fill_outputs {page}"


def test_a_block_keeps_its_trim() -> None:
    shown = ["FITS: 1 GiB", "...", "Memory", "  weights  2 MiB  █▏", "..."]
    printed = [
        "FITS: 3.5 GiB",
        "  speed 4",
        "",
        "Memory",
        "  weights  20 GiB  ███",
        "  rest  1 GiB",
        "",
        "Notes",
    ]
    assert refreshed(shown, printed) == [
        "FITS: 3.5 GiB", "...", "Memory", "  weights  20 GiB  ███", "..."
    ]  # fmt: skip
    assert refreshed(printed, printed) == printed
    assert refreshed([], printed) == []


def test_a_line_that_is_printed_no_more_is_named() -> None:
    with pytest.raises(ValueError, match="'Notes'"):
        refreshed(["...", "Notes", "..."], ["FITS", "Memory at the peak"])


def test_commands_of_a_block_are_told_apart() -> None:
    block = "$ trainfit mfu \\\n    --price 2\nA\nB\n$ trainfit gpus\nC\n"
    assert list(commands(block)) == [("trainfit mfu \\\n    --price 2", ["A", "B"]), ("trainfit gpus", ["C"])]
    assert fill("```console\n$ trainfit train x\nold\n```\n", lambda *_: "new") == (
        "```console\n$ trainfit train x\nold\n```\n"
    )
    assert fill("```console\n$ trainfit mfu\nold\n```\n", lambda *_: "new\n") == (
        "```console\n$ trainfit mfu\nnew\n```\n"
    )
