"""The console of every table, title and progress bar: plain text only, control characters escaped."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from trainfit.spec.files import writing
from trainfit.spec.printable import STANDARD_ERROR, STANDARD_OUTPUT, printable


class Terminal(Console):
    """A rich console that reads no styles out of text and sends no control character of it to the terminal.

    Colours and cursor movements of rich's own renderables are control segments and styles; they pass.
    """

    def __init__(self, **options: Any) -> None:
        plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
        super().__init__(**plain | options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; where the stream does not take it, the OSError names it."""
        with writing(STANDARD_ERROR if self.stderr else STANDARD_OUTPUT):
            super().print(*objects, **options)

    def render_str(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, text: str, **options: Any
    ) -> Text:
        """Escape before the text is measured, so that columns fit what is shown."""
        return super().render_str(printable(text, lines=True), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape what does not come as a str, such as a ``Text`` or a title."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, lines=True), segment.style)
