"""What every test shares: one thread a process (several run side by side), and GPU tests skipped with a reason."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Kernels run in Triton's interpreter; what Triton's own library is made of is decided when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none is visible to torch here"))


@pytest.fixture(autouse=True, scope="session")
def _caches_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ledgers cached by these tests stay out of the user's cache, and theirs out of the tests."""
    os.environ["TRAINFIT_CACHE"] = str(tmp_path_factory.mktemp("trainfit-cache"))


@pytest.fixture
def empty_gpu_after() -> Iterator[None]:
    """The GPU is left to the tests after with nothing cached."""
    import torch

    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, and nothing left for the tests after."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
