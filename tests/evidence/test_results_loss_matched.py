"""Training in fp8 beside bf16: the text, the sweep's recipes, and the table and figure of its runs."""

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.scripts import english_novels
from evidence.scripts.tables import bench, loss_matched
from evidence.scripts.tables.joined import SMOOTHED
from page_claims import check
from trainfit.report.plot import Panel
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble
from trainfit.sweeps.read import read_sweep
from trainfit.techniques import registry
from trainfit.training.tokenizer import load_tokenizer

FILE = Path(__file__).parents[2] / "recipes" / "speed" / "loss-matched-0.5b.yaml"
PAGE = "evidence/pages/kernels.md"
WITHOUT_TEXT = ["data.train=stories", "data.eval=null", "data.tokenizer=null"]
TINY = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 1040, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip


def recipes() -> dict[str, Recipe]:
    return {one.name: one.recipe for one in read_sweep(FILE, settings=WITHOUT_TEXT).variants}


def step_of(recipe: Recipe) -> Step:
    small = {"model": {"config": TINY}, "batch": {"micro": 1, "seq": 32}, "compile": False}
    on_cpu = {**small, "hardware": {"gpu": "cpu"}}
    return assemble(recipe_from(merge(recipe.content(), on_cpu)), torch.device("cpu"))


def test_rows_with_fp8_differ_in_their_products_alone() -> None:
    found = recipes()
    assert set(found) == set(loss_matched.NAMES)
    contents = {name: recipe.content() for name, recipe in found.items()}
    apart = {
        name: {key for key, value in content.items() if value != contents["bf16"][key]}
        for name, content in contents.items()
    }
    assert apart == {
        "bf16": set(), "bf16 seed 1": {"seed"}, "bf16 kernels": {"block_kernels", "attention"},
        "fp8": {"precision", "block_kernels", "fp8_weights"},
        "fp8 delayed": {"precision", "block_kernels", "fp8_weights", "fp8_scaling"},
    }  # fmt: skip
    for recipe in found.values():
        registry.check(recipe)


def test_every_run_begins_with_equal_weights_and_learns() -> None:
    pytest.importorskip("torchao")
    steps = {name: step_of(recipe) for name, recipe in recipes().items()}
    weights = {name: dict(step.model.named_parameters()) for name, step in steps.items()}
    for name in ("fp8", "fp8 delayed", "bf16 kernels"):
        own = list(weights[name].values())
        assert all(torch.equal(*pair) for pair in zip(own, weights["bf16"].values(), strict=True))
    other = list(weights["bf16 seed 1"].values())
    assert not torch.equal(other[0], next(iter(weights["bf16"].values())))
    first = dict[str, float]()
    for name, step in steps.items():
        batches = step.random_batches()
        losses = [step(batches).item() for _ in range(4)]
        first[name] = losses[0]
        assert losses[-1] < losses[0]
    assert first["fp8"] != first["bf16"]
    assert first["fp8"] == pytest.approx(first["bf16"], rel=1e-3)


