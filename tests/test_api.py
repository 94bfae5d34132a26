"""Python functions compute and print what the commands do, and refuse bad input in one line."""

import base64
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import trainfit
from tiny_recipe import TINY_LLAMA
from trainfit.api.calls import training_flops
from trainfit.api.recipes import SHORT, RecipeFields
from trainfit.cli.main import main
from trainfit.report import html as pages
from trainfit.report.pictures import INNER
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import texts
from trainfit.training.options import train_options

Captured = pytest.CaptureFixture[str]
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "api.md"
TINY: dict[str, Any] = {"model": {"config": TINY_LLAMA, "name": "tiny"}, "batch": {"micro": 2, "seq": 16},
    "precision": "fp32"}  # fmt: skip


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(TINY))
    return path


def printed(capsys: Captured, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.rstrip("\n")


def test_a_prediction_prints_like_the_command(
    capsys: Captured, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    estimate = trainfit.predict(recipe_file, gpu="h100-sxm", seq=32)
    command = ["predict", str(recipe_file), "--gpu", "h100-sxm", "--set", "batch.seq=32"]
    assert str(estimate) == printed(capsys, *command)
    assert estimate.text(verbose=True) == printed(capsys, *command, "--verbose")
    assert max(map(len, estimate.text(width=80).splitlines())) <= 80
    assert estimate.model_dump(mode="json") == json.loads(printed(capsys, *command, "--json"))
    assert isinstance(estimate, trainfit.Estimate)
    plain = trainfit.Estimate.model_validate_json(estimate.model_dump_json())
    assert plain == estimate == pickle.loads(pickle.dumps(estimate))
    assert estimate == plain
    assert estimate != plain.model_copy(update={"fits": not plain.fits})


def test_the_text_names_how_an_open_field_was_planned(capsys: Captured, recipe_file: Path) -> None:
    estimate = trainfit.predict(recipe_file, recompute={"budget_gib": 1})
    assert estimate.notes
    assert not estimate.recipe.has_open_fields
    assert str(estimate) == printed(capsys, "predict", str(recipe_file), "--set", "recompute={budget_gib: 1}")


def test_a_recipe_is_given_in_any_form(recipe_file: Path, tmp_path: Path) -> None:
    wanted = recipe_from({**TINY, "batch": {"micro": 4, "seq": 16}})
    settings: Any = (
        {"batch": 4}, {"batch": {"micro": 4}}, {"set": {"batch.micro": 4}}, {"set": ["batch.micro=4"]},
        {"set": "batch.micro=4"},
    )  # fmt: skip
    for source in (str(recipe_file), recipe_file, TINY, recipe_from(TINY)):
        for fields in settings:
            assert trainfit.load_recipe(source, **fields) == wanted, (source, fields)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    for source in (tmp_path, tmp_path / "config.json", TINY_LLAMA):
        assert trainfit.load_recipe(source, seq=64).model.config == TINY_LLAMA
    names = ("qwen3-8b", "Qwen3-8B", "Qwen/Qwen3-8B")
    assert len({trainfit.load_recipe(name, set={"batch.seq": 8192}).id for name in names}) == 1
    assert trainfit.load_recipe("qwen3-8b", seq="8k").batch.seq == 8192
    # A changed optimizer gets its own implementation.
    changed = trainfit.load_recipe(recipe_from(TINY), optimizer="adafactor")
    assert changed == trainfit.load_recipe(TINY, optimizer={"name": "adafactor"})
    assert changed.optimizer.implementation == "forloop"
    assert set(RecipeFields.__annotations__) == {*Recipe.model_fields, *SHORT, "set"}


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("gpt2", {"gpu": "h2000"}, r"hardware\.gpu = 'h2000': no accelerator .*did you mean h200"),
    ("gpt2", {"micro": 3}, r"micro = 3: unknown key; here it is batch\.micro"),
    ("gpt2", {"seq": 1}, r"batch\.micro|batch\.seq"),
    ("llama-3.1-8x", {}, "did you mean llama-3.1-8b"),
    (3, {}, "recipe = 3: not a recipe; give a name"),
    ("gpt2", {"seq": 8, "batch": {"seq": 9}}, r"seq = 8: batch\.seq is given twice"),
    ("gpt2", {"set": 3}, "set = 3: should be text, or a list of text; write"),
    ("gpt2", {"set": "batch.micro"}, "set: 'batch.micro': not a setting"),
    ("gpt2", {"batch": object()}, "not a recipe's value"),
    *(("gpt2", {"set": settings}, r"^set: (?!.*--set)") for settings in
      ({"batch.mcro": 3}, ["batch"], {"precision": "bf17"}, {"hardware.gpu": "h20o"})),
]  # fmt: skip


@pytest.mark.parametrize(("source", "fields", "line"), BAD)
def test_bad_input_is_one_line(source: Any, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(trainfit.InputError, match=line) as refused:
        trainfit.predict(source, **fields)
    assert isinstance(refused.value, ValueError)
    assert "\n" not in str(refused.value)


def test_text_where_several_may_stand_is_one_and_not_its_letters() -> None:
    with pytest.raises(trainfit.InputError, match=r"vary = 'colour'"):
        trainfit.plan(TINY, vary="loss, colour", processes=0)
    with pytest.raises(trainfit.InputError, match="vary = 3: should be text, or a list of text"):
        trainfit.plan(TINY, vary=3)  # pyright: ignore[reportArgumentType]
    for given in ("mm", ["mm"], ("mm",)):
        assert texts(given, field="save") == ("mm",)
    for given in (b"mm", {"mm": 1}, ["mm", 1], None):
        with pytest.raises(trainfit.InputError, match="save"):
            texts(given, field="save")


def test_bad_arguments_of_other_functions_are_one_line() -> None:
    with pytest.raises(trainfit.InputError, match="give one of step_s, tokens_per_s, mfu and gpu_hours"):
        trainfit.mfu("gpt2", batch=1, seq=8)
    with pytest.raises(trainfit.InputError, match="batch = 0: must be above 0"):
        trainfit.mfu("gpt2", batch=0, seq=8, mfu=0.4)
    with pytest.raises(trainfit.InputError, match="steps = 0"):
        trainfit.train("gpt2", out="x", steps=0)


def test_a_keyword_is_named_without_the_file_and_a_file_with_it(recipe_file: Path) -> None:
    with pytest.raises(trainfit.InputError, match=r"^hardware\.gpu = 'h2000'"):
        trainfit.load_recipe(recipe_file, gpu="h2000")
    recipe_file.write_text(json.dumps({**TINY, "hardware": {"gpu": "h2000"}}))
    with pytest.raises(trainfit.InputError, match=rf"^{re.escape(str(recipe_file))}: hardware\.gpu"):
        trainfit.load_recipe(recipe_file)


def test_a_gpu_name_that_leaves_something_open_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="is taken as h100-sxm") as caught:
        trainfit.load_recipe(TINY, gpu="h100")
    assert caught[0].filename == __file__


def test_mfu_prints_like_the_command(capsys: Captured) -> None:
    usage = trainfit.mfu("gpt2", batch=8, seq=128, step_s=0.1, tokens=1e9)
    command = ["mfu", "--model", "gpt2", "--batch", "8", "--seq", "128", "--step-s", "0.1", "--tokens", "1e9"]
    assert str(usage) == printed(capsys, *command)
    assert usage.content() == json.loads(printed(capsys, *command, "--json"))
    assert f"{usage.mfu:.2%} MFU" in usage._repr_html_()
    with pytest.raises(ValueError, match="frozen"):
        usage.mfu = 1.0


@pytest.mark.slow
def test_measure_and_train_return_values_that_print(forks: None, recipe_file: Path, tmp_path: Path) -> None:
    measured = trainfit.measure(recipe_file, steps=2, warmup=1, device="cpu")
    assert isinstance(measured, trainfit.Measurement)
    assert measured.status == "done", measured.message
    assert measured.recipe == trainfit.load_recipe(recipe_file)
    assert "\nDONE\n" in str(measured)
    assert "time a step" in measured._repr_html_()
    both = measured.compare(trainfit.predict(recipe_file))
    assert "measured on another device than the recipe names" in str(both)
    assert "time a step" not in str(both)
    with pytest.raises(ValueError, match="was measured"):
        measured.compare(trainfit.predict(recipe_file, batch=3))
    here = trainfit.measure(recipe_file, gpu="cpu", steps=2, warmup=1, device="cpu")
    both = here.compare(trainfit.predict(recipe_file, gpu="cpu"))
    assert re.search(r"peak allocated +\S+ KiB +\S+ KiB +[+-]0\.00%", str(both))
    assert "another device" not in str(both)
    shown = both._repr_html_()
    assert shown.count("0.00%") >= 7  # The peak and those of the phases.
    assert len(pictures(shown)) == 1
    model = {"config": {**TINY_LLAMA, "vocab_size": 512}, "name": "tiny"}
    out = tmp_path / "run"
    run = trainfit.train(
        TINY, model=model, out=out, steps=3, device="cpu", data="stories:200", tensorboard=False
    )
    assert (run.status, run.steps, len(run.losses)) == ("done", 3, 3)
    assert f"checkpoint  {out}" in str(run)
    assert "of 3, 3 of them now" in run._repr_html_()
    assert (out / "run.json").is_file()


def test_a_rank_of_the_callers_process_group_trains_without_mfu(tmp_path: Path) -> None:
    recipe = recipe_from({"model": {"config": TINY_LLAMA}, "hardware": {"count": 2}})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert training_flops(recipe, train_options("stories", recipe.data, out=str(tmp_path)), None) is None
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


def pictures(html: str) -> list[str]:
    """The drawings of a result in a notebook."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    drawn = [base64.b64decode(one).decode() for one in found]
    for one in drawn:
        ElementTree.fromstring(one)
    return drawn


def test_a_prediction_in_a_notebook_escapes_what_a_recipe_says(recipe_file: Path) -> None:
    name = "<script>alert(1)</script>\x1b[31m"
    estimate = trainfit.predict(recipe_file, model={"name": name}, gpu="h200")
    html = estimate._repr_html_()
    assert "FITS on h200" in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[31m" in html
    assert not re.search(r"<(script|style|svg)", html)
    for row in ("speed", "cost", "weights", "optimizer", "allocated", "on the device"):
        assert f">{row}</th>" in html
    assert estimate.breakdown.gradients or ">gradients</th>" not in html
    too_much = {"fits": False, "peak_device_bytes": estimate.device_bytes + 2**30}
    refused = estimate.model_copy(update=too_much)._repr_html_()
    assert f"color: {pages.BAD}" in refused
    assert "DOES NOT FIT on h200" in refused
    assert "1.00 GiB" in refused


def test_the_bar_of_a_prediction_is_to_scale(recipe_file: Path) -> None:
    estimate = trainfit.predict(recipe_file, gpu="h200")
    bar, course = pictures(estimate._repr_html_())
    card, *parts = re.findall(
        r'<rect (?:x="[\d.]+" )?y="26" width="([\d.]+)"|<rect x="[\d.]+" y="26" width', bar
    )
    assert float(card) == INNER
    assert float(parts[0]) == pytest.approx(
        INNER * estimate.breakdown.weights / estimate.device_bytes, abs=0.06
    )
    assert sum(map(float, parts)) == pytest.approx(
        INNER * estimate.peak_device_bytes / estimate.device_bytes, abs=0.3
    )
    over_time = estimate.course()
    assert over_time is not None
    assert over_time.peak.alive.total + over_time.unsplit_bytes == estimate.peak_allocated_bytes
    for phase in ("forward", "backward"):
        assert f">{phase}</text>" in course


def test_in_a_notebook_a_text_is_whole(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = trainfit.predict(recipe_file, gpu="h200")
    text = estimate.text(width=80)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert estimate.text(width=80) == text
    shown: list[str] = []

    class Printer:
        text = shown.append

    estimate._repr_pretty_(Printer(), cycle=False)
    assert shown == [str(estimate)]


def test_without_a_kept_ledger_there_is_no_picture_of_the_course(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = trainfit.predict(recipe_file, gpu="h200", seq=9)
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "another"))
    assert estimate.course() is None
    assert len(pictures(estimate._repr_html_())) == 1


def test_a_recipe_on_several_gpus_is_compared_as_the_command_does(capsys: Captured) -> None:
    found = trainfit.compare("gpt2", gpus="h100-sxm,h200".split(","), counts=[1, 2], seq=64, tokens="10B")
    names = ["--gpu", "h100-sxm,h200", "--count", "1,2", "--seq", "64", "--tokens", "10B"]
    assert str(found) == printed(capsys, "predict", "gpt2", *names)
    command = json.loads(printed(capsys, "predict", "gpt2", *names, "--json"))
    assert found.model_dump(mode="json") == command
    assert [(one.gpu, one.count) for one in found.gpus] == [
        ("h100-sxm", 1), ("h100-sxm", 2), ("h200", 1), ("h200", 2)
    ]  # fmt: skip
    html = found._repr_html_()
    assert len(re.findall(r'stroke-width="2"', pictures(html)[0])) == 4  # A line for each card's memory.
    assert "FITS on 4 of 4" in html


def test_a_gpu_that_refuses_a_recipe_says_why_beside_the_others() -> None:
    found = trainfit.compare("llama-3.2-1b", gpus=["h100-sxm", "v100-sxm2-32gb"], seq=64, precision="fp8")
    fine, refused = found.gpus
    assert fine.estimate is not None
    assert refused.estimate is None
    assert refused.refused in found._repr_html_().replace("&#39;", "'")
    with pytest.raises(trainfit.InputError, match="fp8"):
        trainfit.compare("llama-3.2-1b", gpus="v100-sxm2-32gb", seq=64, precision="fp8")


def test_the_package_lists_its_functions_and_imports_nothing_for_it() -> None:
    code = (
        "import sys, trainfit; names = dir(trainfit); assert set(trainfit.__all__) <= set(names)\n"
        "for name in ('predict', 'measure', 'train', 'trace', 'mfu', 'load_recipe'): assert name in names\n"
        "early = {'torch', 'pydantic', 'rich', 'typer', 'numpy'} & set(sys.modules)\n"
        "assert not early, early\n"
        "for name in trainfit.__all__: getattr(trainfit, name)\n"
        "trainfit.load_recipe('gpt2', seq=64); assert 'torch' not in sys.modules\n"
        "try: trainfit.plans\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'trainfit' has no attribute 'plans'\n"


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that need a GPU or train for long, which are marked ``python no-run``."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
