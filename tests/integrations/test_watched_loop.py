"""``trainfit.watch``: tokens, FLOPs, speed and memory of a loop that is not trainfit's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import trainfit
from trainfit.cli.main import main
from trainfit.flops.closed_form import product_step_flops
from trainfit.integrations.meter import Reading, Watch, WatchSummary, memory_text, show
from trainfit.integrations.work import LINEAR_CONVENTION, Work
from trainfit.records import load, read
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
)
PEAK = 1e12


def llama() -> Any:
    return LlamaForCausalLM(CONFIG)


def forward(model: Any, b: int, s: int) -> torch.Tensor:
    ids = torch.zeros(b, s, dtype=torch.long)
    return model(input_ids=ids, labels=ids).loss


def closed(**options: Any) -> Any:
    return product_step_flops(CONFIG.to_dict(), **options)


def test_a_model_that_is_trained_in_eval_mode_as_from_pretrained_returns_it_is_counted() -> None:
    model = llama().eval()
    with Watch(model, peak_flops=PEAK, print_every_s=None) as watch:
        forward(model, 2, 16).backward()
        watch.step()
    assert watch.summary is not None
    assert watch.summary.tokens == 32


def test_a_step_has_the_tokens_and_flops_of_its_training_forwards() -> None:
    model = llama()
    with Watch(model, peak_flops=PEAK, print_every_s=None) as watch:
        forward(model, 2, 16).backward()
        forward(model, 3, 8).backward()  # Of the same step: accumulation over batches of other lengths
        model.eval()
        forward(model, 2, 16)
        model.train()
        with torch.no_grad():
            forward(model, 2, 16)
        reading = watch.step()
    flops = closed(batch=2, seq=16).model_flops + closed(batch=3, seq=8).model_flops
    assert reading is not None
    assert reading.tokens_per_s
    assert reading.mfu
    assert reading.tokens_per_s * reading.step_s == pytest.approx(2 * 16 + 3 * 8)
    assert reading.mfu * reading.step_s * PEAK == pytest.approx(flops) == reading.hfu * reading.step_s * PEAK  # type: ignore
    assert watch.summary is not None
    assert watch.summary.model_flops == flops
    assert watch.summary.tokens == 56


def test_recomputation_is_in_hfu_alone() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    work = Work(model)
    with work.attach():
        forward(model, 1, 8)
    done, expected = work.take(), closed(batch=1, seq=8, recomputed="full")
    assert (done.model_flops, done.hardware_flops) == (expected.model_flops, expected.hardware_flops)


def test_frozen_weights_under_lora_cost_no_weight_gradients() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    work = Work(model)
    with work.attach():
        forward(model, 1, 8)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    expected = closed(batch=1, seq=8, trained="adapter", adapter_params=trained)
    assert work.take().model_flops == expected.model_flops


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}])
def test_an_adapter_that_trains_more_than_lora_counts_its_linear_layers(options: dict[str, Any]) -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", **options))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained = sum(size for name, size in sizes.items() if "lora_A." in name or "lora_B." in name)
    frozen = sum(size for name, size in sizes.items() if name.endswith("base_layer.weight"))
    head = 100 * 32
    trained, frozen = (trained + head, frozen) if "modules_to_save" in options else (trained, frozen + head)
    work = Work(model)
    with work.attach():
        forward(model, 1, 8)
    assert work.take().model_flops == (6 * trained + 4 * frozen) * 8
    assert work.convention == LINEAR_CONVENTION


class Net(nn.Module):
    """A language model without a config, half of its linear weights frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.first.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.table(ids))).sum()


def test_a_model_of_no_known_type_counts_its_linear_layers() -> None:
    model = Net()
    work = Work(model)
    with work.attach():
        model(torch.zeros(2, 5, dtype=torch.long))
    done = work.take()
    assert (done.tokens, done.model_flops) == (10, 10 * (4 * 64 + 6 * 64))
    assert work.convention == LINEAR_CONVENTION


def test_flops_and_tokens_may_be_given() -> None:
    model = llama()
    work = Work(model, flops_per_token=100.0)
    with work.attach():
        forward(model, 2, 8)
    done = work.take(tokens=12)  # 4 of the 16 are padding, which is computed too.
    assert (done.tokens, done.model_flops, done.hardware_flops) == (12, 1600.0, None)


def test_a_model_compiled_inside_needs_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model.compile(backend="eager")
    with trainfit.watch(model, peak_flops=PEAK, seq=8) as watch:
        forward(model, 2, 8).backward()
        first = watch.step()
        forward(model, 2, 8).backward()
        second = watch.step(tokens=16)
    assert first is not None
    assert first.tokens_per_s is None
    assert first.mfu is None
    assert second is not None
    assert second.mfu
    assert second.mfu * second.step_s * PEAK == pytest.approx(closed(batch=2, seq=8).model_flops)
    assert "give w.step(tokens=...)" in capsys.readouterr().err


