"""Evaluation, generation and checkpoints in traced code are phases beside the training step."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.prediction.evaluation_code import evaluates_at
from trainfit.report.prediction_text import show

N, BATCH = 256, 8
PRODUCT = 2 * BATCH * N * N
STEP = 2 + 3
"""Products of a step of ``model``: two, and their gradients but the first one's input."""


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(N, N), nn.ReLU(), nn.Linear(N, N)).cuda()


def batch() -> Tensor:
    return torch.randn(BATCH, N, device="cuda")


class Loop:
    """A training loop with a frozen copy of its model and a code of its own around each step."""

    def __init__(self, step: Callable[["Loop"], Any], *, before: Callable[["Loop"], Any] = lambda loop: None):
        self.step, self.before = step, before
        self.number = 0

    def __call__(self) -> None:
        self.model = model()
        self.copy = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.before(self)
        for self.number in range(4):
            self.step(self)

    def train(self, loss: Tensor | None = None) -> None:
        (self.model(batch()).square().mean() if loss is None else loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# -- what belongs to the step --------------------------------------------------------------------------------


def reference(loop: Loop) -> None:
    x = batch()
    with torch.no_grad():
        known = loop.copy(x)
    loop.train((loop.model(x) - known).square().mean())


def hard_labels(loop: Loop) -> None:
    with torch.no_grad():
        labels = loop.model(batch()).argmax(-1)
    loop.train(F.cross_entropy(loop.model(batch()), labels))


def pseudo_labels(loop: Loop) -> None:
    with torch.no_grad():
        confidence, labels = loop.copy(batch()).softmax(-1).max(-1)
        mask = (confidence > 0.9).float()
    loop.train((F.cross_entropy(loop.model(batch()), labels, reduction="none") * mask).mean())


def detached(loop: Loop) -> None:
    """A forward with gradients that no backward enters, but whose result feeds one that does."""
    loop.train(loop.model(loop.copy(batch()).detach()).square().mean())


def recomputed(loop: Loop) -> None:
    """Reentrant checkpointing of blocks called one by one: their first forwards run without gradients."""
    y = batch().requires_grad_()
    for block in loop.model:
        y = checkpoint(block, y, use_reentrant=True)  # pyright: ignore[reportAssignmentType]
    loop.train(y.square().mean())


def averaged(loop: Loop) -> None:
    loop.train()
    with torch.no_grad():
        torch._foreach_lerp_(list(loop.copy.parameters()), list(loop.model.parameters()), 0.01)  # pyright: ignore[reportArgumentType, reportCallIssue]


def metrics(loop: Loop) -> None:
    y, target = loop.model(batch()), batch()
    nn.L1Loss()(y.detach(), target)
    loop.train(nn.MSELoss()(y, target))


@pytest.mark.parametrize(
    ("step", "products"),
    [
        (Loop.train, STEP), (reference, STEP + 2), (hard_labels, STEP + 2), (pseudo_labels, STEP + 2),
        (detached, STEP + 2), (recomputed, STEP + 1), (averaged, STEP), (metrics, STEP),
    ],
)  # fmt: skip
def test_what_feeds_the_loss_is_part_of_the_step(step: Callable[[Loop], Any], products: int) -> None:
    traced = trainfit.trace(Loop(step))
    assert traced.model_flops == products * PRODUCT
    assert traced.code.other_phases == ()


def test_what_follows_the_update_takes_time_in_the_step() -> None:
    plain, more = trainfit.trace(Loop(Loop.train)), trainfit.trace(Loop(averaged))
    assert plain.step_s is not None
    assert more.step_s is not None
    assert more.step_s > plain.step_s + 1e-5


# -- what does not -------------------------------------------------------------------------------------------


def evaluate(loop: Loop, module: nn.Module | None = None, times: int = 3) -> None:
    total = torch.zeros((), device="cuda")
    with torch.no_grad():
        for _ in range(times):
            total += (module or loop.model)(batch()).square().mean()


def every_step(loop: Loop) -> None:
    loop.train()
    evaluate(loop)


def every_second(loop: Loop) -> None:
    if loop.number % 2 == 0:
        evaluate(loop)
    loop.train()


def inferred(loop: Loop) -> None:
    loop.train()
    with torch.inference_mode():
        for _ in range(3):
            loop.model(batch())


def without_no_grad(loop: Loop) -> None:
    loop.train()
    loop.model.eval()
    for _ in range(3):
        loop.model(batch()).square().mean().item()
    loop.model.train()


def loaded_between(loop: Loop) -> None:
    """Batches of an evaluation are made where gradients are on."""
    loop.train()
    for _ in range(3):
        x = torch.randn(64 * BATCH, 64 * N, device="cuda")[:BATCH, :N].contiguous()
        with torch.no_grad():
            loop.model(x)


def beside_a_reference(loop: Loop) -> None:
    reference(loop)
    evaluate(loop)


@pytest.mark.parametrize(
    ("step", "products", "times"),
    [
        (every_step, STEP, (1, 2)), (every_second, STEP, (0, 2)), (inferred, STEP, (1, 2)),
        (without_no_grad, STEP, (1, 2)), (loaded_between, STEP, (1, 2)),
        (beside_a_reference, STEP + 2, (1, 2)),
    ],
)  # fmt: skip
def test_an_evaluation_is_no_part_of_the_step(
    step: Callable[[Loop], Any], products: int, times: tuple[int, ...]
) -> None:
    alone = reference if step is beside_a_reference else Loop.train
    traced, plain = trainfit.trace(Loop(step)), trainfit.trace(Loop(alone))
    (found,) = traced.code.other_phases
    assert traced.model_flops == products * PRODUCT
    assert (found.name, found.num_forwards, found.flops) == ("evaluation", 3, 6 * PRODUCT)
    assert found.after_steps == times
    assert found.seconds
    assert traced.step_s is not None
    assert plain.step_s is not None
    assert traced.step_s == pytest.approx(plain.step_s, rel=0.1)


def test_an_evaluation_reaches_the_peak() -> None:
    def step(loop: Loop) -> None:
        loop.train()
        with torch.no_grad():
            loop.model(torch.randn(4096 * BATCH, N, device="cuda"))

    traced = trainfit.trace(Loop(step))
    (found,) = traced.code.other_phases
    assert traced.peak_phase == "evaluation"
    assert found.peak_allocated_bytes == traced.peak_allocated_bytes > 2 * traced.phases.steady.peak


def test_an_evaluation_after_the_last_step_and_one_before_the_first() -> None:
    def step(loop: Loop) -> None:
        loop.train()
        if loop.number == 1:
            evaluate(loop)

    after, first = (
        trainfit.trace(Loop(step), steps=2),
        trainfit.trace(Loop(Loop.train, before=evaluate), steps=1),
    )
    assert after.code.other_phases[0].after_steps == (2,)
    assert first.code.other_phases[0].after_steps == (0,)
    assert first.phases.after_init == pytest.approx(after.phases.after_init, abs=1024)


def test_an_endless_loop_without_gradients_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.user.steps.LOOK_ON_PASSES", 20)

    def serve() -> None:
        loop = Loop(Loop.train)
        loop()
        with torch.no_grad():
            while True:
                loop.model(batch())

    traced = trainfit.trace(serve, steps=4)
    assert traced.code.other_phases[0].num_forwards == 20
    assert any("followed for 20 forwards" in text for text in traced.assumptions)


# -- generation ----------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, N), nn.Linear(N, 100)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def log_probs(module: nn.Module, ids: Tensor) -> Tensor:
    return module(ids).log_softmax(-1).gather(-1, ids[..., None]).sum()


def test_a_step_of_grpo() -> None:
    """Sampled tokens are a generation; forwards of the old policy and the reference are parts of the step."""

    def train() -> None:
        policy = LanguageModel().cuda()
        known = copy.deepcopy(policy)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(3):
            ids = torch.randint(0, 100, (4, 8)).cuda()
            with torch.no_grad():
                for _ in range(5):
                    ids = torch.cat([ids, policy(ids)[:, -1:].argmax(-1)], 1)
                old, reference = log_probs(policy, ids), log_probs(known, ids)
            (log_probs(policy, ids) - old + reference).exp().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    (found,) = traced.code.other_phases
    one_token = 2 * 4 * N * 100
    assert (found.name, found.num_forwards, found.after_steps) == ("generation", 5, (0, 1, 2))
    assert found.flops == one_token * sum(range(8, 13))
    assert traced.model_flops == one_token * 13 * (2 + 3)


def test_sampling_with_gradients_on_is_a_generation() -> None:
    def train() -> None:
        policy = LanguageModel().cuda()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        for _ in range(3):
            ids = torch.randint(0, 100, (4, 8)).cuda()
            for _ in range(3):
                ids = torch.cat([ids, policy(ids)[:, -1:].argmax(-1)], 1)
            log_probs(policy, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    traced = trainfit.trace(train)
    (found,) = traced.code.other_phases
    assert (found.name, found.num_forwards, found.after_steps) == ("generation", 3, (0, 1, 2))
    assert traced.code.inputs.tokens == 4 * 11


def test_two_networks_with_an_optimizer_each() -> None:
    def train() -> None:
        makes, judges = model(), model()
        optimizers = [torch.optim.Adam(each.parameters()) for each in (judges, makes)]
        for _ in range(3):
            with torch.no_grad():
                fake = makes(batch())
            (judges(fake).mean() - judges(batch()).mean()).backward()
            optimizers[0].step()
            judges(makes(batch())).mean().backward()
            optimizers[1].step()
            with torch.no_grad():
                makes(batch())  # An image to look at.

    traced = trainfit.trace(train)
    (found,) = traced.code.other_phases
    assert (found.name, found.flops) == ("evaluation", 2 * PRODUCT)
    # Fakes; two judgements; the made and judged, with the gradients of the judge's input.
    assert traced.model_flops == (2 + 2 * STEP + (2 + 3) + (2 + 4)) * PRODUCT


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_phase() -> None:
    def step(loop: Loop) -> None:
        averaged(loop)
        if loop.number < 2:
            torch.save({"model": loop.model.state_dict(), "step": loop.number}, "never-written.pt")

    traced, plain = trainfit.trace(Loop(step)), trainfit.trace(Loop(averaged))
    (found,) = traced.code.other_phases
    assert (found.name, found.after_steps, found.num_forwards) == ("checkpoint", (1, 2), 0)
    assert found.saved_bytes == 4 * 2 * (N * N + N)
    assert found.seconds
    assert traced.step_s == pytest.approx(plain.step_s, rel=0.01)


# -- inputs --------------------------------------------------------------------------------------------------


def ids_in(module: Callable[[], nn.Module], accumulate: int = 1) -> Callable[[], None]:
    def train() -> None:
        trained = module()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for number in range(3 * accumulate):
            trained(torch.randint(0, 100, (4, 32)).cuda()).square().mean().backward()
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()

    return train


def replicated() -> nn.Module:
    torch.distributed.init_process_group("nccl")
    return nn.parallel.DistributedDataParallel(LanguageModel().cuda())


def sharded_and_split() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, made = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp")), LanguageModel().cuda()
    parallelize_module(made, mesh["tp"], {"head": ColwiseParallel()})
    return fully_shard(made, mesh=mesh["dp"])


@pytest.mark.parametrize(
    ("module", "accumulate", "world_size", "tokens", "ranks"),
    [
        (lambda: LanguageModel().cuda(), 1, None, 128, 1), (lambda: LanguageModel().cuda(), 3, None, 384, 1),
        (replicated, 1, 4, 128, 4), (sharded_and_split, 1, 4, 128, 2),
    ],
)  # fmt: skip
def test_tokens_are_the_ids_that_enter_the_model(
    module: Callable[[], nn.Module], accumulate: int, world_size: int | None, tokens: int, ranks: int
) -> None:
    traced = trainfit.trace(ids_in(module, accumulate), world_size=world_size)
    inputs, money = traced.code.inputs, traced.cost
    assert (inputs.tokens, inputs.samples, inputs.data_ranks) == (tokens, 4 * accumulate, ranks)
    assert traced.tokens_per_s == pytest.approx(tokens * ranks / traced.step_s)
    assert money.num_gpus == (world_size or 1)
    assert money.per_million_tokens == pytest.approx(money.per_hour / 3600 / traced.tokens_per_s * 1e6)
    assert "tokens/s" in str(traced)
    assert "$ a million tokens" in str(traced)


def test_images_are_samples() -> None:
    def train() -> None:
        classifier = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)).cuda()
        optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
        for _ in range(2):
            images, labels = torch.randn(16, 3, 32, 32).cuda(), torch.randint(0, 10, (16,)).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(classifier(images), labels)
            loss.backward()
            optimizer.step()

    traced = trainfit.trace(train, steps=2)
    assert (traced.code.inputs.tokens, traced.code.inputs.samples) == (0, 16)
    assert traced.tokens_per_s is traced.cost.per_million_tokens is None
    assert traced.code.inputs.samples_per_s == pytest.approx(16 / traced.step_s)
    assert "samples/s" in str(traced)
    assert "$ a million samples" in str(traced)