def archive(texts: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in texts.items():
            member, content = tarfile.TarInfo(name), text.encode("utf-8-sig")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_the_texts_are_those_of_the_archive(tmp_path: Path) -> None:
    """Later novels and other files are left out, every 20th is held out; the tokenizer loses nothing."""
    made = {f"corpus/Name_{year}.txt": f"Novel {year}\r\nof word{year}.\r\n" for year in range(1900, 1940)}
    texts = english_novels.novels(archive({**made, "corpus/notes.txt": "none"}))
    assert list(texts) == [f"Name_{year}" for year in range(1900, 1931)]
    assert texts["Name_1900"] == "Novel 1900\nof word1900."
    found = english_novels.build(texts, tmp_path, 300)
    assert found["held_out"] == ["Name_1919"]
    train = (tmp_path / "train.txt").read_text()
    assert train.split("\n<|endoftext|>\n") == [one for name, one in texts.items() if name != "Name_1919"]
    assert (tmp_path / "eval.txt").read_text() == texts["Name_1919"]
    tokenizer, _ = load_tokenizer(tmp_path / "tokenizer.json")
    ids = [tokenizer.encode(one).ids for name, one in texts.items() if name != "Name_1919"]
    assert found["files"]["train.txt"]["tokens"] == sum(map(len, ids))
    assert tokenizer.decode(ids[0]) == texts["Name_1900"]
    digest = hashlib.sha256(train.encode()).hexdigest()
    assert found["files"]["train.txt"]["sha256"] == digest


def test_no_sequence_comes_twice() -> None:
    """The runs take less than one epoch of the text that the record describes."""
    file = read_sweep(FILE, settings=WITHOUT_TEXT).file
    recipe = recipes()["bf16"]
    assert file.train is not None
    share = file.train.steps * recipe.step_tokens / loss_matched.corpus()["files"]["train.txt"]["tokens"]
    assert share == pytest.approx(0.88, abs=0.005)
    assert "0.88 of an epoch" in FILE.read_text()


def run(losses: list[float], held_out: float, status: str = "done") -> dict[str, Any]:
    return {
        "status": status, "steps": len(losses), "losses": losses, "tokens_per_s": 1000.0,
        "evaluations": [{"loss": 9.0}, {"loss": held_out}],
    }  # fmt: skip


def test_the_table_and_figure_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = {
        "bf16": run([6.0] * 150 + [4.0] * 50, 4.5), "fp8": run([6.0] * 100 + [5.5] * 50 + [4.25] * 50, 4.75),
        "fp8 delayed": run([7.0] * 20, 9.0, "diverged"), "bf16 seed 1": run([6.0] * 150 + [3.5] * 50, 4.25),
    }  # fmt: skip
    monkeypatch.setattr(loss_matched, "runs", lambda: made_up)
    assert loss_matched.table().splitlines()[2:] == [
        "| bf16 | 5.0000 | – | 4.5000 | 1,000 |",
        "| fp8 | 4.8750 (-0.1250) | -0.5000 | 4.7500 (+0.2500) | 1,000 |",
        "| fp8, delayed scaling | diverged after 20 steps | – | – | – |",
        "| bf16, another seed | 4.7500 (-0.2500) | -0.5000 | 4.2500 (-0.2500) | 1,000 |",
    ]
    drawn: list[Panel] = []
    monkeypatch.setattr(loss_matched, "draw", lambda panels, *_, **__: drawn.extend(panels) or "")
    loss_matched.curves()
    assert [[(one.label, *one.x, *one.y) for one in panel.series] for panel in drawn] == [
        [("bf16", 150, 200, 6, 4), ("fp8", 150, 200, 5.5, 4.25), ("bf16, another seed", 150, 200, 6, 3.5)],
        [("bf16", 150, 200, 0, 0), ("fp8", 150, 200, -0.5, 0.25), ("bf16, another seed", 150, 200, 0, -0.5)],
    ]  # fmt: skip


def test_without_runs_the_table_and_figure_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_matched, "runs", dict)
    assert loss_matched.table() == bench.NOT_MEASURED
    assert loss_matched.curves() == bench.PLACEHOLDER


def test_the_runs_trained_on_the_text_of_the_record() -> None:
    files = loss_matched.corpus()["files"]
    assert files["tokenizer.json"]["tokens"] == english_novels.VOCABULARY
    for summary in loss_matched.runs().values():
        # An end token follows each document; a novel of more than a MiB is several.
        more = summary["run"]["train_tokens"] - files["train.txt"]["tokens"]
        assert 94 <= more < 188


def test_the_page_states_how_far_runs_lie_apart() -> None:
    def apart(loss: Callable[[str], float], *names: str) -> list[float]:
        return [loss(name) - loss("bf16") for name in names]

    check(
        PAGE,
        "Over the last 100 steps fp8 is # above bf16 and delayed scaling #, "
        "other kernels # and another seed # below it",
        (
            *apart(loss_matched.at_the_end, "fp8", "fp8 delayed"),
            *(-far for far in apart(loss_matched.at_the_end, "bf16 kernels", "bf16 seed 1")),
        ),
    )
    (more,) = apart(loss_matched.at_the_end, "fp8 delayed")
    below = max(at for at, far in enumerate(loss_matched.apart("fp8 delayed")) if far < 0)
    percent = 100 * more / loss_matched.at_the_end("bf16")
    sentence = "in training, delayed scaling is # % above at the end, and was below until step #"
    check(PAGE, sentence, [percent, SMOOTHED * (below + 1)])
    pattern = "On held-out text fp8 is #, delayed scaling # and other kernels # above bf16"
    check(PAGE, pattern, apart(loss_matched.held_out, "fp8", "fp8 delayed", "bf16 kernels"))
