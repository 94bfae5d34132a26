"""``trainfit calibrate``: measure the rates of this device and its host."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trainfit.cli.options import Device, Json, finite, only_json, print_json
from trainfit.spec.errors import InputError
from trainfit.spec.files import check_can_write
from trainfit.spec.printable import say

if TYPE_CHECKING:
    from trainfit.spec.calibration import Calibration

OUT_HELP = "Where to write the result; default: in the user's data folder."
TRANSFORMERS = "transformers.models.llama.modeling_llama"
"""Module of the small steps. With --host it is imported before the time limit begins, which is short."""
LIMIT_HELP = "Start no further measurement after this time (280; with --host 20)."


def run(
    host: Annotated[
        bool,
        Option("--host", help="Measure the host only: for a GPU of the catalog in a machine of your own."),
    ] = False,
    device: Device = "auto",
    out: Annotated[Path | None, Option(metavar="FILE.json", help=OUT_HELP)] = None,
    limit: Annotated[
        float | None, Option("--limit-s", metavar="SECONDS", min=1, callback=finite, help=LIMIT_HELP)
    ] = None,
    json: Json = False,
) -> int:
    """Measure the rates of this device and its host.

    It takes under 5 minutes, the host alone about 20 s at most. What was measured is kept after every part; a
    part that fails does not stop the others.
    """
    if host:
        importlib.import_module(TRANSFORMERS)
    from trainfit.bench.harness.runner import device_of
    from trainfit.calibration.run import HOST_LIMIT_S, LIMIT_S, Run, folder

    path = out or folder() / "calibration.json"
    _check_ours(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_can_write(path, "--out")
    with only_json(json):
        chosen = device_of(device)
        limit_s = limit or (HOST_LIMIT_S if host else LIMIT_S)
        run = Run(chosen, host_only=host, limit_s=limit_s, say=lambda line: say(line, err=True), out=path)
        found = run.run()
    if json:
        print_json(found)
    else:
        show(found, path)
    return 0


def _check_ours(path: Path) -> None:
    """Refuse to replace a file that is not a calibration."""
    from trainfit.spec.calibration import MAX_FILE_BYTES, calibration_of
    from trainfit.spec.files import read_bytes

    if not path.exists():
        return
    content = read_bytes(path, MAX_FILE_BYTES)
    try:
        calibration_of(content, str(path))
    except InputError:
        problem, remedy = "exists and is not a calibration", "name another file with --out, or move it away"
        raise InputError(problem, remedy, field="--out", value=str(path)) from None


def show(found: "Calibration", path: Path) -> None:
    """Print the file's name, what it holds, and what could not be measured."""
    of = found.gpu or found.environment.device
    say(f"{of}, {found.cpu}: {len(found.ops)} operations, {len(found.host)} costs of the host, "
        f"{len(found.host_steps)} small steps in {found.elapsed_s:.0f} s: {path}")  # fmt: skip
    for line in found.failures:
        say(f"not measured: {line}")
