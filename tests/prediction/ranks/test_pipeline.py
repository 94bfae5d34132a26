"""Pipelines: stages and the whole model, schedules and torch's, memory and a run in their order."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import schedules

from tiny_recipe import tiny_recipe
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import replay
from trainfit.models.build import build_model
from trainfit.parallel import pipeline as parts
from trainfit.prediction import trace as tracing
from trainfit.prediction.pipeline.estimate import _traced_recipe
from trainfit.prediction.pipeline.schedule import timeline
from trainfit.prediction.pipeline.stage_ledger import composed
from trainfit.prediction.predict import predict
from trainfit.prediction.traced_steps import _own_sharded_gradients
from trainfit.spec.errors import InputError
from trainfit.spec.pipeline import Action, Stage, in_flight, order, stages
from trainfit.spec.recipe import Batch, Hardware, Parallel, Recipe
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.techniques.parallel.pipeline import stages_of
from trainfit.virtual.gpu import VirtualGpu

NUM_BATCHES = 5


def recipe(implementation: str = "native", layers: int = 4, num: int = NUM_BATCHES, **mesh: Any) -> Recipe:
    mesh = {"pipeline": 4, **mesh}
    count = Parallel(**mesh).world_size
    return tiny_recipe(
        implementation,
        layers,
        batch=Batch(micro=2, seq=16, accumulate=num),
        hardware=Hardware(gpu="h200", count=count),
        parallel=Parallel(**mesh),
    )


def bubble_share(parallel: Parallel, num_micro_batches: int) -> float:
    """Return the idle share of a pipeline of equal stages, (P - 1) / (v M + P - 1)."""
    idle = parallel.pipeline - 1
    return idle / (parallel.stages_per_rank * num_micro_batches + idle)


class Given(torch.nn.Module):
    """In place of ``Received``: the hidden states that the stage before computed."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x.detach().requires_grad_()

    def forward(self, ids_bs: Tensor) -> Tensor:
        return self.x


@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_stages_one_after_another_compute_what_the_whole_model_does(implementation: str) -> None:
    made, cpu = recipe(implementation, num=1), torch.device("cpu")
    whole = assemble(made.model_copy(update={"hardware": Hardware(), "parallel": Parallel()}), cpu)
    (batch,) = whole.random_batches()
    expected = whole.loss(batch)
    expected.backward()
    gradients: dict[str, Any] = {name: p.grad for name, p in whole.model.named_parameters()}
    ends: list[tuple[Tensor, Given | None]] = []
    models: list[tuple[Stage, Any]] = []
    for stage in stages_of(made):

        def leave(model: torch.nn.Module, stage: Stage = stage) -> None:
            parts.cut(model, stage, made)

        step = assemble(made, cpu, on_model=leave, stage=stage)
        models.append((stage, step.model))
        given = None
        if not stage.is_first:
            given = Given(ends[-1][0])
            owner: Any = step.model if implementation == "native" else step.model.base_model
            setattr(owner, "embed" if implementation == "native" else "embed_tokens", given)
        ids = batch["input_ids"]
        ends.append((step.loss(batch) if stage.is_last else parts.hidden_states(step.model, ids), given))
    assert torch.equal(ends[-1][0], expected)
    gradient = None
    for x, given in reversed(ends):
        torch.autograd.backward(x, gradient)
        gradient = given.x.grad if given is not None else None
    number = 0
    for stage, model in models:
        for name, parameter in model.named_parameters():
            before, found, after = name.partition("layers.")
            index, _, rest = after.partition(".")
            name = f"{before}{found}{int(index) + stage.first_block}.{rest}" if found else name
            assert torch.equal(parameter.grad, gradients[name]), name
            number += 1
    assert number == len(gradients)


