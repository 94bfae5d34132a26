"""A policy's loop on the virtual GPU: Recipe -> Ledger with a segment for each phase.

The parts are those of the real loop, in its order (rl/rollout/phases.py): gather the weights where they are
sharded, read the prompts, record the step of decoding as a CUDA graph, append a token, score by the model and
by its reference, update. What one part leaves alive, the next one finds. The loop runs twice: optimizers make
their state in the first update.

One call of each part stands for all of a rollout. The cache of keys and values is allocated whole at the
start, so the memory of later tokens is that of the first; their time grows with the filled positions, which
``estimate.py`` adds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trainfit.ledger.ledger import RECORDED, Ledger
from trainfit.prediction.trace import trace
from trainfit.prediction.traced_steps import run_step
from trainfit.rl.estimate.names import ALONE, DECODE, GATHER, PREFILL, REFERENCE, SCORING, WARM
from trainfit.rl.rollout import phases
from trainfit.rl.rollout.generate import Generator
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.step import Step
from trainfit.virtual.gpu import VirtualGpu
from trainfit.virtual.trace.scope import NO_SCOPE

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

WARM_STREAM, GRAPH_POOL = 1001, 1002
"""Numbers of the pools of blocks that a graph's warm-up and its recording use."""


def traced(recipe: Recipe, gpu: Gpu, *, deterministic: bool = False, shorten: bool = False) -> Ledger:
    """Return the ledger of a first and a steady loop on the recipe's virtual GPU.

    Args:
        deterministic, shorten: as ``prediction.trace.trace`` takes them.

    Raises:
        InputError: as ``prediction.trace.trace``, or a model that does not generate.
    """
    phases.check(recipe)
    ledger = trace(recipe, gpu, deterministic=deterministic, shorten=shorten, run=run_loops)
    # The prompt that is read alone is for its time.
    of_loops = [event for event in ledger.events if ledger.segments[event.segment].step != ALONE]
    return replace(ledger, events=of_loops)


def run_loops(step: Step, virtual: VirtualGpu) -> None:
    """Run two loops, and read one prompt."""
    is_gpu = virtual.tracer.gpu is not None
    generator: Generator | None = None
    for name in ("first", "steady"):
        gc.collect()
        virtual.begin(name, GATHER)
        if generator is None:
            generator = phases.generator_of(step, phases.sampling_of(step.recipe, ()))
            _own_cache(generator, virtual)
        with phases.generating(step) as decoder:
            _rollout(step, generator, virtual, name, _running(decoder, virtual), records=is_gpu)
            gc.collect()
        _score(step, virtual, name)
        run_step(step, virtual, name)
    assert generator is not None
    gc.collect()
    virtual.begin(ALONE, GATHER)
    with phases.generating(step) as decoder, _running(decoder, virtual):
        virtual.begin(ALONE, PREFILL)
        generator.read(_prompts(step, 1))
        gc.collect()
        virtual.begin(ALONE, "end")
    _separate_pools(virtual.tracer.ledger)


def _separate_pools(ledger: Ledger) -> None:
    """Give what a graph's warm-up and its recording allocate their own pools of blocks."""
    pools = {WARM: WARM_STREAM, RECORDED: GRAPH_POOL}
    of_segment = {
        str(number): pools[segment.phase]
        for number, segment in enumerate(ledger.segments)
        if segment.phase in pools
    }
    for number, storage in enumerate(ledger.storages):
        pool = of_segment.get(storage.path.partition("/")[0])
        if pool is not None:
            ledger.storages[number] = storage._replace(stream=pool)


def _running(decoder: torch.nn.Module, virtual: VirtualGpu) -> AbstractContextManager[None]:
    return virtual.running(decoder)


def _rollout(
    step: Step,
    generator: Generator,
    virtual: VirtualGpu,
    name: str,
    running: AbstractContextManager[None],
    *,
    records: bool,
) -> None:
    """Read as many prompts as there are slots, record a step if it is not recorded, and append a token."""
    with running:
        gc.collect()
        virtual.begin(name, PREFILL)
        generator.read(_prompts(step, generator.cache.num_slots))
        gc.collect()
        if records and (name == "first" or step.shards_weights):
            for phase, pool in ((WARM, WARM_STREAM), (RECORDED, GRAPH_POOL)):
                virtual.begin(name, phase)
                with _on_stream(virtual, pool):
                    generator.append(recorded=False)
                gc.collect()
        virtual.begin(name, DECODE)
        generator.append(recorded=False)
        gc.collect()


def _score(step: Step, virtual: VirtualGpu, name: str) -> None:
    """Score one micro-batch by the model, then by its reference."""
    virtual.begin(name, "data")
    ids = step.random_batches()[0]["input_ids"]
    virtual.begin(name, SCORING)
    phases.score(step, ids)
    gc.collect()
    if step.reference is not None:
        virtual.begin(name, REFERENCE)
        phases.score(step, ids, reference=True)
        gc.collect()
    del ids


def _prompts(step: Step, count: int) -> list[list[int]]:
    return [[0] * phases.policy_of(step.recipe).max_prompt] * count


def _own_cache(generator: Generator, virtual: VirtualGpu) -> None:
    """Assign the cache and the slots' state to the category of the cache."""
    for tensor in generator.state_tensors:
        virtual.tracer.live.own(tensor, "kv_cache", NO_SCOPE)


@contextmanager
def _on_stream(virtual: VirtualGpu, number: int) -> Iterator[None]:
    """Run on another stream, on which libraries take workspaces of their own, and keep them."""
    workspaces = virtual.tracer.workspaces
    if workspaces is not None:
        workspaces.stream = number
    yield
    if workspaces is not None:
        workspaces.stream = 0
