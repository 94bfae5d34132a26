"""Shared by all tests: one thread per process, GPU tests in a session of their own, and common fixtures."""

import gc
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from command_worker import Worker

NO_NUMBER = "only 0-dimensional arrays can be converted to Python scalars"
"""What NumPy says since 2.4 to code that makes a number of an array with one element."""

NOT_FAST = ("processes", "slow", "gpu")
"""Markers of tests that ``make test-fast`` leaves out."""

gc.disable()  # Until all tests are collected: garbage collections during their imports take 3 s.


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all sessions but that of ``-m gpu``: other tests are of a machine without one."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Triton decides at import whether its library runs in the interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if config.getoption("--fast"):
        sys.addaudithook(_refuse_process)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="K/N", help="run every N-th file of tests, beginning with the K-th: K from 1 to N"
    )
    parser.addoption(
        "--fast", action="store_true", help="leave out tests marked processes, slow or gpu; others start none"
    )


def pytest_collection_finish() -> None:
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None and not torch.cuda.is_available():
        # In a CUDA build that sees no GPU, Dynamo's fake tensors make autograd count eight. A backward before
        # them fixes the number of its threads at none, so that tests can fork.
        torch.ones(1, requires_grad=True).sum().backward()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_part(config, items)
    if config.getoption("--fast"):
        left_out = [item for item in items if any(map(item.get_closest_marker, NOT_FAST))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, which sessions of -m gpu alone see"))


def _keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of files that are not of the part asked for."""
    if not config.getoption("--part"):
        return
    number, _, count = config.getoption("--part").partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part {config.getoption('--part')}: give a part as 1/4, 2/4, 3/4 or 4/4")
    files = sorted({item.path for item in items})
    part = set(files[int(number) - 1 :: int(count)])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in part])
    items[:] = [item for item in items if item.path in part]


def _refuse_process(event: str, arguments: tuple[object, ...]) -> None:
    """Fail a test of ``--fast`` that starts a process or a compiler; git, which names the commit, may run."""
    if event == "os.fork" or (event == "subprocess.Popen" and Path(str(arguments[0])).name != "git"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if test.endswith(("(setup)", "(call)")):
            raise RuntimeError(f"make test-fast: mark {test.partition(' ')[0]} as one that starts processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _without_the_interpreter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _without_the_interpreter()


def _without_the_interpreter() -> Iterator[None]:
    """Skip a test that ends with Triton's interpreter's own error, where that does not run."""
    try:
        yield
    except Exception as error:
        if NO_NUMBER not in str(error) or "InterpreterError" not in f"{type(error).__name__} {error}":
            raise
        from kernel_runs import INTERPRETER_RUNS, NO_INTERPRETER

        if INTERPRETER_RUNS:
            raise
        pytest.skip(NO_INTERPRETER)


@pytest.fixture(autouse=True, scope="session")
def _caches_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the ledger caches of tests and user apart; xdist's workers share one."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["TRAINFIT_CACHE"] = str(shared / "trainfit-cache")


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process that runs command lines in forks of itself."""
    with Worker(tmp_path_factory.mktemp("worker")) as running:
        yield running


@pytest.fixture
def empty_gpu_after() -> Iterator[None]:
    """Leave an empty GPU cache to later tests."""
    import torch

    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Start without compiled code, and leave none."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure, and run a sweep's workers, in forks of this process, which have nothing to import."""
    from tiny_sweep import forked_worker
    from trainfit.measurement import run
    from trainfit.sweeps import worker
    from trial_start import a_fork_can_train, forked

    monkeypatch.setattr(run, "measure", partial(run.measure, start=forked))
    if a_fork_can_train():
        monkeypatch.setattr(worker, "start", forked_worker)
