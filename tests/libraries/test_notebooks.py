"""Notebooks of examples/ run, and show what is stored in them."""

import json
import re
from typing import Any

import nbformat
import pytest

from evidence.scripts import fill_notebooks as notebooks

REMEDY = "run make notebooks"


def stored(name: str) -> Any:
    return nbformat.read(notebooks.path_of(name), as_version=4)


def test_there_are_notebooks() -> None:
    assert {"will-it-fit", "trace-my-trainer", "plan-and-measure"} <= set(notebooks.names())


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.names())
def test_a_notebook_shows_what_is_stored_in_it(name: str) -> None:
    """Outputs of the virtual GPU are equal to the last digit; those of this machine have the same form."""
    kept, found = stored(name), notebooks.executed(name)
    num_compared = 0
    for before, after in zip(kept.cells, found.cells, strict=True):
        shown = [notebooks.outputs(cell) for cell in (before, after)]
        if notebooks.is_measured(before):
            kinds = [[sorted(one.get("data", ["stream"])) for one in each] for each in shown]
            assert kinds[0] == kinds[1], before.source
        else:
            assert shown[0] == shown[1], f"{before.source}\n{REMEDY}"
            num_compared += bool(shown[0])
    assert num_compared >= 2


@pytest.mark.parametrize("name", notebooks.names())
def test_a_stored_notebook_is_whole_and_says_nothing_of_its_machine(name: str) -> None:
    notebook = stored(name)
    nbformat.validate(notebook)
    text = notebooks.path_of(name).read_text("utf-8")
    assert not notebooks.machine_paths(text)
    assert notebook.metadata == notebooks.METADATA
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), REMEDY
    for cell in code:
        assert not {"error"} & {one.output_type for one in cell.outputs}
        assert not [one for one in cell.outputs if one.get("name") == "stderr"]
    pictures = re.findall(r'<img [^>]*alt=\\"([^"]+)\\"', json.dumps([cell.outputs for cell in code]))
    assert len(pictures) >= 2
    assert all(re.search(r"\d", one) for one in pictures)  # Each says its numbers in words.


@pytest.mark.parametrize("name", notebooks.names())
def test_links_of_a_notebook_lead_somewhere(name: str) -> None:
    for cell in stored(name).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)\)", cell.source):
                assert (notebooks.FOLDER / target).exists(), target
