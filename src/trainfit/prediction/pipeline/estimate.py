"""A recipe with a pipeline -> Estimate: its stages traced, each GPU's order replayed in memory and in time.

Equal stages are traced once. Memory is replayed for every position of the pipeline, and reported of the
highest. Time is the schedule's, with each stage's own forward and backward (schedule.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from trainfit.catalog.load import model_config
from trainfit.ledger.ledger import Collective, Ledger, Segment
from trainfit.ledger.replay import Replay
from trainfit.prediction import cache, communication
from trainfit.prediction.device_overhead import overhead_bytes
from trainfit.prediction.estimate import matmul_dtype, of_recipe, replay_on, summary
from trainfit.prediction.machine import Machine
from trainfit.prediction.pipeline.schedule import timeline
from trainfit.prediction.pipeline.stage_ledger import TRACED, composed, role, segments_of
from trainfit.prediction.time.peaks import peak_flops_per_s
from trainfit.prediction.time.roofline import Roofline, roofline
from trainfit.spec.pipeline import Action, Stage, in_flight, order, warm_up
from trainfit.spec.recipe import LossTerms, Recipe
from trainfit.spec.result import Estimate, PipelineGpu, StepTime, Traffic
from trainfit.spec.units import format_bytes
from trainfit.techniques import registry
from trainfit.techniques.parallel.pipeline import hidden_shape, stages_of

TIMES = tuple(StepTime.model_fields)
MORE_GROUPS = 2
"""Groups of micro-batches replayed in memory beyond those that fill the pipeline; the rest repeat them."""


def estimate_pipeline(
    recipe: Recipe, machine: Machine, *, use_cache: bool = True, deterministic: bool = False
) -> Estimate:
    """Return the Estimate of a recipe with a pipeline, of the GPU with the highest peak.

    Raises:
        InputError: as ``predict``.
    """
    registry.check(recipe, machine.row)
    return _Pipeline(recipe, machine, use_cache=use_cache, deterministic=deterministic).estimate()


def fullest_ledger(
    recipe: Recipe, machine: Machine, *, use_cache: bool = True, deterministic: bool = False
) -> Ledger:
    """Return the ledger of the GPU with the highest peak, its last micro-batches left out."""
    registry.check(recipe, machine.row)
    return _Pipeline(recipe, machine, use_cache=use_cache, deterministic=deterministic).fullest()[1].ledger


class _Memory(NamedTuple):
    ledger: Ledger
    replayed: Replay
    fits: bool


class _Part:
    """Time and traffic of some segments of a stage's steady step."""

    def __init__(self, ledger: Ledger, machine: Machine, segments: list[int]):
        named = [
            segment if index in segments else Segment("other", segment.phase)
            for index, segment in enumerate(ledger.segments)
        ]
        self.ledger = replace(ledger, segments=named)
        self.time = roofline(self.ledger, machine)
        self.gpu = machine.gpu

    def flops(self, quantity: str) -> float:
        return self.ledger.steady_sum(quantity)

    def traffic(self) -> tuple[Traffic, ...]:
        return communication.traffic(self.ledger, self.gpu)


class _Stage:
    """A traced stage: its forwards, its forwards with their backwards, by traced micro-batch; its update."""

    def __init__(self, ledger: Ledger, machine: Machine):
        self.ledger = ledger
        forwards, backwards = (segments_of(ledger, "steady", phase) for phase in ("forward", "backward"))
        self.forward = [_Part(ledger, machine, [at]) for at in forwards]
        # Together, as the host issues ahead from one to the other.
        self.both = [_Part(ledger, machine, [*pair]) for pair in zip(forwards, backwards, strict=True)]
        self.update = _Part(ledger, machine, segments_of(ledger, "steady", "optimizer"))

    def seconds(self, is_forward: bool, at: int, *, lowest: bool = False) -> float:
        """Return the expected, or the least, seconds of a traced micro-batch's forward or backward."""
        forward_s, both_s = (_seconds(part.time, lowest=lowest) for part in (self.forward[at], self.both[at]))
        return forward_s if is_forward else max(0.0, both_s - forward_s)

    def parts(self, num_micro_batches: int) -> list[tuple[int, _Part]]:
        """Return how often each part of a step runs, and the part."""
        roles = Counter(role(one, num_micro_batches) for one in range(num_micro_batches))
        return [*((count, self.both[at]) for at, count in roles.items()), (1, self.update)]


