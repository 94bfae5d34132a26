"""Reading SASS: the loops of a kernel."""

import re


def loops(sass: str) -> list[str]:
    """The instructions of each loop, from where a branch jumps back to until that branch."""
    instructions = [
        (int(at, 16), text.strip())
        for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    ]
    found = []
    for at, text in instructions:
        branch = re.search(r"\bBRA (?:`\(.*\)|0x([0-9a-f]+))", text)
        if branch and branch[1] and int(branch[1], 16) < at:
            start = int(branch[1], 16)
            found.append("\n".join(f"{one} " for where, one in instructions if start <= where <= at))
    return found
