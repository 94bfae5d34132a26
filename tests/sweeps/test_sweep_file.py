"""A sweep's file: which variants it means, and what is refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from trainfit.spec.errors import InputError
from trainfit.sweeps.read import options_of, read_sweep, training_of
from trainfit.training.options import SyntheticData, TextData, TrainOptions

BASE = "base: {model: {config: gpt2}, batch: {micro: 4, seq: 64}, optimizer: {lr: 0.5}}\n"


def read(tmp_path: Path, text: str, settings: list[str] | None = None) -> Any:
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    return read_sweep(path, settings=settings)


def names(sweep: Any) -> list[str]:
    return [variant.name for variant in sweep.variants]


def test_a_list_changes_nested_and_dotted_fields(tmp_path: Path):
    text = BASE + "list: [{name: a, batch: {micro: 2}}, {name: b, optimizer.lr: 0.25, recompute: {every: 2}}]"
    first, second = (variant.recipe for variant in read(tmp_path, text).variants)
    assert (first.batch.micro, first.batch.seq, first.optimizer.lr) == (2, 64, 0.5)
    assert (second.batch.micro, second.optimizer.lr, second.recompute.every) == (4, 0.25, 2)


def test_a_product_is_every_combination_and_names_it(tmp_path: Path):
    sweep = read(tmp_path, BASE + "product: {precision: [fp32, bf16], batch.micro: [1, 2, 3]}")
    assert names(sweep) == [f"precision={one} micro={two}" for one in ("fp32", "bf16") for two in (1, 2, 3)]
    assert [v.recipe.batch.micro for v in sweep.variants] == [1, 2, 3, 1, 2, 3]
    assert {v.recipe.optimizer.lr for v in sweep.variants} == {0.5}


def test_a_product_of_a_list_varies_each(tmp_path: Path):
    text = BASE + "list: [{name: a}, {name: b, recompute: full}]\nproduct: {batch.seq: [32, 64]}"
    assert names(read(tmp_path, text)) == ["a seq=32", "a seq=64", "b seq=32", "b seq=64"]


def test_recipe_files_follow_their_chain_and_the_glob_is_sorted(tmp_path: Path):
    (tmp_path / "more").mkdir()
    (tmp_path / "control.yaml").write_text("model: {config: gpt2}\nbatch: {micro: 7, seq: 32}\n")
    for name, precision in (("b", "bf16"), ("a", "fp32")):
        (tmp_path / "more" / f"{name}.yaml").write_text(f"extends: ../control.yaml\nprecision: {precision}\n")
    sweep = read(tmp_path, "recipes: [control.yaml, more/*.yaml]\nname: three", ["seed=3"])
    # The control's precision is bf16 by default, so b is the control by another name.
    assert names(sweep) == ["control", "a"]
    assert sweep.notes == ("b is the same recipe as control: it is run once",)
    assert [v.recipe.batch.micro for v in sweep.variants] == [7, 7]
    assert {v.recipe.seed for v in sweep.variants} == {3}


def test_paths_in_the_file_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("/")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    (tmp_path / "text.txt").write_text("some text")
    text = "base: {model: {config: ./config.json}}\ntrain: {data: text.txt}"
    sweep = read(tmp_path, text)
    assert sweep.variants[0].recipe.model.config == {"model_type": "gpt2", "n_layer": 3}
    assert sweep.file.train.data == str(tmp_path / "text.txt")


def test_paths_of_an_inline_recipes_data_are_relative_to_the_sweeps_file(tmp_path: Path):
    (tmp_path / "text.txt").write_text("words\n")
    text = (
        "base: {model: {config: gpt2}, data: text.txt}\n"
        "list: [{name: own}, {name: other, data: {eval: text.txt}}]\ntrain: {steps: 1}"
    )
    own, other = (one.recipe.data for one in read(tmp_path, text).variants)
    assert (own.train, own.eval) == (str(tmp_path / "text.txt"), None)
    assert (other.train, other.eval) == (str(tmp_path / "text.txt"),) * 2


def test_a_training_has_the_data_of_its_recipe_unless_the_sweep_names_other(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"words": "some text"}\n')
    (tmp_path / "own.yaml").write_text(
        "model: {config: gpt2}\ndata: {train: rows.jsonl, column: words, eval_share: 0.2}\n"
    )
    (tmp_path / "none.yaml").write_text("model: {config: gpt2}\nprecision: fp32\n")

    def options(train: str) -> list[TrainOptions]:
        sweep = read(tmp_path, f"recipes: [own.yaml, none.yaml]\nname: two\ntrain: {train}")
        part, recipes = sweep.file.train, [one.recipe for one in sweep.variants]
        return [options_of(training_of(part, one), one, out="x") for one in recipes]

    own, none = options("{}")
    assert own.data == TextData(path=str(tmp_path / "rows.jsonl"), column="words")
    assert (own.eval_fraction, none.data, none.eval_fraction) == (0.2, SyntheticData(), 0.05)
    own, none = options("{data: stories:50, eval_fraction: 0.1}")
    assert own.data == none.data == SyntheticData(num_documents=50)
    assert own.eval_fraction == none.eval_fraction == 0.1
    (tmp_path / "own.yaml").write_text("model: {config: gpt2}\ndata: {train: gone.jsonl}\n")
    with pytest.raises(InputError, match=r"gone.jsonl.*no such file or folder"):
        options("{}")


def test_a_part_that_the_file_names_runs(tmp_path: Path):
    assert read(tmp_path, BASE).file.parts() == ("predict",)
    assert read(tmp_path, BASE + "train: {}").file.parts() == ("predict", "train")
    both = read(tmp_path, BASE + "measure: {steps: 0}\ntrain: {}")
    assert both.file.parts() == ("predict", "measure", "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("measure: {}", "base: no recipe to vary; write base, or recipes"),
        (BASE + "measure:", "measure: nothing is written; write measure: {} for the defaults"),
        (BASE + "list: [{name: a, precision: bf17}]", "tiny.yaml: a: precision = 'bf17'"),
        (BASE + "list: [{precision: bf16}]", "list[0].name: missing; give each variant a name"),
        (BASE + "list: [{name: a}, {name: a, seed: 1}]", "two variants are called 'a'"),
        (BASE + "list: [{name: a, model.config.n_layer: 2}]", "config is the name 'gpt2'"),
        (BASE + "list: []", "list = []: is empty; write a variant, or leave it out"),
        (BASE + "product: {batch.micro: []}", "product.batch.micro"),
        (BASE + "product: {batch.micro: [1, -1]}", "micro=-1: batch.micro = -1"),
        (BASE + "product: {seed: [" + "1," * 1001 + "]}", "1,001 combinations; at most 1,000 are run"),
        (BASE + "poduct: {batch.micro: [1]}", "did you mean 'product'"),
        (BASE + "limits: {seconds: 0}", "limits.seconds = 0"),
        (BASE + "train: {data: nowhere.txt}", "train.data = 'nowhere.txt': no such file"),
        (BASE + "train: {schedule: cosine, warmup_steps: 200}", "leaves no step of 100 to the cosine"),
        (BASE + "product: {hardware.gpu: [h100-sxm, h201]}", "gpu=h201: hardware.gpu = 'h201'"),
        ("base: gtp2", "base = 'gtp2': no file, shipped recipe or catalog model of that name; did you mean"),
        ("base: nowhere.yaml", "base = 'nowhere.yaml': no such file"),
        ("recipes: ['none-*.yaml']", "recipes = 'none-*.yaml': no such file"),
        ("name: ../up\nbase: gpt2", "name = '../up': not a name for a folder; write 1 to 64 letters"),
        ("- base", "not a mapping"),
    ],
)
def test_a_mistake_is_one_line_with_the_file(tmp_path: Path, text: str, message: str):
    with pytest.raises(InputError) as refused:
        read(tmp_path, text)
    assert message in str(refused.value)
    assert "tiny.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)
