"""``trainfit.trace`` of user code written for "cuda"."""

import argparse
import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainfit
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.replay import replay
from trainfit.models.build import build_model
from trainfit.prediction.trace import trace as trace_recipe
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Optimizer
from user_training import MIB, SQUARE, N, inside, mlp, steps
from virtual_runs import recipe_of, steady_sum, with_layers

ROOT = Path(__file__).parents[2]


# -- numbers in closed form ----------------------------------------------------------------------------------


def train_one_matrix() -> None:
    model = nn.Linear(N, N, bias=False).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(N, N).to("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def test_one_matrix_in_closed_form() -> None:
    traced = trainfit.trace(train_one_matrix)
    assert traced.code.num_steps == 3
    assert traced.params == traced.trainable_params == N * N
    assert traced.phases.after_init == 2 * SQUARE  # the weight and the input
    # The product and its square; the workspace of the forward's cuBLAS handle; the loss.
    workspace = 32 * MIB
    first = traced.phases.first.forward - (4 * SQUARE + workspace)
    assert 0 <= first <= MIB
    # The steady forward starts with the momentum, and with the workspace of the backward's handle.
    assert traced.phases.steady.forward == traced.phases.first.forward + SQUARE + workspace
    assert traced.breakdown.weights == traced.breakdown.optimizer == SQUARE
    assert traced.model_flops == traced.hardware_flops == 2 * 2 * N**3  # no gradient of the input is wanted
    assert traced.breakdown.total == traced.peak_allocated_bytes <= traced.peak_reserved_bytes
    assert traced.fits


def test_a_step_that_does_not_fit() -> None:
    def train() -> None:
        model = nn.Linear(N, N, bias=False).cuda()
        held = [model(torch.randn(100 * N, N, device="cuda")) for _ in range(4)]
        torch.stack([y.sum() for y in held]).sum().backward()

    assert trainfit.trace(train).fits
    assert not trainfit.trace(train, gpu="rtx-4090").fits


def test_the_same_as_the_recipe() -> None:
    """A Hugging Face model trained by a loop written here, and by a recipe's step."""
    config = with_layers("gpt2", 2)
    batch = Batch(micro=4, seq=256)
    recipe = recipe_of(
        config, precision="amp-fp16", batch=batch, optimizer=Optimizer(implementation="foreach")
    )

    def train() -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, "use_cache": False}))
        model.to("cuda").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            ids = torch.randint(0, 1000, (4, 256)).cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(input_ids=ids, labels=ids.clone()).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    ledger = trace_recipe(recipe, whole=True)
    expected = replay(ledger, CachingAllocator())
    assert traced.model_flops == steady_sum(ledger, "model_flops")
    assert traced.hardware_flops == steady_sum(ledger, "causal_flops")
    assert traced.params == ledger.params
    # Weights come to the device in another order: blocks that are not split differ by a little.
    for name in ("forward", "backward", "optimizer"):
        for step in ("first", "steady"):
            ours = getattr(getattr(traced.phases, step), name)
            assert ours == pytest.approx(getattr(getattr(expected.phases, step), name), rel=5e-3)
    assert traced.breakdown.weights == expected.breakdown.weights
    assert traced.breakdown.optimizer == expected.breakdown.optimizer


