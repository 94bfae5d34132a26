"""A stand-in for the package ``ray`` with signatures of Ray 2.58's Core API; it checks how it is called."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception):
        super().__init__(f"ray::_task()\n{cause}")
        self.cause = cause


class WorkerCrashedError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


class Reference:
    """An ObjectRef: made by a task's ``remote``, read by ``get``."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], needs: dict[str, float]):
        self.function, self.arguments, self.needs = function, arguments, needs


class Ray:
    """The module: ``log`` has the calls in order; a task runs when ``get`` asks for its result.

    Args:
        nodes: the resources of each node of the cluster, such as {"CPU": 8.0, "GPU": 1.0}.
        dead: the same of nodes that left it.
    """

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, OutOfMemoryError=OutOfMemoryError
    )

    def __init__(self, *nodes: dict[str, float], dead: Sequence[dict[str, float]] = ()):
        self._nodes = [(True, node) for node in nodes] + [(False, node) for node in dead]
        self.log: list[Any] = []
        self.needs: list[dict[str, float]] = []  # Of each task begun
        self.running: list[Reference] = []
        self.cancelled: list[Reference] = []
        self.most_running = 0
        self.is_initialized = False

    def init(
        self, address: str | None = None, *, include_dashboard: bool | None = None,
        log_to_driver: bool = True, logging_level: int | str = "info", configure_logging: bool = True,
    ) -> None:  # fmt: skip
        assert not self.is_initialized, "calling init twice is an error"
        if address == "nowhere:6379":
            raise ConnectionError("Could not find any running Ray instance.\nmore")
        self.is_initialized = True
        self.log.append(("init", address))

    def shutdown(self) -> None:
        self.is_initialized = False
        self.log.append("shutdown")

    def cluster_resources(self) -> dict[str, float]:
        assert self.is_initialized
        alive = [node for is_alive, node in self._nodes if is_alive]
        return {name: sum(node.get(name, 0.0) for node in alive) for node in alive for name in node}

    def nodes(self) -> list[dict[str, Any]]:
        assert self.is_initialized
        return [{"Alive": is_alive, "Resources": dict(node)} for is_alive, node in self._nodes]

    def remote(self, function: Callable[..., Any]) -> Any:
        assert self.is_initialized

        def options(*, max_retries: int = 3, num_cpus: float = 1, num_gpus: float = 0) -> Any:
            assert max_retries == 0, "a trial that died is told, not begun again"
            return SimpleNamespace(
                remote=lambda *arguments: self._start(function, arguments, num_cpus, num_gpus)
            )

        return SimpleNamespace(options=options)

    def _start(self, function: Any, arguments: tuple[Any, ...], cpus: float, gpus: float) -> Reference:
        assert all(isinstance(one, str) for one in arguments), "only text is sure to reach another version"
        reference = Reference(function, arguments, {"CPU": cpus, "GPU": gpus})
        self.running.append(reference)
        self.needs.append(reference.needs)
        for name, total in self.cluster_resources().items():
            assert sum(one.needs.get(name, 0) for one in self.running) <= total, "it would wait in the queue"
        self.most_running = max(self.most_running, len(self.running))
        return reference

    def wait(
        self, refs: list[Reference], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Reference], list[Reference]]:
        """Return the last one that was begun: tasks end in any order."""
        assert isinstance(refs, list)
        assert set(refs) == set(self.running), "every running task is waited for"
        assert 0 < num_returns <= len(refs)
        assert timeout is not None, "a signal must be seen"
        return refs[-num_returns:], refs[:-num_returns]

    def get(self, reference: Reference) -> Any:
        self.running.remove(reference)
        try:
            return reference.function(*reference.arguments)
        except RayError:
            raise
        except Exception as error:
            raise RayTaskError(error) from error

    def cancel(self, reference: Reference, *, force: bool = False) -> None:
        assert force, "else a task that began runs on"
        self.cancelled.append(reference)