def test_a_prediction_s_file_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "gpt2", "--seq", "64", "--json"]) == 0
    file = tmp_path / "predicted.json"
    file.write_text(capsys.readouterr().out)
    with Watch(llama(), prediction=file, print_every_s=None) as watch:
        watch.step(tokens=8)
    assert watch.summary is not None
    assert watch.summary.predicted_allocated_bytes == json.loads(file.read_text())["peak_allocated_bytes"]
    assert watch.summary.predicted_gpu == "h200"  # The recipe's own default
    assert "predicted" in (line := show(watch.summary))
    assert "for another GPU, h200" in line
    same = watch.summary.model_copy(update={"gpu": "h200"})
    assert "another GPU" not in show(same)
    # The closed form covers Llama; a model without one takes the prediction's FLOPs a token.
    work = Work(Net(), estimate=trainfit.predict("gpt2", seq=64))
    predicted = trainfit.predict("gpt2", seq=64)
    assert work.take(tokens=64).model_flops == pytest.approx(predicted.model_flops)


def test_the_page_shows_a_recorded_summary() -> None:
    root = Path(__file__).parents[2]
    (record,) = load(root / "evidence/records/watched-loop.jsonl")
    summary = parse(WatchSummary, record.train, file="watched-loop.jsonl")
    shown = show(summary.model_copy(update={"predicted_gpu": "h100-sxm"}))  # Not yet recorded then
    assert f"\n{shown}\n```" in (root / "docs/guide/watch.md").read_text()


@pytest.mark.parametrize(
    ("predicted", "text"),
    [
        (None, "1000.00 MiB allocated, 1.95 GiB reserved"),
        (1000, "1000.00 MiB allocated (as predicted), 1.95 GiB reserved (+100.00% against the predicted)"),
        (1010, "1000.00 MiB allocated (-0.99% against the predicted), 1.95 GiB reserved (+98.02% against the "
         "predicted)"),
    ],
)  # fmt: skip
def test_memory_is_shown_against_the_prediction(predicted: int | None, text: str) -> None:
    sizes = predicted and predicted << 20
    reading = Reading(
        step=1, step_s=1.0, peak_allocated_bytes=1000 << 20, peak_reserved_bytes=2000 << 20,
        predicted_allocated_bytes=sizes, predicted_reserved_bytes=sizes,
    )  # fmt: skip
    assert memory_text(reading) == text


def test_values_are_logged_by_the_names_of_own_runs() -> None:
    model, logged = llama(), []
    with Watch(
        model, peak_flops=PEAK, print_every_s=None, log=lambda *one: logged.append(one), log_every=2
    ) as w:
        for _ in range(4):
            forward(model, 1, 8).backward()
            w.step()
        assert w.take() is not None
        assert w.take() is None
    assert [step for _, step in logged] == [2, 4]
    assert {"speed/step_s", "speed/tokens_per_s", "speed/mfu", "speed/hfu"} <= set(logged[0][0])


def test_the_result_is_a_record_also_after_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.sqlite"
    model = llama()

    def loop() -> None:
        with trainfit.watch(model, record=file, name="mine") as watch:
            forward(model, 1, 8).backward()
            watch.step()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    (record,) = read(file)
    assert record.train is not None
    assert (record.train["status"], record.train["steps"]) == ("out-of-memory", 1)
    assert main(["records", "list", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "mine, 1 steps watched" in " ".join(out.split())
    assert "then out-of-memory: CUDA out of memory" in err


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gpu"):
        trainfit.watch(llama(), gpu="h1000")
    with pytest.raises(InputError, match="log_every"):
        trainfit.watch(llama(), log_every=0)
    (tmp_path / "text").write_text("no record file")
    with pytest.raises(InputError):
        trainfit.watch(llama(), record=tmp_path / "text")
    watch = trainfit.watch(llama(), print_every_s=None)
    with watch, pytest.raises(InputError, match="tokens"):
        watch.step(tokens=0)


@pytest.mark.gpu
def test_on_a_gpu_steps_end_with_events_and_memory_is_the_allocators() -> None:
    model = llama().cuda()
    with Watch(model, print_every_s=None) as watch:
        for _ in range(5):
            ids = torch.zeros(2, 16, dtype=torch.long, device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            watch.step()
    assert watch.summary is not None
    assert watch.summary.step_times is not None
    assert len(watch.summary.step_times.samples) == 3
    assert watch.summary.mfu
    assert watch.summary.peak_allocated_bytes == torch.cuda.max_memory_allocated()
