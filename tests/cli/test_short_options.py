"""Short options of every verb that takes a recipe, and answers to words of other tools."""

import json
import re
from typing import Any

import pytest

from trainfit.cli import options
from trainfit.cli.main import main

Captured = pytest.CaptureFixture[str]
LONG = {
    "--gpu": "hardware.gpu=h100-sxm",
    "--count": "hardware.count=2",
    "--gpus": "hardware.count=2",
    "--batch": "batch.micro=2",
    "--seq": "batch.seq=1024",
    "--precision": "precision=bf16",
    "--weights": "model.weights=owner/not-in-the-cache",
    "--price": "hardware.price_per_hour=3.5",
}
VALUES = {"--seq": "1k"}


@options.takes_recipe
def settings_of(settings: options.Settings = None) -> Any:
    return settings


def test_each_option_of_the_table_is_in_the_help_of_each_verb_that_takes_a_recipe(capsys: Captured) -> None:
    names = [name for one in options.RECIPE_OPTIONS for name in one.names]
    assert set(LONG) | {"--lora", "--qlora"} == set(names)
    for verb in ("predict", "plan", "measure", "explain", "train", "sweep"):
        for words in ([verb, "-h"], [verb, "--help"], ["help", verb]):
            assert main(words) == 0
            out = capsys.readouterr().out
            assert [name for name in names if not re.search(rf" {name}[ ,]", out)] == [], verb


def test_short_options_are_settings(capsys: Captured) -> None:
    short = [word for name in LONG for word in (name, VALUES.get(name, LONG[name].partition("=")[2]))]
    short = short[:2] + short[4:]  # --count and --gpus are one
    long = [word for name, one in LONG.items() if name != "--count" for word in ("--set", one)]
    outputs = []
    for words in (short, long):
        assert main(["predict", "tiny-cpu", *words, "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1]
    assert outputs[0]["num_gpus"] == 2


@pytest.mark.parametrize("words", ["--gpu ,", "--count ,", "--gpu h2000,h200", "--count 1,x"])
def test_wrong_lists_are_one_line(words: str, capsys: Captured) -> None:
    assert main(["predict", "gpt2", *words.split()]) == 65
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainfit: error: {words.split()[0]}: hardware.")


def test_a_value_stays_one_value() -> None:
    assert settings_of(gpu="a: b #c") == ['hardware.gpu="a: b #c"']
    assert settings_of(settings=["seed=1"], qlora=True) == ["seed=1", "adapter=lora", "quantize=nf4"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lora --qlora", "--lora and --qlora both set adapter.kind"),
        ("--lora --set adapter=prefix", "--set adapter=prefix and --lora both set adapter.kind"),
        ("--lora --set adapter=null", "--set adapter=null and --lora both set adapter"),
        ("--qlora --set quantize=int8", "--set quantize=int8 and --qlora both set quantize"),
        ("--batch 2 --set batch=4", "--set batch=4 and --batch both set batch.micro"),
        ("--gpus 2 --set hardware.count=4", "--set hardware.count=4 and --count both set hardware.count"),
    ],
)
def test_two_options_for_one_field_are_refused(words: str, says: str, capsys: Captured) -> None:
    assert main(["predict", "tiny-cpu", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{says}: keep one of them" in line


def test_options_of_different_keys_of_one_field_go_together() -> None:
    assert settings_of(settings=["adapter.rank=4", "batch.seq=8"], lora=True, batch="2")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("estimate gpt2", "No such command 'estimate'; here it is trainfit predict"),
        ("fit", "here it is trainfit predict (does it fit?) or trainfit plan"),
        ("COST", "here it is trainfit predict;"),
        ("finetune x", "here it is trainfit train"),
        ("gpt2", "No such command 'gpt2'; write trainfit predict gpt2"),
        ("frobnicate", "No such command 'frobnicate'; see trainfit --help"),
        ("help frobnicate", "No such command 'frobnicate'"),
        ("predict gpt2 --batch-size 4", "No such option: --batch-size; here it is --batch;"),
        ("predict gpt2 --num-gpus 4", "here it is --count;"),
        ("predict gpt2 --lora-r 4", "here it is --set adapter.rank=VALUE"),
        ("predict gpt2 --optimizer sgd", "here it is --set optimizer=VALUE"),
        ("predict --model gpt2", "the model is the argument RECIPE"),
        ("predict gpt2 --verbos", "No such option: --verbos; did you mean --verbose? See trainfit predict"),
        ("predict gpt2 --outputs x", "No such option: --outputs; see trainfit predict --help"),
        ("predict gpt2 --lora=8", "--lora' does not take a value"),
        ("mfu --model gpt2 --seq 8x", "'8x' is no number of tokens: write it as 8192 or 8k"),
        ("predict gpt2 --zero3", "here it is parallel.shard, or hardware.count alone"),
    ],
)
def test_words_of_other_tools_are_answered(words: str, says: str, capsys: Captured) -> None:
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_several_gpus_and_counts_are_one_table(capsys: Captured) -> None:
    words = ["tiny-cpu", "--gpu", "h100-sxm,H200", "--count", "1,2"]
    assert main(["predict", *words]) == 0
    out = capsys.readouterr().out
    assert "on several counts of GPUs" in out
    assert out.count("h100-sxm") == out.count("h200") == 2
    assert main(["predict", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["gpus"]
    assert [(one["gpu"], one["count"]) for one in found] == [
        ("h100-sxm", 1), ("h100-sxm", 2), ("h200", 1), ("h200", 2),
    ]  # fmt: skip
    assert [one["estimate"]["num_gpus"] for one in found] == [1, 2, 1, 2]


def test_plan_compares_gpus_and_counts(capsys: Captured) -> None:
    words = ["plan", "tiny-cpu", "--gpu", "h200", "--count", "1,2", "--vary", "loss", "--tokens", "1B"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "1 x h200  fits" in out
    assert "2 x h200  fits" in out
    assert "plan.yaml" in out
    assert main([*words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [one["best"]["hardware"]["count"] for one in plans] == [1, 2]
    assert main([*words, "--out", "x.yaml"]) == 2
    assert "--out is of one plan: name one GPU and one count" in capsys.readouterr().err
    assert main(["plan", "tiny-cpu", "--lora", "--tune", "full"]) == 65
    assert "tune = 'full': adapter is set to something else" in capsys.readouterr().err
