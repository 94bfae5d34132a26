"""Hostile inputs: one line and exit code 65 for each, within seconds of CPU time and a gigabyte.

Each command runs in a fork with a limit on its address space (command_worker.py). The faults that these tests
guard against take minutes, or never end.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from command_worker import Ending, Worker
from machine_speed import slowness
from tiny_sweep import BASE
from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.techniques.adapter._target_pattern import check_pattern

CPU_S = 6.0
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 384, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 384, "n_positions": 64}
INLINE = json.dumps(LLAMA)
RECIPE = (
    f"model: {{config: {INLINE}}}\nbatch: {{micro: 1, seq: 16}}\nhardware: {{gpu: h200}}\nprecision: fp32\n"
)
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip


def refused(ending: Ending, says: str = "") -> None:
    assert ending.code == 65, ending
    assert len(ending.err.splitlines()) == 1, ending.err
    assert ending.err.startswith("trainfit: error: ")
    assert says in ending.err
    assert not ending.out
    assert ending.cpu_s < CPU_S * slowness()


def predicted(worker: Worker, config: dict[str, Any], folder: Path, implementation: str = "hf") -> Ending:
    (folder / "config.json").write_text(json.dumps(config))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {{config: config.json, name: x, implementation: {implementation}}}\n"
        "batch: {micro: 1, seq: 16}\nhardware: {gpu: h200}\nprecision: fp32\n"
    )
    return worker.run("predict", str(recipe), "--no-cache")


HUGE = {
    **{f"{key}={value}": LLAMA | {key: value}
       for key in ("num_labels", "num_hidden_layers", "encoder_layers", "decoder_layers", "n_layers",
           "depth", "num_blocks",
                   "num_nextn_predict_layers", "mtp_layers", "num_experts", "vocab_size",
                   "num_attention_heads")
       for value in (10**9, 10**30)},
    "10,000 layers": LLAMA | {"num_hidden_layers": 10_000},
    "layers of a part": LLAMA | {"text_config": {"num_hidden_layers": 10**9}},
    "a fractional count": LLAMA | {"encoder_layers": 1e12},
    "gpt2": GPT2 | {"n_layer": 10**9},
    "gpt_neo's list": {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 10**9]]},
    "cycles": {"model_type": "hrm_text", "H_cycles": 10**9},
    "a width that one head cannot have": LLAMA | {"hidden_size": 2**20},
    "5,000 digits": LLAMA | {"rope_theta": "DIGITS"},
    "an endless config": LLAMA | {"x": [[]] * 150_000},
    "70,000 keys": LLAMA | {f"k{index}": index for index in range(70_000)},
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_huge_counts(name: str, worker: Worker, tmp_path: Path) -> None:
    if name == "5,000 digits":
        text = json.dumps(HUGE[name]).replace('"DIGITS"', "9" * 5000)
        (tmp_path / "config.json").write_text(text)
        refused(worker.run("predict", str(tmp_path / "config.json")), "a number is too long")
    else:
        refused(predicted(worker, HUGE[name], tmp_path))


CANNOT_TRAIN = {
    "rope_theta 0": {"rope_theta": 0},
    "rope_theta below 0": {"rope_theta": -1e4},
    "rope_theta text": {"rope_theta": "10000"},
    "nested theta": {"rope_parameters": ROPE | {"rope_theta": 0.0}},
    "factor 0": {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
    "factor below 0": {"rope_scaling": {"rope_type": "linear", "factor": -2.0}},
    "low_freq_factor": {"rope_scaling": ROPE | {"low_freq_factor": -1.0}},
    "high_freq_factor": {"rope_scaling": ROPE | {"high_freq_factor": 0.0}},
    "original positions": {"rope_scaling": ROPE | {"original_max_position_embeddings": 0}},
    "long_factor": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0, 0.0],
        "short_factor": [1.0, 1.0]}},
    "one short_factor": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0, 1.0],
        "short_factor": [1.0]}},
    "beta_fast": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}},
    "theta of a layer type": {"rope_parameters": {"sliding_attention": {"rope_type": "default",
        "rope_theta": -1.0}}},
    "partial_rotary_factor": {"partial_rotary_factor": 1.5},
    "initializer_range below 0": {"initializer_range": -0.02},
    "initializer_range 0": {"initializer_range": 0},
    "initializer_range huge": {"initializer_range": 1e6},
    "rms_norm_eps": {"rms_norm_eps": -1e-6},
    "rms_norm_eps huge": {"rms_norm_eps": 1e9},
    "attention_dropout": {"attention_dropout": 1.5},
    "attention_dropout below 0": {"attention_dropout": -0.1},
    "attention_dropout 1": {"attention_dropout": 1},
    "return_dict null": {"return_dict": None},
    "return_dict list": {"return_dict": []},
    "a method's name": {"to_dict": 1},
    "a dunder": {"__init__": 1},
    "no heads": {"num_attention_heads": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT_TRAIN)
def test_configs_that_cannot_train(name: str, worker: Worker, tmp_path: Path) -> None:
    refused(predicted(worker, LLAMA | CANNOT_TRAIN[name], tmp_path), "model.config")


@pytest.mark.parametrize(
    "change",
    [{"resid_pdrop": 1.5}, {"layer_norm_epsilon": -1}, {"embd_pdrop": -0.5}, {"initializer_range": -1}],
)
def test_gpt2_names_them_otherwise(change: dict[str, Any], worker: Worker, tmp_path: Path) -> None:
    refused(predicted(worker, GPT2 | change, tmp_path), next(iter(change)))


def test_native_refuses_them_too(worker: Worker, tmp_path: Path) -> None:
    own = {key: value for key, value in LLAMA.items() if key != "model_type"} | {"model_type": "trainfit"}
    for config in (
        LLAMA | {"rope_theta": 0}, own | {"rope_theta": -1}, own | {"initializer_range": 1e9},
        own | {"norm_eps": -1},
        own | {"rope": ROPE | {"high_freq_factor": 1.0}},
        own | {"rope": {**ROPE, "rope_type": "yarn", "rope_theta": 1.0}},
        own | {"num_hidden_layers": 10**9},
    ):  # fmt: skip
        refused(predicted(worker, config, tmp_path, "native"))


def test_every_command_refuses_a_config_that_cannot_train(worker: Worker, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA | {"rope_theta": 0}))
    inline = tmp_path / "recipe.yaml"
    inline.write_text(RECIPE.replace('"model_type"', '"rope_theta": 0, "model_type"'))
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("base: recipe.yaml\n")
    out = str(tmp_path / "out")
    for recipe in (str(config), str(inline)):
        for words in (("predict", recipe), ("explain", recipe), ("measure", recipe, "--device", "cpu"),
                      ("train", recipe, "--out", out, "--device", "cpu")):  # fmt: skip
            refused(worker.run(*words), "rope_theta")
    refused(worker.run("sweep", str(sweep), "--out", out), "rope_theta")
    speed = ("--batch", "1", "--seq", "16", "--step-s", "1")
    refused(worker.run("mfu", "--model", str(config), *speed), "rope_theta")


def test_a_sequence_of_one_token(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    for verb in ("predict", "explain", "measure"):
        refused(worker.run(verb, str(path), "--set", "batch.seq=1"), "batch.seq = 1")
    assert worker.run("predict", str(path), "--set", "batch.seq=2").code == 0


MARKUP = {
    "70,000 keys": RECIPE + "".join(f"k{index}: {index}\n" for index in range(70_000)),
    "70,000 keys in braces": "{" + ", ".join(f"k{index}: {index}" for index in range(70_000)) + "}",
    "a list": "model: [" + ", ".join("1" * 70_000) + "]",
    "brackets": "[" * 999_000,
    "brackets within a line's reach": "[" * 900,
    "braces": "{a: " * 200_000,
    "anchors": "".join(f"a{index}: &x{index} 1\n" for index in range(45_000)),
    "tags": "!" * 990_000,
    "lines": "\n" * 990_000,
    "5,000 digits": RECIPE + "seed: " + "9" * 5000,
    "hexadecimal digits": RECIPE + "seed: 0x" + "f" * 5000,
    "octal digits": RECIPE + "seed: 0o" + "7" * 5000,
    "a lone surrogate": RECIPE + 'seed: "\\ud800"',
    "a text of a megabyte": "model: " + "x " * 490_000,
}


@pytest.mark.parametrize("name", MARKUP)
def test_markup(name: str, worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MARKUP[name])
    refused(worker.run("predict", str(path)))


@pytest.mark.parametrize(
    "setting",
    [
        'model.name="\\ud800"', "seed=0x" + "f" * 5000, "seed=" + "9" * 5000, "a." * 30_000 + "a=1",
        "model.name=" + "[" * 50_000,
        "model.name=\ud800", "\ud800=1", "model.\udcff=1", "model.config.rope_theta=0",
        "model.config.num_labels=1000000000",
    ],
    ids=["surrogate", "hex", "digits", "deep", "brackets", "argument", "key", "byte", "theta", "labels"],
)  # fmt: skip
def test_settings(setting: str, worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    refused(worker.run("predict", str(path), "--set", setting))


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


ODD = ["loop", "loop.yaml", "loop.json", "one.yaml", "pipe", "pipe.yaml", "pipe.json", "socket.yaml",
    "large.yaml",
       "/dev/zero", "loop/in.yaml", "\ud800.yaml", "."]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_no_regular_file_is_read(name: str, worker: Worker, odd_files: Path, tmp_path: Path) -> None:
    path, out = str(odd_files / name), str(tmp_path / "out")
    for words in (("predict", path), ("sweep", path, "--out", out), ("report", path)):
        refused(worker.run(*words, seconds=20))


KINDS = {
    "pipe.yaml": "is a named pipe",
    "socket.yaml": "is a socket",
    "/dev/zero": "is a device",
    "loop.yaml": "in a circle",
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_regular_file_is_called_what_it_is(name: str, odd_files: Path) -> None:
    with pytest.raises(InputError, match=KINDS[name]):
        files.read_bytes(odd_files / name, 100)


def test_no_regular_file_is_read_by_the_others(worker: Worker, odd_files: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    pipe, loop, out = str(odd_files / "pipe.json"), str(odd_files / "loop.json"), str(tmp_path / "out")
    train = ("train", str(recipe), "--out", out, "--device", "cpu", "--steps", "1")
    for odd in (pipe, loop):
        for words in (
            ("explain", odd), ("measure", odd), ("train", odd, "--out", out), ("records", "list", odd),
            ("predict", str(recipe), "--set", f"model.config={odd}"), (*train, "--data", odd),
            (*train, "--tokenizer", odd),
            ("mfu", "--model", odd, "--batch", "1", "--seq", "16", "--step-s", "1"),
            ("predict", str(recipe), "--record", odd),
        ):  # fmt: skip
            refused(worker.run(*words, seconds=20))


PATTERNS = ["(", "*", "[", "(?P<a", "\\1", "a{2,1}", "(" * 500 + ")" * 500, "(.*)*(.*)*(.*)*(.*)*x",
    "^(([a-z_.0-9])+.)+[A-Z]([a-z])+$",
            "(?:[a-z._0-9]|.)*Q", "x" * 20_000, "nothing", "lm_head.nothing"]  # fmt: skip


NO_MODULES = ("nothing", "lm_head.nothing")


@pytest.mark.parametrize(
    "pattern", [each for each in PATTERNS if each not in NO_MODULES], ids=lambda pattern: pattern[:12]
)
def test_target_patterns(pattern: str) -> None:
    names = [f"model.layers.{index}.self_attn.q_proj" for index in range(100)]
    with pytest.raises(InputError, match="adapter.targets"):
        check_pattern(pattern, names)


@pytest.mark.parametrize("implementation", ["hf", "native"])
@pytest.mark.parametrize("pattern", ["(", "(.*)*(.*)*(.*)*(.*)*x", "nothing"])
def test_target_patterns_of_a_recipe(
    pattern: str, implementation: str, worker: Worker, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "recipe.yaml"
    adapter = json.dumps({"kind": "lora", "targets": pattern})
    path.write_text(
        RECIPE.replace("model: {", f"model: {{implementation: {implementation}, ") + f"adapter: {adapter}\n"
    )
    refused(worker.run("predict", str(path), "--no-cache", seconds=30), "adapter.targets")


def test_usual_patterns_are_taken(worker: Worker, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "recipe.yaml"
    adapter = json.dumps({"kind": "lora", "targets": r".*\.(?:[qkv]|gate|up)_proj"})
    path.write_text(RECIPE + f"adapter: {adapter}\n")
    assert worker.run("predict", str(path), "--no-cache").code == 0


@pytest.mark.parametrize(
    "text",
    ["limits: null", "limits: []", "limits: {seconds: 0}", "limits: {seconds: 1e300}",
        "limits: {memory_gib: 1e300}",
     "limits: {memory_gib: null, seconds: null}", "measure: {steps: 10000000000}",
     "train: {data: 'stories:99999999999'}",
     f"train: {{data: 'stories:{'9' * 5000}'}}", 'train: {data: "a\\0b"}', "product: {batch.seq: [1]}"],
)  # fmt: skip
def test_sweep_files(text: str, worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(BASE + text + "\n")
    refused(worker.run("sweep", str(path), "--out", str(tmp_path / "out"), "--predict-only"))


END = {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
    "normalized": False,
       "special": True}  # fmt: skip
WORDS = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}, "merges": []}
TOKENIZER = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [END], "normalizer": None,
             "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": WORDS}  # fmt: skip
TOKENIZERS = {
    "panic in a merge": TOKENIZER
    | {"model": WORDS | {"merges": ["a b"], "continuing_subword_prefix": "####"}},
    "panic in a normalizer": TOKENIZER
    | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "panic in a pre-tokenizer": TOKENIZER | {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "unknown token": TOKENIZER | {"model": {"type": "WordLevel", "vocab": {"q": 1}, "unk_token": "x"}},
    "no model": TOKENIZER | {"model": None},
    "an id beyond the vocabulary": TOKENIZER
    | {"model": WORDS | {"vocab": WORDS["vocab"] | {"o": 4294967295}}},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name: str, worker: Worker, tmp_path: Path) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "tokenizer.json"
    recipe.write_text(RECIPE.replace("gpu: h200", "gpu: cpu"))
    path.write_text(json.dumps(TOKENIZERS[name]))
    words = ("train", str(recipe), "--out", str(tmp_path / "out"), "--device", "cpu", "--steps", "1")
    ending = worker.run(*words, "--data", "stories:20", "--tokenizer", str(path))
    assert ending.code == 65, ending
    assert ending.err.splitlines()[-1].startswith("trainfit: error: ")
    assert "panicked" not in ending.err
    assert "Traceback" not in ending.err