def _seconds(time: Roofline | None, *, lowest: bool = False) -> float:
    if time is None:
        return 0.0
    return time.lowest_s if lowest else time.expected.total


class _Pipeline:
    def __init__(self, recipe: Recipe, machine: Machine, **options: Any):
        self.recipe, self.mesh, self.num = recipe, recipe.mesh, recipe.batch.accumulate
        self.machine, self.gpu = machine, machine.gpu
        self.stages = stages_of(recipe)
        traced: dict[Stage, _Stage] = {}
        self.traced: list[_Stage] = []
        for stage in self.stages:
            alike = stage._replace(first_block=0)  # Blocks are all equal.
            if alike not in traced:
                one = _traced_recipe(recipe, alike)
                ledger = cache.loaded_or_traced(one, machine.row, stage=alike, **options)
                traced[alike] = _Stage(ledger, machine)
            self.traced.append(traced[alike])
        self.sent_bytes = prod(hidden_shape(recipe)) * (
            2 if recipe.weight_bytes == 2 or recipe.precision in ("bf16-master", "mixed-bf16") else 4
        )
        self.memories: dict[Any, _Memory] = {}

    def own(self, rank: int) -> range:
        """Return the numbers of the stages at a position of the pipeline."""
        return range(rank, len(self.stages), self.mesh.pipeline)

    def memory(self, rank: int) -> _Memory:
        """Replay the memory of the GPU at a position, with enough micro-batches to fill the pipeline."""
        ahead = warm_up(self.mesh, rank, self.num)
        chunks = [self.traced[at] for at in self.own(rank)]
        key = (*map(id, chunks), ahead)
        if key not in self.memories:
            group = self.mesh.pipeline if self.mesh.schedule == "interleaved" else 1
            filling = -(-(ahead + 1) // (group * len(chunks)))
            num = min(self.num, (filling + MORE_GROUPS) * group)
            has_tokens = any(self.stages[at].is_first or self.stages[at].is_last for at in self.own(rank))
            ledger = composed(
                [one.ledger for one in chunks],
                order(self.mesh, rank, num),
                self.num if has_tokens else min(num, TRACED),
            )
            segment, span = len(ledger.segments) - 1, self.recipe.hardware.count // self.mesh.pipeline + 1
            ledger.collectives.append(Collective("send", segment, -1, 0, self.sent_bytes, 2, span, True))
            self.memories[key] = _Memory(ledger, *replay_on(self.gpu, ledger))
        return self.memories[key]

    def fullest(self) -> tuple[int, _Memory]:
        """Return the position with the highest peak, and its memory."""
        found = [self.memory(rank) for rank in range(self.mesh.pipeline)]
        rank = max(range(len(found)), key=lambda at: found[at].replayed.peak_reserved_bytes)
        return rank, found[rank]

    def estimate(self) -> Estimate:
        """Return the Estimate of the GPU with the highest peak."""
        rank, memory = self.fullest()
        parts = [part for stage in self.traced for part in stage.parts(self.num)]
        flops = {
            name: sum(count * part.flops(quantity) for count, part in parts) / self.mesh.pipeline
            for name, quantity in (("model_flops", "model_flops"), ("hardware_flops", "causal_flops"))
        }
        time, bubble, gpus = self._time(rank)
        step_s = time.expected.total if time else None
        peak = peak_flops_per_s(self.gpu, matmul_dtype(self.traced[0].ledger)) if time else None
        found = summary(self.gpu, memory.ledger, [memory.replayed], None, fits=memory.fits)
        found = found.model_copy(
            update={
                **flops,
                "fits": all(self.memory(at).fits for at in range(self.mesh.pipeline)),
                "params": sum(one.ledger.params for one in self.traced) - self._tied(),
                "trainable_params": sum(one.ledger.trainable_params for one in self.traced) - self._tied(),
                "active_params": sum(one.ledger.active_params for one in self.traced) - self._tied(),
                "time": time.expected if time else None,
                "step_s": step_s,
                "mfu": flops["model_flops"] / step_s / peak if step_s and peak else None,
                "hfu": flops["hardware_flops"] / step_s / peak if step_s and peak else None,
                "traffic": self._traffic(rank),
                "pipeline": gpus,
                "bubble": bubble,
            }
        )
        found = of_recipe(self.recipe, self.machine, memory.ledger, found, time)
        return found.model_copy(update={"assumptions": (*self._assumptions(rank), *found.assumptions)})

    def _time(self, rank: int) -> tuple[Roofline | None, float | None, tuple[PipelineGpu, ...]]:
        """Return the step's time with the parts of the GPU at ``rank``, the bubble, and all GPUs."""
        ranks = range(self.mesh.pipeline)
        if self.traced[0].update.time is None:
            return None, None, tuple(self._gpu(at, None) for at in ranks)
        expected, least = (
            timeline(
                self.mesh,
                self.num,
                lambda stage, action, lowest=lowest: self._action_s(stage, action, lowest=lowest),
                lambda one, other, lowest=lowest: self._transfer_s(one, other, lowest=lowest),
            )
            for lowest in (False, True)
        )
        update_s, least_s = (
            [
                sum(_seconds(self.traced[at].update.time, lowest=lowest) for at in self.own(one))
                for one in ranks
            ]
            for lowest in (False, True)
        )
        step_s = max(end_s + update_s[at] for at, end_s in enumerate(expected.end_s))
        idle_s = [step_s - expected.busy_s[at] - update_s[at] for at in ranks]
        parts = [part for at in self.own(rank) for part in self.traced[at].parts(self.num)]
        sums = {name: 0.0 for name in TIMES}
        for count, part in parts:
            assert part.time is not None
            for name in TIMES:
                sums[name] += count * getattr(part.time.expected, name)
        sums["bubble_s"] = max(0.0, step_s - StepTime(**sums).total)
        lowest_s = max(end_s + least_s[at] for at, end_s in enumerate(least.end_s))
        gpus = tuple(self._gpu(at, max(0.0, idle_s[at])) for at in ranks)
        return Roofline(StepTime(**sums), lowest_s), expected.bubble, gpus

    def _action_s(self, stage: int, action: Action, *, lowest: bool) -> tuple[float, float]:
        """Return the seconds of an action, and what a first or a last micro-batch takes more."""
        one = self.traced[stage]
        each = [one.seconds(action.is_forward, at, lowest=lowest) for at in range(len(one.forward))]
        return min(each), each[role(action.micro_batch, self.num)] - min(each)

    def _transfer_s(self, one: int, other: int, *, lowest: bool) -> float:
        if one == other:
            return 0.0
        used = communication.ring(2, self._span(one, other), self.gpu)
        if lowest:
            return self.sent_bytes / used.bytes_per_s
        return self.sent_bytes / communication.sustained_bytes_per_s("send", used, self.gpu) + used.latency_s

    def _span(self, one: int, other: int) -> int:
        """Return the distance of two positions' GPUs plus one; over a host's GPUs where they are of two."""
        apart, in_host = self.recipe.hardware.count // self.mesh.pipeline, self.gpu.gpus_per_host
        hosts = {at * apart // in_host for at in (one, other)}
        return abs(one - other) * apart + 1 if len(hosts) == 1 else in_host + 1

    def _gpu(self, rank: int, idle_s: float | None) -> PipelineGpu:
        memory, own = self.memory(rank), [self.traced[at] for at in self.own(rank)]
        between = min(1, self.num - 1)
        timed = idle_s is not None
        forward_s, backward_s = (
            sum(one.seconds(is_forward, between) for one in own) if timed else None
            for is_forward in (True, False)
        )
        blocks = [self.stages[at] for at in self.own(rank)]
        return PipelineGpu(
            blocks=tuple((one.first_block + 1, one.first_block + one.num_blocks) for one in blocks),
            params=sum(one.ledger.params for one in own),
            in_flight=in_flight(order(self.mesh, rank, self.num)),
            peak_allocated_bytes=memory.replayed.peak_allocated_bytes,
            peak_device_bytes=memory.replayed.peak_reserved_bytes + overhead_bytes(self.gpu, memory.ledger),
            forward_s=forward_s,
            backward_s=backward_s,
            idle_s=idle_s,
        )

    def _traffic(self, rank: int) -> tuple[Traffic, ...]:
        """Return what the GPU at a position sends in a step."""
        calls, sent = Counter[tuple[str, int, bool]](), Counter[tuple[str, int, bool]]()
        for at in self.own(rank):
            for count, part in self.traced[at].parts(self.num):
                for one in part.traffic():
                    key = one.kind, one.num_ranks, one.between_hosts
                    calls[key] += count * one.calls
                    sent[key] += count * one.bytes_sent
            for other in (at - 1, at + 1):
                there = other % self.mesh.pipeline
                if 0 <= other < len(self.stages) and there != rank:
                    between = communication.ring(2, self._span(rank, there), self.gpu).between_hosts
                    calls["send", 2, between] += self.num
                    sent["send", 2, between] += self.num * self.sent_bytes
        return tuple(
            Traffic(kind=kind, num_ranks=ranks, between_hosts=between, calls=calls[kind, ranks, between],
                    bytes_sent=num_bytes)
            for (kind, ranks, between), num_bytes in sent.items()
        )  # fmt: skip

    def _tied(self) -> int:
        """Return the parameters that the first and the last stage both hold."""
        config: Any = model_config(self.recipe.model.config)
        return config["vocab_size"] * config["hidden_size"] if config.get("tie_word_embeddings") else 0

    def _assumptions(self, rank: int) -> tuple[str, ...]:
        mesh = self.mesh
        buffers = 2 * self.num * self.sent_bytes * len(self.own(rank))
        lines = [
            f"memory is that of GPU {rank} of the pipeline's {mesh.pipeline}, whose peak is the highest",
            f"pipeline: {mesh.schedule}, {self.num} micro-batches; a GPU computes while it sends, and waits "
            "for what it has not received",
            "a stage receives into a buffer made as the micro-batch arrives, and keeps its output until the "
            "backward; torch.distributed.pipelining makes the buffers of all micro-batches first, "
            f"{format_bytes(buffers)} on a GPU between two others",
        ]
        if mesh.shards_weights and mesh.data_ranks > 1:
            kept = (
                "are gathered for each micro-batch's forward and backward"
                if mesh.reshard_after_forward
                else "stay gathered from the first forward to the last backward of a step"
            )
            lines.append(f"parameters {kept} (parallel.reshard_after_forward)")
        if mesh.data_ranks > 1:
            when = "every micro-batch" if mesh.syncs_each_batch else "a step's last micro-batch"
            lines.append(f"gradients are reduced after {when} (parallel.sync_each_batch)")
        if self.recipe.optimizer.clip_norm is not None:
            lines.append("clip_norm: each stage's own norm; their sum over the stages takes no time")
        return tuple(lines)


def _traced_recipe(recipe: Recipe, stage: Stage) -> Recipe:
    """Return the recipe of a stage's trace: its blocks, few micro-batches, and a loss where it has one."""
    config = {**model_config(recipe.model.config), "num_hidden_layers": stage.num_blocks}
    model = recipe.model.model_copy(update={"config": config})
    batch = recipe.batch.model_copy(update={"accumulate": min(recipe.batch.accumulate, TRACED)})
    parallel = recipe.parallel.model_copy(update={"schedule": "1f1b", "virtual_stages": None})
    no_loss = {} if stage.is_last else {"loss": "standard", "loss_terms": LossTerms()}
    return recipe.model_copy(update={"model": model, "batch": batch, "parallel": parallel, **no_loss})
