"""Run the notebooks of examples/notebooks and store what they show (``make notebooks``).

Needs nbclient, nbformat and ipykernel (requirements/libraries.txt). A cell with the tag ``measured`` shows
what this machine measures; every other output depends on the code and the versions alone, and
tests/libraries/test_notebooks.py compares it with the stored one.

    python -m evidence.scripts.fill_notebooks              run every notebook
    python -m evidence.scripts.fill_notebooks NAME ...     run these, such as will-it-fit
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
MEASURED = "measured"
"""Tag of a cell whose output is this machine's."""
TIMEOUT_S = 900
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""Of a stored notebook: nothing of the machine that ran it."""
NO_WIDGETS = "ignore:IProgress not found"
"""A warning of tqdm, which transformers imports, where ipywidgets are not installed."""


def names() -> list[str]:
    """Return the notebooks' names."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def path_of(name: str) -> Path:
    """Return a notebook's file."""
    return FOLDER / f"{name}.ipynb"


def executed(name: str) -> Any:
    """Return a notebook as it runs here, in an empty folder and without what only this machine knows."""
    notebook = nbformat.read(path_of(name), as_version=4)
    kept = {one: os.environ.get(one) for one in ("PYTHONPATH", "PYTHONWARNINGS", "COLUMNS")}
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), kept["PYTHONPATH"]])),
        "PYTHONWARNINGS": NO_WIDGETS, "COLUMNS": "100",
    }  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=TIMEOUT_S, resources=resources, record_timing=False).execute()
    finally:
        for one, value in kept.items():
            os.environ.pop(one, None) if value is None else os.environ.update({one: value})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: Sequence[Any]) -> list[Any]:
    """Return outputs with each stream's stretch as one, however often the kernel flushed it."""
    found: list[Any] = []
    for one in outputs:
        if found and one.output_type == "stream" == found[-1].output_type and one.name == found[-1].name:
            found[-1].text += one.text
        else:
            found.append(one)
    return found


def outputs(cell: Any) -> list[dict[str, Any]]:
    """Return what a cell shows, without the number of its execution."""
    shown: list[dict[str, Any]] = []
    for one in cell.get("outputs", ()):
        if one.output_type == "stream":
            shown.append({"stream": one.name, "text": one.text})
        else:
            shown.append({"data": dict(one.get("data", one))})
    return shown


def is_measured(cell: Any) -> bool:
    """Return whether a cell shows what this machine measures."""
    return MEASURED in cell.metadata.get("tags", ())


def machine_paths(text: str) -> list[str]:
    """Return paths of the machine in a stored notebook."""
    return re.findall(r"/(?:home|root|tmp|work|Users|opt|usr)/[\w./-]*", text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    for name in parser.parse_args(arguments).names or names():
        notebook = executed(name)
        text = nbformat.writes(notebook, version=4)
        if found := machine_paths(text):
            sys.exit(f"{name}: paths of this machine: {', '.join(dict.fromkeys(found))}")
        path_of(name).write_text(f"{text}\n", "utf-8")
        print(f"filled: {path_of(name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
