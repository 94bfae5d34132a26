"""``trainfit trace``: an estimate of a script."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

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


def traced(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Estimate, str]:
    assert main(["trace", "--json", "--steps", "1", *words]) == 0
    printed = capsys.readouterr()
    return Estimate.model_validate_json(printed.out), printed.err


def test_a_script_is_started_as_its_own_command_line_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    script(tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    one_process = [
        ["-m", "package.train", "--lr", "3"],
        ["python", "-u", "train.py", "--lr", "3"],
        ["python3", "-m", "package.train", "--lr", "3"],
        ["--", "train.py", "--lr", "3"],
        ["accelerate", "launch", "--mixed_precision", "bf16", "train.py", "--lr", "3"],
    ]
    command = tmp_path / "bin" / "tune"  # As pip writes for a package's entry point.
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n" + (tmp_path / "train.py").read_text())
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    one_process.append(["tune", "--lr", "3"])
    for words in one_process:
        found, said = traced(words, capsys)
        assert "arguments ['--lr', '3']" in said, words
        assert found.num_gpus == 1
    several = [
        ["torchrun", "--nproc-per-node", "2", "--nnodes=2", "train.py", "--lr", "3"],
        ["python", "-m", "torch.distributed.run", "--nproc_per_node=4", "-m", "package.train", "--lr", "3"],
        ["accelerate", "launch", "--num_processes", "4", "--multi_gpu", "train.py", "--lr", "3"],
    ]
    for words in several:
        found, said = traced(words, capsys)
        assert "arguments ['--lr', '3']" in said, words
        assert found.num_gpus == 4


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--gup", "a100", "train.py"], 2, "--gup"),
        (["train.py", "--gpu", "a100"], 2, "trainfit's own options stand before it"),
        (["train.py", "--world-size=4"], 2, "write -- before the script"),
        (["deepspeed", "train.py"], 65, "DeepSpeed"),
        (["torchrun", "--nproc-per-nod", "x"], 65, "torchrun"),
        (["torchrun", "nothing.py"], 65, "nothing.py"),
        (["python", "-c", "print()"], 65, "no script"),
        (
            ["--world-size", "2", "torchrun", "--nproc-per-node", "4", "train.py"],
            65,
            "leave --world-size out",
        ),
    ],
)
def test_a_command_line_that_cannot_be_followed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    said: str,
) -> None:
    script(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *words]) == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_option_that_the_script_has_too_is_the_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path, "# takes --gpu")
    _, said = traced([path, "--gpu", "a100"], capsys)
    assert "is the script's; trainfit's own options stand before it" in said
    assert "arguments ['--gpu', 'a100']" in said
    _, said = traced(["--", path, "--steps", "5"], capsys)
    assert "arguments ['--steps', '5']" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(
            "torch.cuda.tunable.enable()",
            "torch.cuda.tunable.enable is not modelled by the virtual GPU",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch for CUDA has it"),
        ),
        ("torch._C._cuda_sleepy()", "a call of the CUDA driver is not modelled by the virtual GPU"),
        ("1 / torch.rand(1, device='cuda').item()", "train.py:12: ZeroDivisionError"),
    ],
)
def test_what_the_virtual_gpu_lacks_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    path = script(
        tmp_path, line.replace("torch.ones(3, device='cuda').sum()", "torch.rand(3, device='cuda').sum()")
    )
    assert main(["trace", "--steps", "9", path]) == 65
    last = capsys.readouterr().err.splitlines()[-1]
    assert words in last
    assert "train.py:" in last