# -- text ----------------------------------------------------------------------------------------------------


def test_the_phases_are_printed_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    traced = trainfit.trace(Loop(every_second))
    show(None, traced)
    text = " ".join(capsys.readouterr().out.split())
    assert "Outside the training step" in text
    assert "3 forwards, 6.291 MFLOP; before the first step and after step 2" in text
    assert type(traced).model_validate_json(traced.model_dump_json()) == traced


# -- steps beyond those traced -------------------------------------------------------------------------------


def evaluates_every(number: int) -> Callable[[], None]:
    def train() -> None:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for step in range(10_000):
            trained(batch()).square().mean().backward()
            optimizer.step()
            if step % number == number - 1:
                with torch.no_grad():
                    trained(batch())

    return train


def test_code_that_evaluates_is_awaited_beyond_the_traced_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.user.steps.LOOK_AHEAD_STEPS", 9)
    monkeypatch.setattr("trainfit.user.steps.LOOK_AHEAD_S", (60.0, 60.0))
    found, missed = trainfit.trace(evaluates_every(7)), trainfit.trace(evaluates_every(100))
    assert [(one.name, one.after_steps) for one in found.code.other_phases] == [("evaluation", (7,))]
    assert found.code.num_steps == missed.code.num_steps == 3
    assert found.model_flops == missed.model_flops == STEP * PRODUCT
    assert missed.code.other_phases == ()
    assert any(
        "test_user_phases.py" in text and "12 steps did not reach it" in text for text in missed.assumptions
    )
    assert not any("did not reach" in text for text in found.assumptions)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("trainer.train()", 0), ("x = 1\nevaluate(model)", 2), ("Arguments(eval_strategy='steps')", 1),
        ("Arguments(eval_strategy='no')", 0), ("with torch.no_grad():\n    p.mul_(2)", 0),
        ("with torch.no_grad():\n    for p in zip(a, b):\n        p.sub_(1)", 0),
        ("@torch.no_grad()\ndef f(x):\n    return net(x)", 2), ("model.generate(ids)", 1),
        ("def broken(:", 0),
    ],
)  # fmt: skip
def test_where_a_script_evaluates(tmp_path: Path, source: str, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)

    def run() -> None: ...

    run.script = script  # pyright: ignore[reportFunctionMemberAccess]
    assert evaluates_at(run) == (f"train.py:{line}" if line else "")


def test_safetensors_are_a_checkpoint() -> None:
    from safetensors.torch import save_file

    def step(loop: Loop) -> None:
        loop.train()
        save_file(loop.model.state_dict(), "never-written.safetensors")

    (found,) = trainfit.trace(Loop(step)).code.other_phases
    assert (found.name, found.saved_bytes) == ("checkpoint", 4 * 2 * (N * N + N))
    assert not Path("never-written.safetensors").exists()
