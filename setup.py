"""Build script: the description of the package, made of README.md. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#|mailto:)(?P<path>[^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def description(readme: str, repository: str | None, version: str) -> str:
    """Return a README as a page outside the repository can show it, such as a package index.

    Relative links lead nowhere there. They become links to the files of the version's tag; without a
    published repository, a link becomes its text, and an image is left out.

    Args:
        repository: address of the published repository, as ``project.urls`` has it; None: not published.
    """

    def absolute(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["image"] else link["text"]
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository.rstrip('/')}/{kind}/v{version}/{link['path']})"

    texts_and_code = CODE.split(readme)
    texts_and_code[::2] = (RELATIVE_LINK.sub(absolute, text) for text in texts_and_code[::2])
    return "".join(texts_and_code)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = (ROOT / "src" / "trainfit" / "__init__.py").read_text(encoding="utf-8")
    setup(
        long_description=description(
            (ROOT / "README.md").read_text(encoding="utf-8"),
            project.get("urls", {}).get("Repository"),
            re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)[0],
        ),
        long_description_content_type="text/markdown",
    )
