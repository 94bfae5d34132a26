"""Hostile and wrong files: one line with the file, the field and the remedy, exit code 65."""

import json
from pathlib import Path

import pytest

from trainfit.cli.main import main
from trainfit.integrations.importers.base import shown
from trainfit.integrations.importers.calls import NotLiteral, calls_in, configs_in
from trainfit.spec.errors import EXIT_BAD_INPUT

AXOLOTL = "base_model: gpt2\nmicro_batch_size: 1\nsequence_len: 256\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("run.yaml", "", "the file is empty"),
    "only comments": ("run.yaml", "# nothing\n", "the file is empty"),
    "empty JSON object": ("run.json", "{}", "the file is empty"),
    "a list": ("run.yaml", "- base_model: gpt2\n", "not a mapping of fields"),
    "text": ("run.yaml", "hello", "not a mapping of fields"),
    "binary": ("run.yaml", b"\x80\x04\x95\x00\xff\xfe", "not UTF-8"),
    "a pickle": ("training_args.bin", b"\x80\x04\x95\x00\xff\xfe", "not UTF-8"),
    "another ending": ("run.ini", "[a]\nb = 1\n", "YAML, JSON, TOML or Python"),
    "a tag that makes an object": (
        "run.yaml",
        AXOLOTL + "x: !!python/object/apply:os.system ['true']\n",
        "not YAML",
    ),
    "aliases without end": ("run.yaml", AXOLOTL + LAUGHS, "aliases expand"),
    "deeply nested": ("run.json", '{"a":' * 200 + "1" + "}" * 200, "nested too deeply"),
    "deeply nested Python": ("run.py", "x = " + "(" * 400 + "1" + ")" * 400, "not Python"),
    "not Python": ("run.py", "def f(:\n", "not Python"),
    "a script without arguments": ("run.py", "print('hello')\n", "no call that an importer knows"),
    "not TOML": ("run.toml", "a = = 1\n", "not TOML"),
    "not JSON": ("run.json", "{'a': 1}", "not JSON"),
    "too large": ("run.json", json.dumps({"a": "x" * 1_100_000}), "over 1 MB"),
    "no tool's fields": ("run.yaml", "colour: red\n", "no fields by which a tool is recognised"),
    "two tools alike": ("run.yaml", "base_model: gpt2\ncutoff_len: 128\n", "has fields of"),
    "a recipe of ours": ("run.yaml", "model: gpt2\nbatch: 4\n", "this is a recipe of trainfit"),
    "a model's config": ("config.json", '{"model_type": "gpt2", "n_layer": 2}', "this is a model's config"),
    "an unknown model": ("run.yaml", AXOLOTL.replace("gpt2", "nobody/nothing-9b"), "not in the catalog"),
    "a quantised model's name": (
        "run.yaml",
        AXOLOTL.replace("gpt2", "x/Llama-3.2-1B-GPTQ"),
        "not in the catalog",
    ),
    "no model": (
        "run.yaml",
        AXOLOTL.replace("base_model: gpt2\n", "val_set_size: 0\n"),
        "no file names a model",
    ),
    "a list for a number": ("run.yaml", AXOLOTL.replace(": 256", ": [256]"), "sequence_len"),
    "a word for a number": ("run.yaml", AXOLOTL.replace(": 256", ": many"), "a number"),
    "a negative batch": ("run.yaml", AXOLOTL.replace("_size: 1", "_size: -1"), "micro_batch_size"),
    "a fraction of a sequence": ("run.yaml", AXOLOTL.replace("_size: 1", "_size: 1.5"), "micro_batch_size"),
    "an endless batch": ("run.yaml", AXOLOTL.replace("_size: 1", "_size: 99999999999"), "batch.micro"),
    "infinity": ("run.yaml", AXOLOTL + "learning_rate: .inf\n", "not a finite number"),
    "a learning rate of nothing": ("run.yaml", AXOLOTL + "learning_rate: -1\n", "learning_rate"),
    "a number for a flag": ("run.yaml", AXOLOTL + "load_in_4bit: 7\n", "true or false"),
    "a mapping for a word": ("run.yaml", AXOLOTL + "optimizer: {a: 1}\n", "one word"),
    "a word for a mapping": ("run.yaml", AXOLOTL + "fsdp: [full_shard]\nfsdp_config: 3\n", "a mapping"),
    "sharding of no kind": ("run.yaml", AXOLOTL + "fsdp: [sideways]\n", "full_shard"),
    "a stage that is none": (
        "ds.json",
        '{"zero_optimization": {"stage": 7}, "train_micro_batch_size_per_gpu": 1}',
        "0, 1, 2 or 3",
    ),
    "a key that is no text": ("run.yaml", AXOLOTL + "1: 2\n", "key is not text"),
    "duplicate keys": ("run.yaml", AXOLOTL + "sequence_len: 512\n", "duplicate key"),
    "two configurations": (
        "run.py",
        "a = SFTConfig(max_length=8)\nb = SFTConfig(max_length=9)\n",
        "2 calls of training arguments",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_file_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, words = REFUSED[name]
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["import", str(path)]) == EXIT_BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert words in printed.err
    assert "Traceback" not in printed.err


def test_a_pipe_a_folder_and_a_circle_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "circle.yaml").symlink_to(tmp_path / "circle.yaml")
    for name in ("pipe.yaml", "folder.yaml", "circle.yaml", "no\0where.yaml"):
        assert main(["import", str(tmp_path / name)]) == EXIT_BAD_INPUT
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_functions_that_call_each_other_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = "".join(f"def f{n}():\n" + f"    a = f{n + 1}()\n" * 50 + "    return a\n" for n in range(60))
    path = tmp_path / "many.py"
    path.write_text(calls + "def f60():\n    return f0()\n")
    assert main(["import", str(path)]) == EXIT_BAD_INPUT
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ("a0 = 9**64", "a{1} = a{0} * a{0}"),
        ("a0 = [1]", "a{1} = [a{0}, a{0}]"),
        ("a0 = {}", "a{1} = dict(x=a{0}, y=a{0})"),
    ],
)
def test_a_value_that_doubles_line_by_line_is_not_read(first: str, line: str) -> None:
    lines = [first, *(line.format(number, number + 1) for number in range(60)), "TrainingArguments(seed=a60)"]
    calls = calls_in("\n".join(lines), "run.py")
    assert isinstance(calls[-1].values["seed"], NotLiteral)


def test_a_config_that_holds_itself_is_read_as_it_was_before() -> None:
    code = "def run():\n  c = Trainer.Config(x=1)\n  c.a = c\n  return c\n"
    assert shown(configs_in(code, "run.py", "run")["a"]) == "Trainer.Config(...)"
    doubled = code.replace("  c.a = c\n", "  c.a = c\n  c.b = c\n" * 40)
    assert isinstance(configs_in(doubled, "run.py", "run")["a"], NotLiteral)
