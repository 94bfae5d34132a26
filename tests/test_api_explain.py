"""``trainfit.explain``: recipes, snapshots and code, as values that print as the command does."""

import lzma
from pathlib import Path

import pytest
import torch

import trainfit
from trainfit.cli.main import main
from trainfit.spec.explanation import Explanation

SNAPSHOTS = Path(__file__).parent / "data" / "snapshots"


def test_a_recipe_prints_as_the_command_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    found = trainfit.explain("gpt2", gpu="h100-sxm", seq=64)
    assert main(["explain", "gpt2", "--gpu", "h100-sxm", "--seq", "64"]) == 0
    assert capsys.readouterr().out.strip() == found.text(width=100).strip()
    assert found.peak_allocated_bytes == trainfit.predict("gpt2", gpu="h100-sxm", seq=64).peak_allocated_bytes
    assert dict(Explanation.model_validate_json(found.model_dump_json())) == dict(found)
    found = trainfit.explain("gpt2", gpu="h100-sxm", seq=512)
    other = trainfit.explain("gpt2", gpu="h100-sxm", seq=512, recompute="full")
    changes = found.difference(other)
    assert "The second's peak minus the first's" in str(changes)
    shown = changes._repr_html_()
    assert (
        f"-{(found.peak_allocated_bytes - other.peak_allocated_bytes) / 2**20:.2f} MiB at the peak" in shown
    )
    assert shown.count("<img ") == 1
    assert found._repr_html_().count("<img ") == 2


def test_a_snapshot_and_code_are_explained_alike(tmp_path: Path) -> None:
    file = tmp_path / "whole.pickle"
    file.write_bytes(lzma.decompress((SNAPSHOTS / "whole.pickle.xz").read_bytes()))
    found = trainfit.explain(file)
    assert found.snapshot is not None
    assert found.snapshot.file in "".join(str(found).split())  # A long path is broken over lines.
    assert found._repr_html_().count("<img ") == 2

    def train() -> None:
        layer = torch.nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(3):
            layer(torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert "train, on 1 x h100-sxm" in str(trainfit.explain(train, gpu="h100-sxm"))


def test_what_it_does_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("CUDA out of memory")
    with pytest.raises(trainfit.InputError, match="trainfit explain"):
        trainfit.explain(tmp_path / "run.log")
    with pytest.raises(trainfit.InputError, match="only a snapshot"):
        trainfit.explain("gpt2", device=1)
    with pytest.raises(trainfit.InputError, match="its GPU and count"):
        trainfit.explain(lambda: None, batch=2)