def test_our_attention_in_own_code() -> None:
    """An operation with a dry run: what its launchers allocate is in the ledger, as in a recipe's."""
    batch = Batch(micro=2, seq=512)
    recipe = recipe_of(with_layers("tiny-llama-demo", 2), "native", attention="triton", batch=batch)

    def train() -> None:
        model = build_model(recipe.model, dtype=torch.bfloat16, device="cuda", attention="triton")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            ids = torch.randint(0, 1000, (2, 512), device="cuda")
            labels = ids.clone()
            model(ids, labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    expected = replay(trace_recipe(recipe, whole=True), CachingAllocator())
    assert traced.phases.steady.forward == expected.phases.steady.forward
    assert traced.phases.steady.backward == expected.phases.steady.backward


def test_flops_as_pytorch_counts_them() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 8, 4, stride=2, groups=1),
            nn.Flatten(), nn.Linear(8 * 15 * 15, 10),
        )  # fmt: skip

    def step(model: nn.Module, device: str) -> None:
        model(torch.randn(4, 3, 32, 32, device=device)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step(build(), "cpu")
    traced = trainfit.trace(lambda: step(build().cuda(), "cuda"))
    assert traced.model_flops == counter.get_total_flops()
    assert any("convolutions" in text for text in traced.assumptions)


def test_an_example_against_an_h200() -> None:
    """examples/hf_trainer.py, measured there with torch 2.11 (evidence/records/examples/h200.jsonl)."""
    spec = importlib.util.spec_from_file_location("hf_trainer", ROOT / "examples" / "hf_trainer.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rows = [json.loads(line) for line in (ROOT / "evidence" / "records" / "examples" / "h200.jsonl").open()]
    measured = next(row["measured"] for row in rows if row["command"] == "examples/hf_trainer.py --steps 7")
    args = argparse.Namespace(
        model="gpt2", tiny=False, checkpointing=False, seq=1024, batch_size=8, accumulate=1, bf16=True,
        steps=7,
        compile=False,
    )  # fmt: skip
    traced = trainfit.trace(lambda: example.train(args), steps=2)
    assert traced.peak_allocated_bytes == pytest.approx(measured["peak_allocated_bytes"], rel=0.002)
    assert traced.peak_reserved_bytes == pytest.approx(measured["peak_reserved_bytes"], rel=0.02)


# -- steps ---------------------------------------------------------------------------------------------------


def test_an_endless_loop_is_ended() -> None:
    seen: list[int] = []

    def train() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in itertools.count():
            seen.append(step)
            steps(model, optimizer, 1)

    assert trainfit.trace(train, steps=2).code.num_steps == 2
    assert seen == [0, 1, 2]  # the third ends as its forward begins


def test_one_step_is_first_and_steady() -> None:
    traced = inside(lambda: None)
    assert traced.code.num_steps == 1
    assert traced.phases.steady == traced.phases.first
    assert traced.step_s
    assert any("one optimizer step" in text for text in traced.assumptions)


def test_accumulation_two_optimizers_closures_and_none() -> None:
    forward_backward = 2 * 8 * 256 * 256 * (2 + 3)  # two products; their gradients, but none of the input

    def accumulate() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in range(12):
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            if batch % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    def alternate() -> None:
        models = [mlp().cuda(), mlp().cuda()]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                steps(model, optimizer, 1)

    def closure() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = model(torch.randn(8, 256, device="cuda")).square().mean()
            value.backward()
            return value

        for _ in range(3):
            optimizer.step(loss)

    def by_hand() -> None:
        model = mlp().cuda()
        for _ in range(3):
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None

    def in_backward() -> None:
        model = mlp().cuda()
        optimizers: dict[Tensor, torch.optim.Optimizer] = {
            p: torch.optim.Adam([p]) for p in model.parameters()
        }

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(torch.randn(8, 256, device="cuda")).square().mean().backward()

    for train, times in ((accumulate, 4), (alternate, 2), (closure, 1), (by_hand, 1), (in_backward, 1)):
        traced = trainfit.trace(train, steps=3)
        assert (train.__name__, traced.model_flops) == (train.__name__, times * forward_backward)
        assert traced.code.num_steps == 3


def test_defaults_are_cudas() -> None:
    """AdamW without arguments works on lists on CUDA; clipping too."""

    def train() -> None:
        model = mlp(N).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(8, N, device="cuda")).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    scratch_bytes = [h.num_bytes for h in traced.code.holders if h.category == "temporary"]
    assert traced.peak_phase.endswith("optimizer")
    assert max(scratch_bytes) >= 2 * SQUARE  # the square roots of both matrices' second moments at once


def test_a_data_loader_with_workers_and_pinned_memory() -> None:
    def train() -> None:
        data = TensorDataset(torch.randn(64, 256), torch.randint(0, 256, (64,)))
        loader = DataLoader(
            data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
        )
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for x, y in loader:
            assert x.is_cpu
            loss = nn.functional.cross_entropy(
                model(x.to("cuda", non_blocking=True)), y.cuda(non_blocking=True)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert trainfit.trace(train).code.num_steps == 3


def test_what_is_traced_otherwise_is_said() -> None:
    def train() -> None:
        model = mlp().cuda()
        y = model(torch.randn(8, 256, device="cuda"))
        y[y > 0].sum().backward()
        torch.save(model.state_dict(), "never-written.pt")

    notes = " ".join(trainfit.trace(train).assumptions)
    assert "select all elements" in notes
    assert "torch.save" in notes


# -- refusals and text ---------------------------------------------------------------------------------------


def test_refusals() -> None:
    model = mlp()

    def moves_what_was_there() -> None:
        model.cuda()

    def stays_on_the_host() -> None:
        mlp()(torch.randn(8, 256)).sum().backward()

    def needs_data() -> None:
        y = mlp().cuda()(torch.randn(8, 256, device="cuda"))
        torch.unique(y).sum().backward()

    for step, words in (
        (moves_what_was_there, "build the model inside"),
        (stays_on_the_host, "no module with parameters"),
        (needs_data, "result depends on the data"),
    ):
        with pytest.raises(InputError, match=words):
            trainfit.trace(step)
    for gpu, words in (("h20o", "h20"), ("tpu-v5p", "measured or modelled")):
        with pytest.raises(InputError, match=words):
            trainfit.trace(train_one_matrix, gpu=gpu)
    with pytest.raises(InputError, match="steps"):
        trainfit.trace(train_one_matrix, steps=0)
    assert type(next(model.parameters())) is nn.Parameter


def test_it_prints() -> None:
    traced = trainfit.trace(train_one_matrix)
    text = str(traced)
    assert text.startswith("FITS on h200:")
    assert "train_one_matrix, 3 steps traced, on 1 x h200" in text
    assert "16.78M parameters" in text
    assert "Largest holders" in text
    assert "train_one_matrix" in traced._repr_html_()
    assert isinstance(traced, trainfit.Estimate)
    assert traced.recipe_id is traced.tokens_per_s is None
    assert traced.cost.per_million_samples
    assert traced.mfu == pytest.approx(traced.model_flops / traced.step_s / 67e12)
    assert type(traced).model_validate_json(traced.model_dump_json()) == traced


def test_lazy_modules_are_named() -> None:
    with pytest.raises(InputError, match="a lazy module .* not modelled"):
        inside(lambda: nn.LazyLinear(8) and None)
