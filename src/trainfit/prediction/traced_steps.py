"""Run a recipe's first and steady step on its virtual GPU, and an evaluation after them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from trainfit.catalog.names import CPU
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.step import Step
from trainfit.techniques import registry
from trainfit.virtual.cuda.attention_kernel import prefers_cudnn
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import VirtualGpu, virtual_gpu
from trainfit.virtual.trace.exclusive import exclusive

if TYPE_CHECKING:
    from trainfit.prediction.several_ranks import VirtualRanks

EVALUATION = "evaluation"
"""Name of the step that is a forward without gradients."""

Run = Callable[[Step, VirtualGpu], None]


@contextmanager
def gpu_of(recipe: Recipe, gpu: Gpu) -> Iterator[tuple[VirtualGpu, "VirtualRanks | None"]]:
    """Enter the virtual GPU of the recipe's hardware; of several, that of the rank with the highest peak.

    Args:
        gpu: the catalog's row of it.

    Yields:
        the virtual GPU, and its place among the ranks; None: one GPU.
    """
    traits = None if gpu.name == CPU else GpuTraits.of(gpu)
    if traits is None:
        registry.check_device(recipe, "cpu")
    with ExitStack() as stack:
        stack.enter_context(exclusive())  # Another thread's process group would be taken for a real one.
        if recipe.hardware.count == 1:
            yield stack.enter_context(virtual_gpu(traits, prefers_cudnn=prefers_cudnn(gpu))), None
            return
        from trainfit.prediction.several_ranks import rank_of  # Imports torch.distributed.

        yield stack.enter_context(rank_of(recipe, traits, prefers_cudnn=prefers_cudnn(gpu)))


def run_steps(step: Step, virtual: VirtualGpu) -> None:
    """Run a first and a steady step on the virtual GPU."""
    for name in ("first", "steady"):
        run_step(step, virtual, name)


def run_step(step: Step, virtual: VirtualGpu, name: str) -> None:
    """Run one step, in the segments of ``name``.

    What reference cycles hold is freed at the end of a phase: other times would differ from run to run.
    """
    gc.collect()
    virtual.begin(name, "data")
    batches = step.random_batches()

    def on_phase(phase: str) -> None:
        gc.collect()
        if phase == "optimizer" and step.mesh is not None:
            _own_sharded_gradients(step, virtual)
        virtual.begin(name, phase)

    step(batches, on_phase=on_phase)
    del batches  # Before those of the next step are made, or the steady step frees two steps' batches.
    for optimizer in step.optimizers:
        virtual.own_state(optimizer)
    for memory in step.host_state.buffers() if step.host_state is not None else ():
        virtual.tracer.live.own_in_turns(memory, "optimizer")


def run_evaluation(step: Step, virtual: VirtualGpu, sequences: int) -> None:
    """Run the steps, then a forward without gradients in the segments of step ``EVALUATION``."""
    run_steps(step, virtual)
    gc.collect()
    virtual.begin(EVALUATION, "data")
    batch = step.random_batches(sequences=sequences * step.recipe.objective.sequences)[0]
    virtual.begin(EVALUATION, "forward")
    if step.compares_pairs:
        step.preferences(batch)
        return
    step.model.eval()
    with torch.no_grad():
        step.cross_entropy(batch)
    step.model.train()


def _own_sharded_gradients(step: Step, virtual: VirtualGpu) -> None:
    """Assign the gradients that a reduce-scatter made; autograd's hooks assign the others."""
    from torch.distributed.tensor import DTensor

    for parameter in step.model.parameters():
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            virtual.tracer.live.own(parameter.grad, "gradients", virtual.scope_of(parameter))
