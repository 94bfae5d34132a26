"""The wheel and the source distribution: what is in them, and the wheel in an environment of its own."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
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
    """Build the source distribution of a copy of the repository, and of it the wheel; return their folder."""
    source, folder = tmp_path_factory.mktemp("copy") / "trainfit", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=_not_of_the_repository)
    run(sys.executable, "-m", "build", "--outdir", folder, source, folder=folder)
    return folder


def _not_of_the_repository(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that are not copied: git, environments, caches and large records."""
    top = {".git", "build", "dist", "runs"} if Path(folder) == ROOT else set[str]()
    large = {"records"} if Path(folder) == ROOT / "evidence" else set[str]()
    return {name for name in names if name in top | large or name.startswith((".venv", "__pycache__"))}


def test_the_distributions_have_the_files_of_the_package_and_no_evidence(built: Path) -> None:
    """The wheel is built of the source distribution."""
    (archive,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    folder = f"trainfit-{trainfit.__version__}/"
    with tarfile.open(archive) as opened:
        names = {name.removeprefix(folder) for name in opened.getnames()}
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md"):
        assert name in names
    assert {name.partition("/")[0] for name in names if "/" in name} == {"src"}
    assert archive.stat().st_size < 3 * MIB

    package = SOURCE / "trainfit"
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert installed == {path.relative_to(SOURCE).as_posix() for path in files}
    assert "trainfit/py.typed" in installed
    assert wheel.name == f"trainfit-{trainfit.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 4 * MIB


@pytest.mark.slow
@pytest.mark.timeout(1500)  # Installing torch takes minutes on a busy machine.
def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """It has what the wheel requires and nothing else; what it predicts is what the source predicts here."""
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    programs = tmp_path / "venv" / "bin"
    options = shlex.split(os.environ.get("PIP_ARGS", "--no-compile"))
    pip = [programs / "python", "-m", "pip"]
    run(*pip, "install", "-q", *options, "-c", CONSTRAINTS, wheel, folder=tmp_path)
    run(*pip, "check", folder=tmp_path)
    where = run(programs / "python", "-c", "import trainfit; print(trainfit.__file__)", folder=tmp_path)
    assert Path(where).is_relative_to(tmp_path)

    program, cache = programs / "trainfit", {"TRAINFIT_CACHE": str(tmp_path / "cache")}
    assert run(program, "--version", folder=tmp_path) == f"trainfit {trainfit.__version__}\n"
    assert "trainfit predict" in run(program, folder=tmp_path)
    found = json.loads(run(program, "predict", "llama-3.1-8b", "--json", folder=tmp_path, **cache))
    assert found["peak_allocated_bytes"] == trainfit.predict("llama-3.1-8b").peak_allocated_bytes
    _check_types(programs / "python", tmp_path)


def _check_types(python: Path, folder: Path) -> None:
    """Check a user's script with the types of the installed package, right and wrong."""
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", str(python), "--outputjson"]
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    script = folder / "script.py"
    script.write_text(USER_SCRIPT)
    assert json.loads(run(*pyright, script, folder=folder))["generalDiagnostics"] == []
    script.write_text(USER_SCRIPT.replace("fits: bool", "fits: str"))
    done = subprocess.run(
        [*pyright, str(script)], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    (wrong,) = json.loads(done.stdout)["generalDiagnostics"]
    assert '"bool" is not assignable to "str"' in wrong["message"]
