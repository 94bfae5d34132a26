"""Without a world size several ranks are refused at once in one line; one runs and leaves no group behind."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainfit
from trainfit.spec.errors import InputError
from user_training import mlp, steps


def traced(setup: Callable[[], Any]) -> Any:
    def train() -> None:
        setup()
        model = mlp().cuda()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        if dist.is_initialized():
            dist.all_reduce(torch.ones(2, device="cuda"))
            dist.barrier()

    return trainfit.trace(train)


def launched(monkeypatch: pytest.MonkeyPatch, num_ranks: int, rank: int = 0) -> None:
    """As torchrun sets the environment."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")


def accelerated() -> None:
    from accelerate import Accelerator

    Accelerator()


SEVERAL: dict[str, Callable[[], Any]] = {
    "environment": lambda: dist.init_process_group("nccl"),
    "argument": lambda: dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:1", rank=1, world_size=4
    ),
    "url": lambda: dist.init_process_group("gloo", init_method="tcp://127.0.0.1:1?rank=1&world_size=4"),
    "store": lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=2),
    "store that waits": lambda: dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=1)),
    "mesh": lambda: dist.init_device_mesh("cuda", (2,)),
    "accelerate": accelerated,
}


@pytest.mark.parametrize("way", SEVERAL)
def test_several_ranks_are_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, rank=0 if way == "environment" else 1)
    with pytest.raises(InputError, match="a process group of [24] ranks.*--world-size [24]") as refused:
        traced(SEVERAL[way])
    assert "\n" not in str(refused.value)
    assert not dist.is_initialized()


def test_one_rank_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/store"
    found = traced(lambda: dist.init_process_group("nccl", init_method=url, rank=0, world_size=1))
    assert found.peak_allocated_bytes >= traced(lambda: None).peak_allocated_bytes
    assert not dist.is_initialized()
    launched(monkeypatch, 1)
    assert traced(dist.init_process_group).code.num_steps == 1
    assert not dist.is_initialized()


def test_a_group_of_unknown_size_names_the_option() -> None:
    with pytest.raises(InputError, match="unknown size.*--world-size N"):
        traced(lambda: dist.init_process_group("nccl"))


def test_processes_and_data_parallel_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--world-size"):
        traced(lambda: torch.multiprocessing.spawn(print, nprocs=2))  # pyright: ignore

    def setup() -> None:
        dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        torch.nn.parallel.DistributedDataParallel(mlp().cuda())

    with pytest.raises(InputError, match="DistributedDataParallel"):
        traced(setup)
    assert not dist.is_initialized()
