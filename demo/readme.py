"""Refresh the trimmed output of the README's first command (``make readme``)."""

import os
import re
import subprocess
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n.*?```", re.DOTALL)
PARAGRAPHS = 2  # The verdict, and memory at the peak.


def main() -> None:
    """Run the command of the README's console block and put what it prints into the block."""
    text = README.read_text(encoding="utf-8")
    found = BLOCK.search(text)
    assert found is not None, "README.md has no console block"
    out = subprocess.run(
        found["command"].split(),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    ).stdout
    shown = "\n\n".join(out.strip().split("\n\n")[:PARAGRAPHS])
    block = f"```console\n$ {found['command']}\n{shown}\n...\n```"
    README.write_text(text[: found.start()] + block + text[found.end() :], encoding="utf-8")


if __name__ == "__main__":
    main()
