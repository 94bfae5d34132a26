"""``trainfit trace``: an estimate of a script."""

import json
from pathlib import Path

import pytest

from trainfit.cli.main import main
from trainfit.spec.result import Estimate

SCRIPT = """
import sys
import torch

print("arguments", sys.argv[1:])
if __name__ == "__main__":
    model = torch.nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
    {end}
"""


def script(folder: Path, end: str = "sys.exit(0)") -> str:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("{end}", end))
    return str(path)


def test_a_script_becomes_an_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    assert main(["trace", "--json", "--gpu", "h100", "--steps", "2", path, "--lr", "3"]) == 0
    printed = capsys.readouterr()
    estimate = Estimate.model_validate_json(printed.out)
    assert estimate.code is not None
    assert (estimate.code.name, estimate.code.gpu, estimate.code.num_steps) == ("train.py", "h100-sxm", 2)
    assert estimate.params == 1024**2
    assert "arguments ['--lr', '3']" in printed.err
    assert json.loads(printed.out).keys() == Estimate.model_fields.keys()
    assert main(["trace", "--world-size", "2", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "FITS on each of 2 x h200" in text
    assert "Memory of one GPU" in text
    assert "no collective ran: the ranks train independently" in text


@pytest.mark.parametrize(
    ("end", "words"), [("sys.exit(3)", "ended with exit code 3"), ("raise KeyError('lr')", "KeyError: 'lr'")]
)
def test_a_script_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, words: str
) -> None:
    assert main(["trace", "--steps", "9", script(tmp_path, end)]) == 65
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert main(["trace", "nothing.py"]) == 65
    assert "nothing.py" in capsys.readouterr().err
