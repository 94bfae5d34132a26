"""Predict a recipe's memory on the virtual GPU: a whole step and a forward alone.

On a machine with a GPU this runs in other processes that do not see it, while the GPU is measured.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

import torch

from trainfit.bench.harness.memory_timeline import of_ledger
from trainfit.catalog.names import CPU
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.estimate import replay_on
from trainfit.prediction.machine import machine_of
from trainfit.prediction.predict import ledger_of
from trainfit.spec.bench import Curve
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES
from trainfit.step import assemble
from trainfit.virtual.cuda.attention_kernel import prefers_cudnn
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu

NUM_POINTS = 32  # Points of a curve
NUM_PROCESSES = 2
FORWARD_ONLY, WHOLE_STEP = "forward only", "whole step"


class RunMemory(NamedTuple):
    """Bytes of one kind of run: before it, each phase's steady peak, the first run's peak, and the curve."""

    before: int
    phases: dict[str, int]
    first: int
    curve: Curve | None
    fits: bool = True


Found = TypeVar("Found")
Prediction = dict[str, RunMemory]  # Memory by kind of run


def predict_memory(recipe: Recipe) -> Prediction:
    """Predict both kinds of run of the recipe on its GPU."""
    machine = machine_of(recipe.hardware)
    return {
        FORWARD_ONLY: _memory_of(machine.gpu, forward_ledger(recipe, machine.row)),
        WHOLE_STEP: _memory_of(machine.gpu, ledger_of(recipe, machine)),
    }


def _memory_of(gpu: Gpu, ledger: Ledger) -> RunMemory:
    replayed, fits = replay_on(gpu, ledger)
    ran = {segment.phase for segment in ledger.segments}
    steady = {phase: getattr(replayed.phases.steady, phase) for phase in PHASES if phase in ran}
    curve = of_ledger(ledger, "steady").curve(NUM_POINTS)
    return RunMemory(replayed.phases.after_init, steady, replayed.phases.first.peak, curve, fits)


def forward_ledger(recipe: Recipe, gpu: Gpu) -> Ledger:
    """Return the ledger of building the model and two forwards without gradients, all layers traced.

    Args:
        gpu: the catalog's row of the recipe's GPU.
    """
    traits = None if gpu.name == CPU else GpuTraits.of(gpu)
    with virtual_gpu(traits, prefers_cudnn=prefers_cudnn(gpu)) as virtual:
        step = assemble(recipe, torch.device("cpu"), compiler=virtual.compiler, gpu=gpu)
        virtual.model_is_complete(step.model, [])
        for name in ("first", "steady"):
            virtual.begin(name, "data")
            (batch,) = step.random_batches()
            virtual.begin(name, "forward")
            with torch.no_grad():
                step.loss(batch)
        return virtual.finish()


@contextmanager
def predictions(
    recipes: Sequence[Recipe], device: torch.device, predict: Callable[[Recipe], Found]
) -> Iterator[Callable[[Recipe], Found]]:
    """Yield a function that returns what ``predict``, a module's own function, returns for a recipe.

    On a machine with a GPU the predictions run meanwhile.
    """
    if device.type == "cpu":
        yield predict
        return
    pool = ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn"), initializer=_without_gpu)
    try:
        running = {recipe.id: pool.submit(predict, recipe) for recipe in recipes}
        yield lambda recipe: running[recipe.id].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # A run that ends early keeps its rows first.


def _without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
