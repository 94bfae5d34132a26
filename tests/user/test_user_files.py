"""``torch.load`` and ``torch.save`` under ``trainfit.trace``."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from user_training import inside, mlp, steps

DEVICES = {
    "host": (None, "cpu", lambda storage, location: storage),
    "device": (
        "cuda",
        "cuda:0",
        torch.device("cuda", 0),
        {"cpu": "cuda:0"},
        lambda storage, location: storage.cuda(0),
    ),
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.pt"
    torch.save(
        {"table": torch.arange(12.0).view(3, 4), "eighths": torch.ones(4).to(torch.float8_e4m3fn)}, path
    )
    return path


def test_a_file_is_loaded_where_the_code_says(table: Path) -> None:
    def check() -> None:
        for side, locations in DEVICES.items():
            for location in locations:
                for source in (table, str(table), io.BytesIO(table.read_bytes())):
                    loaded = torch.load(source, map_location=location)
                    assert all(t.is_cuda == (side == "device") for t in loaded.values())
                    assert loaded["table"].sum().item() == 66
        with table.open("rb") as file:
            assert torch.load(file, map_location="cuda")["table"].is_cuda

    inside(check)


def test_tensors_that_share_memory_share_it_on_the_device(tmp_path: Path) -> None:
    whole = torch.ones(1 << 20)
    torch.save({"whole": whole, "half": whole[: 1 << 19]}, tmp_path / "shared.pt")

    def check() -> None:
        before = torch.cuda.memory_allocated()
        loaded = torch.load(tmp_path / "shared.pt", map_location="cuda")
        assert torch.cuda.memory_allocated() - before == 4 << 20
        assert loaded["half"].data_ptr() == loaded["whole"].data_ptr()

    inside(check)


def _checkpoint(path: Path) -> None:
    model = mlp(64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(7):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


@pytest.mark.parametrize("location", [None, "cuda"])
@pytest.mark.parametrize("kind", [{}, {"fused": True}, {"capturable": True}])
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, location: Any, kind: dict[str, Any]) -> None:
    """An optimizer's step counters have their values, on which its bias correction depends."""
    _checkpoint(tmp_path / "checkpoint.pt")

    def check() -> None:
        model = mlp(64).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), **kind)
        loaded = torch.load(tmp_path / "checkpoint.pt", map_location=location)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        optimizer.param_groups[0].update(kind)
        if kind:
            optimizer.load_state_dict(optimizer.state_dict())  # Moves the counters, as a resumed run does.
        (state, *_) = optimizer.state.values()
        assert state["step"].item() == 7
        assert state["exp_avg"].is_cuda
        steps(model, optimizer, 1, width=64)
        assert optimizer.state[model[0].weight]["step"].item() == 8

    inside(check)


def test_what_the_code_saved_is_loaded_again(tmp_path: Path) -> None:
    path, buffer = tmp_path / "best.pt", io.BytesIO()

    def check() -> None:
        model = mlp(64).cuda()
        tied = nn.ModuleList([model[0], model[0]])
        known = torch.arange(3)
        torch.save({"model": model.state_dict(), "tied": tied, "known": known, "epoch": 3}, path)
        torch.save(known, buffer)
        known += 1
        loaded = torch.load(path, weights_only=False)
        assert loaded["epoch"] == 3
        assert loaded["known"].tolist() == torch.load(buffer).tolist() == [0, 1, 2]
        assert loaded["model"]["0.weight"].is_cuda
        assert loaded["model"]["0.weight"].shape == (64, 64)
        assert loaded["tied"][0].weight is loaded["tied"][1].weight
        assert not torch.load(path, map_location="cpu", weights_only=False)["model"]["0.weight"].is_cuda
        model.load_state_dict(loaded["model"])

    assert any("wrote nothing" in note for note in inside(check).assumptions)
    assert not path.exists()