@pytest.mark.parametrize(("ranks", "chunks", "num"), [(4, 1, 6), (4, 1, 3), (4, 2, 8), (2, 3, 4)])
def test_orders_are_those_of_torch(ranks: int, chunks: int, num: int) -> None:
    mesh = Parallel(pipeline=ranks, schedule="interleaved" if chunks > 1 else "1f1b",
                    virtual_stages=chunks)  # fmt: skip
    for rank in range(ranks):
        ours = [
            (a.chunk * ranks + rank, "F" if a.is_forward else "B", a.micro_batch)
            for a in order(mesh, rank, num)
        ]
        if chunks == 1:  # torch's Schedule1F1B.
            ahead = min(num, ranks - rank)
            assert [kind for _, kind, _ in ours] == list("F" * ahead + "BF" * (num - ahead) + "B" * ahead)
            continue
        torchs: Any = object.__new__(schedules.ScheduleInterleaved1F1B)
        torchs.n_local_stages, torchs.pp_group_size, torchs._n_microbatches = chunks, ranks, num
        torchs.microbatches_per_round = ranks
        found = [one for one in torchs._calculate_single_rank_operations(rank) if one is not None]
        kinds = {schedules._ComputationType.FORWARD: "F", schedules._ComputationType.FULL_BACKWARD: "B"}
        assert ours == [(one[0], kinds[one[1]], one[2]) for one in found]


@pytest.mark.parametrize(("ranks", "chunks", "num"), [(4, 1, 8), (8, 1, 8), (2, 1, 1), (4, 4, 8), (8, 2, 64)])
def test_bubbles_of_equal_stages_are_the_closed_form(ranks: int, chunks: int, num: int) -> None:
    for schedule in ("interleaved",) if chunks > 1 else ("1f1b", "gpipe"):
        mesh = Parallel(pipeline=ranks, schedule=schedule, virtual_stages=chunks)
        found = timeline(
            mesh, num, lambda _, action: (1.0 if action.is_forward else 2.0, 0.0), lambda *_: 0.0
        )
        assert found.bubble == pytest.approx(bubble_share(mesh, num), abs=1e-12)
        assert found.total_s == pytest.approx(3 * (chunks * num + ranks - 1))


def test_what_ends_have_more_to_do_delays_no_other_gpu() -> None:
    """First gathers overlap the wait for an input, and last reductions follow the send."""
    ends = {(True, 0), (False, 7)}

    def seconds(_: int, action: Action) -> tuple[float, float]:
        more = 0.5 if (action.is_forward, action.micro_batch) in ends else 0.0
        return (1.0 if action.is_forward else 2.0, more)

    found = timeline(Parallel(pipeline=4), 8, seconds, lambda *_: 0.0)
    assert found.total_s == pytest.approx(3 * (8 + 3) + 2 * 0.5)


def test_published_numbers_of_schedules() -> None:
    # arXiv:2104.04473, section 2.2: bubble over ideal time (p - 1) / m, with v chunks a v-th of it.
    for chunks in (1, 2):
        mesh = Parallel(pipeline=8, schedule="interleaved" if chunks > 1 else "1f1b", virtual_stages=chunks)
        share = bubble_share(mesh, 32)
        assert share / (1 - share) == pytest.approx(7 / 32 / chunks)
        # arXiv:2205.05198, section 4.2.3: activations of the first stage, 1 + (p - 1) / (p m) times 1F1B's.
        held = in_flight(order(mesh, 0, 32)) / chunks
        assert held == pytest.approx(8 * (1 + 7 / (8 * chunks) * (chunks > 1)))
    # Llama 3 405B, arXiv:2407.21783, section 3.3.2: one layer less on the first and on the last of 16 stages.
    assert [one.num_blocks for one in stages(126, 16)] == [7, *[8] * 14, 7]
    assert [one.num_blocks for one in stages(32, 4)] == [8] * 4


def in_this_order(actions: list[Action]) -> Any:
    """Return a replacement of ``run_steps`` that runs a stage's micro-batches as a schedule does."""

    def run_steps(step: Step, virtual: VirtualGpu) -> None:
        for name in ("first", "steady"):
            virtual.begin(name, "data")
            batches = step.random_batches()
            losses: dict[int, Tensor] = {}
            kept: list[Tensor] = []
            for action in actions:
                virtual.begin(name, "forward" if action.is_forward else "backward")
                for hook in step._before_batch:
                    hook(action.micro_batch == len(batches) - 1)
                if action.is_forward:
                    losses[action.micro_batch] = step.loss(batches[action.micro_batch])
                    kept.append(losses[action.micro_batch].detach())
                else:
                    step._backward(losses[action.micro_batch])
                    del losses[action.micro_batch]
            if step.mesh is not None:
                _own_sharded_gradients(step, virtual)
            virtual.begin(name, "optimizer")
            step._update()
            for optimizer in step.optimizers:
                virtual.own_state(optimizer)
            torch.stack(kept).mean()

    return run_steps


