"""The wheel and the source distribution: what is in them, and the wheel in an environment of its own."""

import json
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import trainfit

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
MIB = 2**20
USER_SCRIPT = """
import trainfit
from trainfit import Estimate, Recipe

found = trainfit.predict("gpt2", gpu="h200", seq=512)
fits: bool = found.fits
spare: int = found.headroom_bytes
recipe: Recipe = trainfit.plan("gpt2", gpu="h200", seq=512).best


def peak(estimate: Estimate) -> int:
    return estimate.peak_allocated_bytes


print(fits, spare, recipe.batch.micro, peak(found))
"""


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Run a command in a folder that has no trainfit; return its standard output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=inherited | environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and of it the wheel; return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with what it requires and nothing else; return the folder of its programs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, folder=folder)
    arguments: Sequence[str] = shlex.split(os.environ.get("PIP_ARGS", "--no-compile"))
    run(
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        *arguments,
        "-c",
        CONSTRAINTS,
        wheel,
        folder=folder,
    )
    return folder / "bin"


def test_the_wheel_has_the_files_of_the_package(wheel: Path) -> None:
    """The wheel is built of the source distribution, so that has them too."""
    names = zipfile.ZipFile(wheel).namelist()
    files = {
        path for path in SOURCE.joinpath("trainfit").rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if ".dist-info/" not in name} == {
        path.relative_to(SOURCE).as_posix() for path in files
    }
    assert "trainfit/py.typed" in names
    assert wheel.name == f"trainfit-{trainfit.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 4 * MIB


def test_the_source_distribution_has_no_evidence(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    folder = f"trainfit-{trainfit.__version__}/"
    with tarfile.open(archive) as opened:
        names = {name.removeprefix(folder) for name in opened.getnames()}
    for name in (
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "src/trainfit/py.typed",
    ):
        assert name in names
    tops = {name.partition("/")[0] for name in names if "/" in name}
    assert tops == {"src"}
    assert archive.stat().st_size < 3 * MIB


@pytest.mark.slow
def test_the_wheel_predicts_in_an_environment_of_its_own(environment: Path, tmp_path: Path) -> None:
    """What it predicts there is what the source predicts here."""
    cache = {"TRAINFIT_CACHE": str(tmp_path / "cache")}
    program = environment / "trainfit"
    assert run(program, "--version", folder=tmp_path) == f"trainfit {trainfit.__version__}\n"
    assert "trainfit predict" in run(program, folder=tmp_path)
    found = json.loads(run(program, "predict", "llama-3.1-8b", "--json", folder=tmp_path, **cache))
    assert found["peak_allocated_bytes"] == trainfit.predict("llama-3.1-8b").peak_allocated_bytes
    run(environment / "python", "-m", "pip", "check", folder=tmp_path)
    where = run(environment / "python", "-c", "import trainfit; print(trainfit.__file__)", folder=tmp_path)
    assert Path(where).is_relative_to(environment.parent)


@pytest.mark.slow
def test_a_users_script_is_checked_with_the_packages_types(environment: Path, tmp_path: Path) -> None:
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", environment / "python", "--outputjson"]
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    script = tmp_path / "script.py"
    script.write_text(USER_SCRIPT)
    assert json.loads(run(*pyright, script, folder=tmp_path))["generalDiagnostics"] == []
    script.write_text(USER_SCRIPT.replace("fits: bool", "fits: str"))
    done = subprocess.run(
        [*map(str, pyright), script], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    (wrong,) = json.loads(done.stdout)["generalDiagnostics"]
    assert '"bool" is not assignable to "str"' in wrong["message"]
