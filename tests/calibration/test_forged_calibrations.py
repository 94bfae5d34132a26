"""A calibration file is input: a wrong field is refused in one line that names it, and nothing is guessed."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainfit.catalog.load import FOLDER
from trainfit.cli.main import main
from trainfit.spec.calibration import OpTime

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
CELLS: dict[str, tuple[Any, ...]] = {
    "op": (None, 1, "", ["x"]),
    "dtype": (None, 7, ""),
    "layout": (None, 0),
    "shape": (None, "1x2", [1, 2], [1, 2, 3, None], [0, 1, 1, 1], [-1, 1, 1, 1], [1.5] * 4, [10**30] * 4),
    "kernel": (None, {}),
    "head": (-1, "64", 10**30),
    "seq": (-1, None, 2.5),
    "masked": (None, 0, "false"),
    "flops": (-1.0, None, "1e9", math.inf, 1e308),
    "num_bytes": (-1, None, 1.5, 10**30),
    "seconds": (0, 0.0, -1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan, None, "1e-5", True, [1e-5]),
    "part": (None, 1),
}  # fmt: skip
FIELDS: dict[str, tuple[Any, ...]] = {
    "format": (None, 0, 2, "1", 1.0, True, 10**30),
    "ops": (None, {}, "x", [None], [[]], [["aten.mm.default"]], [1]),
    "host": (None, [], {"module": 0}, {"module": -1e-6}, {"module": "1e-6"}, {"module": 1e308}),
    "host_steps": (None, [None], [{}], {"step_s": 1}),
    "environment": (None, {}, {"device_bytes": -1}),
    "cpu": (None, 1),
    "elapsed_s": (-1, "x"),
    "collectives": ([{"name": "all_reduce", "num_ranks": 0, "num_bytes": 1, "seconds": 1e-5}], [None]),
    "states": ([{"watts": -1.0}], [1]),
    "unknown": (1,),
}


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    data = json.loads((FOLDER / "calibrations" / "h200.json").read_text())
    return {**data, "ops": data["ops"][::40]}


def forged(data: dict[str, Any]) -> dict[str, str]:
    """Return forged files by what is wrong with them."""
    found: dict[str, Any] = {}
    for field, values in CELLS.items():
        for value in values:
            changed = copy.deepcopy(data)
            changed["ops"][5][OpTime._fields.index(field)] = value
            found[f"ops, {field} {value}"] = changed
    for field, values in FIELDS.items():
        for value in values:
            found[f"{field} {value}"] = {**data, field: value}
            if field not in ("unknown",):
                found[f"without {field}"] = {key: one for key, one in data.items() if key != field}
    idle = copy.deepcopy(data)
    idle["ops"][5][OpTime._fields.index("flops")] = idle["ops"][5][OpTime._fields.index("num_bytes")] = 0
    short = copy.deepcopy(data)
    short["ops"][5] = short["ops"][5][:-1]
    still = copy.deepcopy(data)
    still["host_steps"][0]["step_s"] = 0.0
    found |= {"an operation without work": idle, "a cell too few": short, "a step of 0 s": still}
    found |= {"a list": [], "a number": 1, "null": None, "nothing": {}}
    return {name: json.dumps(one) for name, one in found.items()} | {
        "no text": "", "cut off": json.dumps(data)[:-30], "a key twice": '{"format": 1, "format": 1}',
        "nested": "[" * 100_000, "digits": '{"format": ' + "9" * 5000 + "}",
    }  # fmt: skip


ONLY_DEFAULTS = ("without host_steps", "without collectives", "without states", "without elapsed_s")
"""Fields that a short calibration lacks."""


def test_a_forged_file_is_refused_in_one_line(
    shipped: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, file = tmp_path / "recipe.yaml", tmp_path / "calibration.json"
    recipe.write_text(
        f"model: {{config: {json.dumps(CONFIG)}}}\nbatch: {{micro: 1, seq: 16}}\nhardware: h200\n"
    )
    words = ["predict", str(recipe), "--calibration", str(file), "--json"]
    file.write_text(json.dumps(shipped))
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 0
    found = forged(shipped)
    assert len(found) > 90
    for number, (name, text) in enumerate(found.items()):
        words[3] = str(file := tmp_path / f"{number}.json")  # Files are read once a process.
        file.write_text(text)
        code, (out, err) = main(words), capsys.readouterr()
        if name in ONLY_DEFAULTS or name in ("without ops", "without host"):
            assert code == 0, name
            assert json.loads(out)["step_s"] > 0, name
            continue
        assert code == 65, (name, out, err)
        (line,) = err.splitlines()
        assert line.startswith(f"trainfit: error: {file}: "), name
        assert not out


def test_calibrate_replaces_no_file_that_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    for text in ("{}", "null", "x", '{"format": 1}'):
        path.write_text(text)
        assert main(["calibrate", "--host", "--out", str(path)]) == 65
        (line,) = capsys.readouterr().err.splitlines()
        assert "is not a calibration" in line
        assert path.read_text() == text
