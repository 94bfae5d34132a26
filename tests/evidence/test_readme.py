"""evidence/README.md names every record and every command, so that each can be made again."""

import importlib.util
import re
from fnmatch import fnmatchcase

from page_claims import ROOT

FOLDER = ROOT / "evidence"
TEXT = (FOLDER / "README.md").read_text("utf-8")
TABLES = "\n".join(line for line in TEXT.splitlines() if line.startswith("|"))


def spelled(pattern: str) -> list[str]:
    """The patterns that one with ``{a,b}`` stands for."""
    found = re.fullmatch(r"(.*?)\{([^}]*)\}(.*)", pattern)
    return [f"{found[1]}{one}{found[3]}" for one in found[2].split(",")] if found else [pattern]


def test_every_record_is_named_in_a_table() -> None:
    patterns = [one for each in re.findall(r"`([^` ]+)`", TABLES) for one in spelled(each)]
    made = TABLES.partition("| records | what | made by | GPU |")[2]
    makers = [one for each in re.findall(r"`([^` ]+)`", made) for one in spelled(each)]
    files = [str(path.relative_to(FOLDER / "records")) for path in (FOLDER / "records").rglob("*.json*")]
    assert len(files) > 140
    assert [file for file in files if not any(fnmatchcase(file, one) for one in patterns)] == []
    assert [file for file in files if not any(fnmatchcase(file, one) for one in makers)] == []


def test_every_command_exists_and_every_program_is_named() -> None:
    named = set(re.findall(r"python -m (evidence\.scripts\.[\w.]+)", TEXT))
    assert all(importlib.util.find_spec(name) is not None for name in named)
    programs = [path for path in (FOLDER / "scripts").rglob("*.py") if "__main__" in path.read_text("utf-8")]
    assert len(programs) > 15
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): path.stem
        for path in programs
    }
    assert [name for name, stem in modules.items() if name not in named and f"`{stem}`" not in TEXT] == []


def test_every_page_is_in_the_table() -> None:
    linked = re.findall(r"^\| \[[^]]+\]\((pages/[\w-]+\.md)\)", TEXT, re.MULTILINE)
    assert sorted(linked) == sorted(f"pages/{path.name}" for path in (FOLDER / "pages").glob("*.md"))
