"""``torch.load`` and ``torch.save`` under ``trainfit.trace``."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import trainfit
from trainfit.spec.errors import InputError
from user_training import inside, mlp, steps

TINY = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
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


def test_a_saved_file_is_moved_and_removed(tmp_path: Path) -> None:
    """A checkpoint is written to another name first, as scripts do that may be stopped."""
    first, last, best = (str(tmp_path / name) for name in ("ck.tmp", "ck.pt", "best.pt"))

    def check() -> None:
        torch.save(torch.ones(1024, device="cuda"), first)
        assert os.path.getsize(first) > 4096
        os.replace(first, last)
        assert not os.path.exists(first)
        shutil.copy(last, best)
        os.remove(last)
        assert not Path(last).exists()
        assert Path(best).is_file()
        (tmp_path / "a").mkdir()
        Path(best).rename(tmp_path / "a" / "best.pt")
        (tmp_path / "a").rename(tmp_path / "b")
        assert torch.load(tmp_path / "b" / "best.pt").shape == (1024,)

    inside(check)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_cannot_be_kept_is_not_read_from_an_older_file(table: Path) -> None:
    def save() -> None:
        torch.save({"rule": lambda: None}, table)

    def load() -> None:
        save()
        torch.load(table)

    assert any(f"{table} could not be kept" in note for note in inside(save).assumptions)
    with pytest.raises(InputError, match=r"table\.pt: it was saved in this trace"):
        inside(load)


def test_safetensors_files_are_read_and_not_written(tmp_path: Path) -> None:
    """Also of transformers' models: saved, loaded by ``device_map``, trained."""
    LlamaForCausalLM(TINY).save_pretrained(tmp_path / "model")
    real = load_file(tmp_path / "model" / "model.safetensors")

    def check() -> None:
        # On the host: transformers tells tied weights by the addresses of storages.
        LlamaForCausalLM(TINY).save_pretrained(tmp_path / "of-the-host")
        for device in ("cuda", 0):
            loaded = load_file(tmp_path / "model" / "model.safetensors", device=device)
            assert all(t.is_cuda for t in loaded.values())
        name, value = next(iter(loaded.items()))
        assert value.sum().item() == real[name].sum().item()
        for place in ("auto", {"": 0}, torch.device(0)):
            model = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map=place)
            assert model.device == torch.device("cuda", 0)
        model.save_pretrained(tmp_path / "saved")
        again = load_file(tmp_path / "saved" / "model.safetensors", device="cuda")
        assert again.keys() == real.keys()
        assert len(safetensors.torch.save({"a": torch.ones(2, device="cuda")})) == 0

    assert any("safetensors wrote nothing" in note for note in inside(check).assumptions)
    assert not [*(tmp_path / "saved").glob("*.safetensors")]


@pytest.mark.slow
def test_the_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    data = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 32

    def trainer(steps: int, use_cpu: bool) -> Trainer:
        options: dict[str, Any] = {
            "max_steps": steps,
            "save_steps": 2,
            "report_to": "none",
            "use_cpu": use_cpu,
        }
        arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, **options)
        return Trainer(LlamaForCausalLM(TINY), arguments, train_dataset=data)  # pyright: ignore

    trainer(2, True).train()
    begun: list[int] = []

    class Step(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

    def run() -> None:
        resumed = trainer(8, False)
        resumed.add_callback(Step())
        resumed.train(resume_from_checkpoint=True)

    assert trainfit.trace(run, steps=5).code.num_steps == 5  # pyright: ignore[reportOptionalMemberAccess]
    assert begun[:4] == [2, 3, 4, 5]
