"""Two processes of one gloo group, which all tests of this folder share."""

from collections.abc import Iterator

import pytest

from rank_processes import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as running:
        yield running
