"""Hostile inputs: one line and exit code 65 for each, within seconds of CPU time and a gigabyte.

Each command runs in a fork with a limit on its address space (command_worker.py): the faults that these tests
guard against take minutes, or never end. The check of a config.json is a function of plain data, so its
values are tested without a process.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from command_worker import Ending, Worker
from counted_calls import within
from tiny_sweep import BASE
from trainfit.catalog.config_checks import check_config
from trainfit.cli.main import main
from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.techniques.adapter.lora import check_pattern

CPU_S = 6.0
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384, "n_positions": 64}
OWN = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"model_type": "trainfit"}
INLINE = json.dumps(LLAMA)
RECIPE = (
    f"model: {{config: {INLINE}}}\nbatch: {{micro: 1, seq: 16}}\nhardware: {{gpu: h200}}\nprecision: fp32\n"
)
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


def refused(ending: Ending, says: str = "") -> None:
    assert ending.code == 65, ending
    *progress, error = ending.err.splitlines()
    assert all(line.startswith("predicting ") for line in progress), ending.err  # Every few seconds
    assert error.startswith("trainfit: error: "), ending.err
    assert says in error
    assert not ending.out
    assert within(ending.cpu_s, CPU_S)


def predicted(worker: Worker, config: dict[str, Any], folder: Path, implementation: str = "hf") -> Ending:
    (folder / "config.json").write_text(json.dumps(config))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {{config: config.json, name: x, implementation: {implementation}}}\n"
        "batch: {micro: 1, seq: 16}\nhardware: {gpu: h200}\nprecision: fp32\n"
    )
    return worker.run("predict", str(recipe), "--no-cache")


COUNTS = (
    "num_labels", "num_hidden_layers", "encoder_layers", "decoder_layers", "n_layers", "depth", "num_blocks",
    "num_nextn_predict_layers", "mtp_layers", "num_experts", "vocab_size", "num_attention_heads",
)  # fmt: skip
HUGE = (
    *(LLAMA | {key: 10**9} for key in COUNTS),
    LLAMA | {"num_labels": 10**30},
    LLAMA | {"num_hidden_layers": 10_000},
    LLAMA | {"text_config": {"num_hidden_layers": 10**9}},
    LLAMA | {"encoder_layers": 1e12},
    LLAMA | {"hidden_size": 2**20},  # as wide as one head cannot be
    GPT2 | {"n_layer": 10**9},
    {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 10**9]]},
    {"model_type": "hrm_text", "H_cycles": 10**9},
)
LONG_ROPE = {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0, 1.0], "short_factor": [1.0, 1.0]}
CANNOT_TRAIN: tuple[dict[str, Any], ...] = (
    {"rope_theta": 0}, {"rope_theta": -1e4}, {"rope_theta": "10000"},
    {"rope_parameters": ROPE | {"rope_theta": 0.0}},
    {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": -1.0}}},
    {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": -2.0}},
    {"rope_scaling": ROPE | {"low_freq_factor": -1.0}}, {"rope_scaling": ROPE | {"high_freq_factor": 0.0}},
    {"rope_scaling": ROPE | {"original_max_position_embeddings": 0}},
    {"rope_scaling": LONG_ROPE | {"long_factor": [1.0, 0.0]}},
    {"rope_scaling": LONG_ROPE | {"short_factor": [1.0]}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}},
    {"partial_rotary_factor": 1.5}, {"rms_norm_eps": -1e-6}, {"rms_norm_eps": 1e9},
    {"initializer_range": -0.02}, {"initializer_range": 0}, {"initializer_range": 1e6},
    {"attention_dropout": 1.5}, {"attention_dropout": -0.1}, {"attention_dropout": 1},
    {"return_dict": None}, {"return_dict": []}, {"num_attention_heads": 0},
)  # fmt: skip
CANNOT_TRAIN_GPT2 = (
    {"resid_pdrop": 1.5}, {"layer_norm_epsilon": -1}, {"embd_pdrop": -0.5}, {"initializer_range": -1},
)  # fmt: skip
WRONG = (
    *HUGE,
    *(LLAMA | change for change in CANNOT_TRAIN),
    *(GPT2 | change for change in CANNOT_TRAIN_GPT2),
    *(OWN | change for change in ({"rope_theta": -1}, {"initializer_range": 1e9}, {"norm_eps": -1})),
)


def test_sizes_and_values_with_which_no_model_trains() -> None:
    for config in WRONG:
        with pytest.raises(InputError, match=r"model\.config"):
            check_config(config)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"num_hidden_layers": 10**9},
        LLAMA | {"x": [[]] * 150_000},
        LLAMA | {f"k{index}": index for index in range(70_000)},
        LLAMA | {"to_dict": 1},  # a method's name
        LLAMA | {"__init__": 1},
    ],
    ids=["layers", "endless", "keys", "method", "dunder"],
)
def test_configs_that_no_command_builds(config: dict[str, Any], worker: Worker, tmp_path: Path) -> None:
    refused(predicted(worker, config, tmp_path))


def test_a_number_of_thousands_of_digits_in_a_config(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"rope_theta": "DIGITS"}).replace('"DIGITS"', "9" * 5000))
    refused(worker.run("predict", str(path)), "a number is too long")


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"rope_theta": 0},
        OWN | {"rope": ROPE | {"high_freq_factor": 1.0}},
        OWN | {"rope": {**ROPE, "rope_type": "yarn", "rope_theta": 1.0}},
    ],
    ids=["theta", "high_freq_factor", "yarn"],
)
def test_native_refuses_them_too(config: dict[str, Any], worker: Worker, tmp_path: Path) -> None:
    refused(predicted(worker, config, tmp_path, "native"))


def test_every_command_refuses_a_config_that_cannot_train(worker: Worker, tmp_path: Path) -> None:
    config, inline, sweep = (tmp_path / name for name in ("config.json", "recipe.yaml", "sweep.yaml"))
    config.write_text(json.dumps(LLAMA | {"rope_theta": 0}))
    inline.write_text(RECIPE.replace('"model_type"', '"rope_theta": 0, "model_type"'))
    sweep.write_text("base: recipe.yaml\n")
    out = str(tmp_path / "out")
    for words in (
        ("predict", str(config)), ("predict", str(inline)), ("explain", str(config)),
        ("measure", str(inline), "--device", "cpu"), ("train", str(config), "--out", out, "--device", "cpu"),
        ("sweep", str(sweep), "--out", out),
        ("mfu", "--model", str(config), "--batch", "1", "--seq", "16", "--step-s", "1"),
    ):  # fmt: skip
        refused(worker.run(*words), "rope_theta")


def test_a_sequence_of_one_token(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    for verb in ("predict", "measure"):
        refused(worker.run(verb, str(path), "--set", "batch.seq=1"), "batch.seq = 1")
    assert worker.run("predict", str(path), "--set", "batch.seq=2").code == 0


MARKUP = {
    "70,000 keys": RECIPE + "".join(f"k{index}: {index}\n" for index in range(70_000)),
    "70,000 keys in braces": "{" + ", ".join(f"k{index}: {index}" for index in range(70_000)) + "}",
    "brackets": "[" * 999_000,
    "brackets within a line's reach": "[" * 900,
    "braces": "{a: " * 200_000,
    "anchors": "".join(f"a{index}: &x{index} 1\n" for index in range(45_000)),
    "tags": "!" * 990_000,
    "lines": "\n" * 990_000,
    "5,000 digits": RECIPE + "seed: " + "9" * 5000,
    "hexadecimal digits": RECIPE + "seed: 0x" + "f" * 5000,
    "a lone surrogate": RECIPE + 'seed: "\\ud800"',
    "a text of a megabyte": "model: " + "x " * 490_000,
}


@pytest.mark.parametrize("name", MARKUP)
def test_markup(name: str, worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MARKUP[name])
    refused(worker.run("predict", str(path)))


SETTINGS = (
    'model.name="\\ud800"', "seed=0x" + "f" * 5000, "seed=" + "9" * 5000, "a." * 30_000 + "a=1",
    "model.name=" + "[" * 50_000, "model.name=\ud800", "\ud800=1", "model.\udcff=1",
    "model.config.rope_theta=0", "model.config.num_labels=1000000000",
)  # fmt: skip


def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    for setting in SETTINGS:
        assert main(["predict", str(path), "--set", setting]) == 65
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("trainfit: error: ")


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    for name in ("loop", "loop.yaml", "loop.json"):
        (folder / name).symlink_to(name)
    (folder / "one.yaml").symlink_to("other.yaml")
    (folder / "other.yaml").symlink_to("one.yaml")
    for name in ("pipe", "pipe.yaml", "pipe.json"):
        os.mkfifo(folder / name)
    with socket.socket(socket.AF_UNIX) as end:
        before = Path.cwd()
        os.chdir(folder)  # A socket's path has 107 characters at most.
        end.bind("socket.yaml")
        os.chdir(before)
    with (folder / "large.yaml").open("wb") as file:
        file.truncate(2 * 10**12)
    return folder


ODD = ("loop", "one.yaml", "pipe", "pipe.yaml", "socket.yaml", "large.yaml", "/dev/zero", "loop/in.yaml",
       "\ud800.yaml", ".")  # fmt: skip


def test_only_regular_files_are_read(worker: Worker, odd_files: Path, tmp_path: Path) -> None:
    for name in ODD:
        refused(worker.run("predict", str(odd_files / name), seconds=20))
    for name in ("loop.yaml", "pipe.yaml", "large.yaml"):
        path, out = str(odd_files / name), str(tmp_path / "out")
        refused(worker.run("sweep", path, "--out", out, seconds=20))
        refused(worker.run("report", path, seconds=20))


KINDS = {
    "pipe.yaml": "is a named pipe",
    "socket.yaml": "is a socket",
    "/dev/zero": "is a device",
    "loop.yaml": "in a circle",
}


def test_a_refused_file_is_called_what_it_is(odd_files: Path) -> None:
    for name, kind in KINDS.items():
        with pytest.raises(InputError, match=kind):
            files.read_bytes(odd_files / name, 100)


@pytest.mark.parametrize("name", ["pipe.json", "loop.json"])
def test_only_regular_files_are_read_by_the_other_commands(
    name: str, worker: Worker, odd_files: Path, tmp_path: Path
) -> None:
    recipe, odd, out = str(tmp_path / "recipe.yaml"), str(odd_files / name), str(tmp_path / "out")
    Path(recipe).write_text(RECIPE)
    train = ("train", recipe, "--out", out, "--device", "cpu", "--steps", "1")
    for words in (
        ("records", "list", odd), ("predict", recipe, "--set", f"model.config={odd}"),
        (*train, "--data", odd), (*train, "--tokenizer", odd), ("predict", recipe, "--record", odd),
        ("mfu", "--model", odd, "--batch", "1", "--seq", "16", "--step-s", "1"),
    ):  # fmt: skip
        refused(worker.run(*words, seconds=20))


PATTERNS = ("(", "*", "[", "(?P<a", "\\1", "a{2,1}", "(" * 500 + ")" * 500,
            "^(([a-z_.0-9])+.)+[A-Z]([a-z])+$", "(?:[a-z._0-9]|.)*Q", "x" * 20_000)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:12])
def test_target_patterns(pattern: str) -> None:
    names = [f"model.layers.{index}.self_attn.q_proj" for index in range(100)]
    with pytest.raises(InputError, match="adapter.targets"):
        check_pattern(pattern, names)


@pytest.mark.parametrize(
    ("pattern", "implementation"), [("(.*)*(.*)*(.*)*(.*)*x", "hf"), ("(", "native"), ("nothing", "native")]
)
def test_target_patterns_of_a_recipe(
    pattern: str, implementation: str, worker: Worker, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "recipe.yaml"
    recipe = RECIPE.replace("model: {", f"model: {{implementation: {implementation}, ")
    path.write_text(recipe + f"adapter: {json.dumps({'kind': 'lora', 'targets': pattern})}\n")
    refused(worker.run("predict", str(path), "--no-cache", seconds=30), "adapter.targets")


def test_usual_patterns_are_taken(worker: Worker, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "recipe.yaml"
    adapter = json.dumps({"kind": "lora", "targets": r".*\.(?:[qkv]|gate|up)_proj"})
    path.write_text(RECIPE + f"adapter: {adapter}\n")
    assert worker.run("predict", str(path), "--no-cache").code == 0


@pytest.mark.parametrize(
    "text",
    [
        "limits: null", "limits: []", "limits: {seconds: 0}", "limits: {memory_gib: 1e300}",
        "measure: {steps: 10000000000}", "train: {data: 'stories:99999999999'}",
        f"train: {{data: 'stories:{'9' * 5000}'}}", 'train: {data: "a\\0b"}', "product: {batch.seq: [1]}",
    ],
)  # fmt: skip
def test_sweep_files(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(BASE + text + "\n")
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), "--predict-only"]) == 65
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainfit: error: ")


END = {"id": 0, "content": "<|endoftext|>", "special": True} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
)
WORDS = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}, "merges": []}
TOKENIZER = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [END], "normalizer": None,
             "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": WORDS}  # fmt: skip
TOKENIZERS = {
    "panic in a merge": {"model": WORDS | {"merges": ["a b"], "continuing_subword_prefix": "####"}},
    "panic in a normalizer": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "panic in a pre-tokenizer": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "unknown token": {"model": {"type": "WordLevel", "vocab": {"q": 1}, "unk_token": "x"}},
    "no model": {"model": None},
    "an id beyond the vocabulary": {"model": WORDS | {"vocab": WORDS["vocab"] | {"o": 4294967295}}},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name: str, worker: Worker, tmp_path: Path) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "tokenizer.json"
    recipe.write_text(RECIPE.replace("gpu: h200", "gpu: cpu"))
    path.write_text(json.dumps(TOKENIZER | TOKENIZERS[name]))
    words = ("train", str(recipe), "--out", str(tmp_path / "out"), "--device", "cpu", "--steps", "1")
    ending = worker.run(*words, "--data", "stories:20", "--tokenizer", str(path))
    assert ending.code == 65, ending
    assert ending.err.splitlines()[-1].startswith("trainfit: error: ")
    assert "panicked" not in ending.err
    assert "Traceback" not in ending.err