def peaks(ledger: Ledger) -> tuple[Any, ...]:
    found = replay(ledger, CachingAllocator())
    return found.phases, found.peak_reserved_bytes


@pytest.mark.parametrize(
    ("rank", "mesh"),
    [
        (0, {"schedule": "gpipe"}),
        (3, {}),
        (0, {"shard": 2}),
        (1, {"shard": 2, "reshard_after_forward": False}),
        (0, {"replicate": 2, "strategy": "ddp"}),
        (1, {"tensor": 2}),
    ],
)
def test_memory_is_that_of_a_run_in_the_schedules_order(
    rank: int, mesh: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(**mesh)
    stage = stages_of(made)[rank]._replace(first_block=0)
    short = _traced_recipe(made, stage)
    actions = order(made.mesh, rank, NUM_BATCHES)
    found = composed([tracing.trace(short, stage=stage)], actions, NUM_BATCHES)
    monkeypatch.setattr(tracing, "run_steps", in_this_order(actions))
    all_batches = short.model_copy(update={"batch": made.batch})
    assert peaks(found) == peaks(tracing.trace(all_batches, stage=stage, whole=True))


def test_blocks_of_a_sharded_stage_free_their_own_accumulated_gradients() -> None:
    """FSDP2's whole parameters, whose gradients are added up, belong to their block."""
    made = recipe(layers=10, num=2, pipeline=2, shard=2)
    stage = stages_of(made)[0]._replace(first_block=0)
    short = _traced_recipe(made, stage)
    found = tracing.trace(short, stage=stage)
    assert found.repeat > 1
    assert peaks(found) == peaks(tracing.trace(short, stage=stage, whole=True))


def test_interleaved_stages_of_a_model_with_a_tied_weight() -> None:
    made = recipe(layers=8, num=8, schedule="interleaved")
    config = {**dict(made.model.config), "tie_word_embeddings": True}  # pyright: ignore
    made = made.model_copy(update={"model": made.model.model_copy(update={"config": config})})
    found = predict(made)
    whole = build_model(made.model, dtype=torch.float32, device="meta")
    assert found.params == sum(parameter.numel() for parameter in whole.parameters())
    assert [one.blocks for one in found.pipeline] == [((n, n), (n + 4, n + 4)) for n in range(1, 5)]
    assert [one.in_flight for one in found.pipeline] == [11, 9, 7, 5]
    assert found.step_s is not None
    assert found.time is not None
    assert found.step_s == pytest.approx(found.time.total)
    sent = {one.kind: one for one in found.traffic}
    assert sent["send"].bytes_sent == sent["send"].calls * 2 * 16 * 32 * 4
    # Its gradients on the first and on the last GPU are added.
    assert (sent["all_reduce"].calls, sent["all_reduce"].bytes_sent) == (1, 128 * 32 * 4)


def test_pipelines_are_not_run_and_disagreements_are_refused() -> None:
    with pytest.raises(InputError, match="parallel.pipeline = 4: pipeline parallel is predicted, not run"):
        registry.check_device(recipe(), "cuda")
    for made, words in (
        (recipe(layers=3), "leave some of 4 stages without one"),
        (recipe(layers=8, num=6, schedule="interleaved"), "in groups of 4"),
    ):
        with pytest.raises(InputError, match=words):
            registry.check(made)
    with pytest.raises(ValueError, match="no pipeline"):
        Parallel(schedule="interleaved")
    with pytest.raises(ValueError, match="1f1b with 2 stages on a GPU"):
        Parallel(pipeline=2, virtual_stages=2)


@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_what_a_micro_batch_leaves_to_the_next_one_adds_up_over_none(implementation: str) -> None:
    """Models under tensor parallelism and recomputation keep tensors until the next forward."""

    def peak(num: int) -> int:
        base = recipe(implementation, num=num, pipeline=2, tensor=2)
        return predict(base.model_copy(update={"recompute": "full"})).peak_allocated_bytes

    assert peak(8) - peak(5) == 3 * 2 * 512  # Tokens and labels, each in a block of 512 bytes
