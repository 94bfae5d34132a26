"""A recipe's step on the virtual GPU: Recipe -> Ledger."""

import contextlib
import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from trainfit.catalog.load import gpu as find_gpu
from trainfit.catalog.names import CPU
from trainfit.kernels.determinism import deterministic_kernels
from trainfit.ledger.ledger import Ledger, RepeatError
from trainfit.ledger.micro_batches import TRACED, MicroBatchesDifferError, with_left_out
from trainfit.ledger.slices import check_slices
from trainfit.models.adapted import untied
from trainfit.models.deferred_init import deferred
from trainfit.models.few_blocks import OutlinesLeftError, check_no_outlines, few_blocks
from trainfit.models.layers import active_shares, code_parameters, layer_lists, slow_layers
from trainfit.models.quantized_libraries import import_library
from trainfit.prediction.config_failure import refuse_config
from trainfit.prediction.versions import libraries_of, versions_of
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.optional import optional
from trainfit.spec.pipeline import Stage
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import canonical_json
from trainfit.step import Step, assemble
from trainfit.techniques import registry
from trainfit.techniques.base import Technique, value_at
from trainfit.virtual.compile.generate import OtherStridesError
from trainfit.virtual.compile.unrolled import Layers
from trainfit.virtual.cuda.attention_kernel import prefers_cudnn
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import VirtualGpu, virtual_gpu
from trainfit.virtual.trace.exclusive import exclusive
from trainfit.virtual.trace.host_random import own_generator
from trainfit.virtual.trace.process_state import freeze_more, paused_gc, restored_settings
from trainfit.virtual.trace.repeated_layers import periods, trim_layers, why_whole
from trainfit.virtual.trace.scope import NO_SCOPE, LayerGroups, Scope, ScopeTracker, part_of_module

if TYPE_CHECKING:
    from trainfit.prediction.several_ranks import VirtualRanks

DETERMINISTIC = (
    "with kernels that repeat bit by bit, as train asks for by default: attention's are counted as they are, "
    "what other operations sort for it (experts' sums, for one) is not"
)

EVALUATION = "evaluation"
"""Name of the step that is a forward without gradients."""
PROGRAM_MARGIN = 2, 4
"""Layers before the first and after the last of the three that are compared, in a model compiled whole. The
first layers to run find no buffers to reuse: of a backward two, or four, as in 6 of 13 recipes."""

LOSS_SET = (
    'the model\'s class names no loss, so loss_type is set to "ForCausalLM", as measure and train do; '
    "without that transformers warns inside the compiled model, which cuts its graph in two, and the step "
    "takes other memory"
)


def trace(
    recipe: Recipe,
    gpu: Gpu | None = None,
    *,
    whole: bool = False,
    shorten: bool = False,
    deterministic: bool = False,
    stage: Stage | None = None,
    run: "Run | None" = None,
) -> Ledger:
    """Run init, a first and a steady step of the recipe on its virtual GPU.

    Args:
        gpu: the catalog's row of the recipe's GPU; None: it is looked up.
        whole: trace every layer even where layers repeat.
        shorten: trace repeated layers a few times even where a technique makes them differ slightly, which is
            enough to compare recipes; not where they differ much.
        deterministic: with the kernels of ``torch.use_deterministic_algorithms``, by this argument alone.
        stage: the stage of the recipe's pipeline that is traced, one micro-batch after the other.
        run: called with the step and the virtual GPU; None: ``run_steps``. A loop around the step, or what
            follows it, begins its own segments.

    Raises:
        InputError: the recipe asks for what is not there or cannot be combined.
    """
    gpu = gpu or find_gpu(recipe.hardware.gpu)
    with exclusive():
        ends = _Ends(stage, run or run_steps)
        return _traced(recipe, gpu, ends, whole=whole, shorten=shorten, deterministic=deterministic)


class _Ends(NamedTuple):
    """The part of a model that is traced, and what runs."""

    stage: Stage | None
    run: "Run"


def _traced(
    recipe: Recipe, gpu: Gpu, ends: _Ends, *, whole: bool, shorten: bool, deterministic: bool
) -> Ledger:
    if recipe.adapter is not None:
        # Tensors that are made when it is imported are no part of the step.
        optional("peft", "peft", field="adapter.kind", value=recipe.adapter.kind)
    for technique in _applied(recipe):
        if technique.library is not None:
            field = technique.fields[0]
            optional(*technique.library, field=field, value=value_at(recipe, field))
    if recipe.base is not None:
        import_library(recipe.base)
    with restored_settings(), own_generator(), _unlogged(), deterministic_kernels(deterministic):
        try:
            if whole:
                ledger = _trace(recipe, gpu, ends, whole=True)
            else:
                ledger = _shortened(recipe, gpu, ends, shorten=shorten)
        except InputError:
            raise
        except Exception as error:
            refuse_config(recipe, error)
            raise
    if deterministic:
        ledger.assumptions = (*ledger.assumptions, DETERMINISTIC)
    ledger.versions = versions_of(libraries_of(recipe, ledger))
    return ledger


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's log of an exception on fake tensors, which is raised as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _shortened(recipe: Recipe, gpu: Gpu, ends: _Ends, *, shorten: bool) -> Ledger:
    """Return a ledger that traces repeated layers a few times, or a whole one where layers differ."""
    reason = ", ".join(
        f"technique {one.name} makes equal layers act differently" for one in _tracing_whole(recipe)
    )
    if not reason or (shorten and _may_shorten(recipe)):
        margin = PROGRAM_MARGIN if recipe.compile == "model" else (0, 0)
        try:
            ledger = _trace(recipe, gpu, ends, whole=False, margin=margin)
            ledger.expand()
            return ledger
        except RepeatError as error:
            reason = f"layers that look alike are not: {error}"
    ledger = _trace(recipe, gpu, ends, whole=True)
    ledger.traced_whole = reason
    return ledger


def _may_shorten(recipe: Recipe) -> bool:
    """Return whether a few layers, which a technique makes differ slightly, are enough to compare recipes."""
    return all(one.may_shorten for one in _tracing_whole(recipe))


def trace_whole(recipe: Recipe) -> bool:
    """Return whether a technique makes equal layers act differently, so that all must be traced."""
    return bool(_tracing_whole(recipe))


def _tracing_whole(recipe: Recipe) -> list[Technique]:
    """Return the techniques that make equal layers act differently."""
    return [technique for technique in _applied(recipe) if technique.trace_whole(recipe)]


def _applied(recipe: Recipe) -> list[Technique]:
    return [technique for technique in registry.in_order() if technique.applies(recipe)]


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


Run = Callable[[Step, VirtualGpu], None]

_kept: dict[str, frozenset[int]] = {}
"""Structure of a model that is shortened -> the numbers of the blocks that are traced."""


def _trace(recipe: Recipe, gpu: Gpu, ends: _Ends, *, whole: bool, margin: tuple[int, int] = (0, 0)) -> Ledger:
    if whole:
        return _trace_blocks(recipe, gpu, ends, whole=True, margin=margin)
    content = recipe.content()
    for name in ("batch", "loss", "optimizer", "seed"):
        del content[name]
    structure = canonical_json([content, margin, ends.stage])
    numbers = _kept.get(structure)
    lead = int(_first_differs(recipe))
    period = periods(_least_period(recipe), _multiple(recipe)).start

    def is_kept(number: int, num_blocks: int) -> bool:
        if numbers is not None:
            return number in numbers
        # As ``trim_layers`` keeps them if all others are alike.
        tail = period * (1 + margin[1]) + (num_blocks - lead) % period
        return number < lead + period * (2 + margin[0]) or number >= num_blocks - tail

    try:
        with few_blocks(is_kept):
            return _trace_blocks(recipe, gpu, ends, whole=False, margin=margin)
    except OutlinesLeftError as left:
        numbers = _kept[structure] = left.numbers
    with few_blocks(is_kept):
        return _trace_blocks(recipe, gpu, ends, whole=False, margin=margin)


def _trace_blocks(recipe: Recipe, gpu: Gpu, ends: _Ends, *, whole: bool, margin: tuple[int, int]) -> Ledger:
    try:
        return _trace_micro_batches(recipe, gpu, ends, whole=whole, margin=margin, lowers_ahead=True)
    except OtherStridesError:
        return _trace_micro_batches(recipe, gpu, ends, whole=whole, margin=margin, lowers_ahead=False)


def _trace_micro_batches(
    recipe: Recipe, gpu: Gpu, ends: _Ends, *, whole: bool, margin: tuple[int, int], lowers_ahead: bool
) -> Ledger:
    """Trace a few micro-batches of a step, or all where they differ."""
    left_out = micro_batches_left_out(recipe) if ends.run is run_steps else range(0)
    if left_out:
        with contextlib.suppress(MicroBatchesDifferError):
            ledger = _trace_once(
                recipe, gpu, ends, whole=whole, margin=margin, lowers_ahead=lowers_ahead, left_out=left_out
            )
            return with_left_out(ledger, len(left_out))
    return _trace_once(recipe, gpu, ends, whole=whole, margin=margin, lowers_ahead=lowers_ahead)


def micro_batches_left_out(recipe: Recipe) -> range:
    """Return the numbers of the micro-batches that the one before them can stand for.

    All are traced of several GPUs, as communication overlaps from one micro-batch to the next, and of pairs,
    as the means of all micro-batches are kept until the update.
    """
    if recipe.hardware.count > 1 or recipe.objective.name != "pretrain":
        return range(0)
    return range(TRACED - 1, recipe.batch.accumulate - 1)


def _trace_once(
    recipe: Recipe,
    gpu: Gpu,
    ends: _Ends,
    *,
    whole: bool,
    margin: tuple[int, int],
    lowers_ahead: bool,
    left_out: range = range(0),
) -> Ledger:
    stage = ends.stage
    with gpu_of(recipe, gpu) as (virtual, ranks):
        virtual.compiler.lowers_ahead = lowers_ahead
        layers = _TracedLayers(recipe, virtual)

        def on_model(model: nn.Module) -> None:
            if stage is not None:
                from trainfit.parallel.pipeline import cut

                virtual.tracer.live.forget(cut(model, stage, recipe))
            if not whole:
                layers.shorten(model, margin)

        step = assemble(
            recipe, torch.device("cpu"), on_model=on_model, within_block=layers.within_block,
            compiler=virtual.compiler, mesh=ranks and ranks.mesh, cluster=ranks and ranks.cluster,
            stage=stage, gpu=gpu,
        )  # fmt: skip
        step.left_out = left_out
        copies = None if step.reference is None else step.reference.tensors
        virtual.model_is_complete(step.model, layers.groups, copies)
        if step.hosted is not None:
            for index in range(len(step.hosted.blocks)):
                scope = virtual.scope_of(step.hosted.parameters(index)[0])
                virtual.tracer.own_host(step.hosted.ring.host(index), scope)
        gc.collect()
        freeze_more()
        with paused_gc():
            ends.run(step, virtual)
        if not whole:
            virtual.compiler.check_layers()
        ledger = virtual.finish()
        if virtual.compiler.layers is not None:
            check_slices(ledger)
        ledger.assumptions = (*virtual.assumptions(), *(ranks.cluster.about(ledger) if ranks else ()))
        ledger.assumptions += tuple(line for one in _applied(recipe) for line in one.assumes(recipe))
        if recipe.compile == "model" and recipe.loss == "standard":
            from trainfit.models.hf import sets_loss

            ledger.assumptions += (LOSS_SET,) if sets_loss(step.model) else ()
        ledger.compiled = virtual.compiler.work()
        ledger.empty_cache_every = recipe.empty_cache_every
        _count_parameters(step.model, ledger, virtual, layers.groups)
        ledger.warnings = (*slow_layers(step.model), *untied(step.model))
    return ledger


class _TracedLayers:
    """The layers of a model that a trace keeps; all of them unless ``shorten`` is called."""

    def __init__(self, recipe: Recipe, virtual: VirtualGpu):
        self._recipe, self._virtual = recipe, virtual
        self.groups: list[LayerGroups] = []
        self._scope_of_block: dict[nn.Module, Scope] = {}

    def shorten(self, model: nn.Module, margin: tuple[int, int]) -> None:
        """Remove layers that others stand for from the bare model.

        Args:
            margin: layers before the first and after the last of the three that are compared.
        """
        recipe, virtual = self._recipe, self._virtual
        for technique in _applied(recipe):
            technique.label_blocks(recipe, model)  # Blocks that recompute differently are not equal.
        found, repeats, removed = trim_layers(
            layer_lists(model),
            first_differs=_first_differs(recipe),
            least_period=_least_period(recipe),
            multiple=_multiple(recipe),
            margin=margin,
        )
        check_no_outlines([block for _, blocks in layer_lists(model) for block in blocks])
        self.groups.extend(found)
        for name, blocks in layer_lists(model):
            for number, block in enumerate(blocks):
                self._scope_of_block[block] = ScopeTracker.locate(f"{name}.{number}", self.groups)
        virtual.tracer.ledger.repeats = repeats
        if not found:
            virtual.tracer.ledger.traced_whole = why_whole(
                layer_lists(model), _least_period(recipe), _multiple(recipe)
            )
        if recipe.compile == "model" and found:
            virtual.compiler.layers = Layers(lambda name: part_of_module(name, found), repeats[0])
        trimmed = [one for layer in removed for one in (*layer.parameters(), *layer.buffers())]
        virtual.tracer.live.forget(trimmed)
        if (recorded := deferred()) is not None:
            recorded.forget(trimmed)

    def within_block(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which allocations are made for each block that this one stands for."""
        return self._virtual.within(self._scope_of_block.get(block, NO_SCOPE))


def _first_differs(recipe: Recipe) -> bool:
    """Return whether the first block works differently, because of what precedes it."""
    # Behind frozen weights its input has no gradient, and its graph differs.
    if recipe.compile == "block" and recipe.adapter is not None:
        return True
    # With tensor parallel it splits the tokens, in a pipeline it receives them.
    return recipe.mesh.tensor * recipe.mesh.pipeline > 1


def _least_period(recipe: Recipe) -> int:
    """Return the fewest blocks of a repeated group."""
    return max((one.min_repeated(recipe) for one in _applied(recipe)), default=1)


def _multiple(recipe: Recipe) -> int:
    """Return the number of blocks of which a repeated group has a multiple."""
    return math.lcm(*(one.take_turns(recipe) for one in _applied(recipe)))


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


def _count_parameters(
    model: nn.Module, ledger: Ledger, virtual: VirtualGpu, groups: list[LayerGroups]
) -> None:
    """Count the ledger's parameters, those that train, and those that one token meets."""
    shares = active_shares(model)
    share_of = {one: share for experts, share in shares.items() for one in experts.parameters()}
    active, codes_only = 0.0, code_parameters(model)
    for parameter in model.parameters():
        if parameter in codes_only:
            continue
        num_elements = ledger.times_of_group(virtual.scope_of(parameter).group) * parameter.numel()
        ledger.params += num_elements
        ledger.trainable_params += num_elements if parameter.requires_grad else 0
        active += num_elements * share_of.get(parameter, 1.0)
    for name, module in model.named_modules():
        times = ledger.times_of_group(ScopeTracker.locate(name, groups).group)
        codes = times * getattr(module, "num_quantized", 0)
        ledger.params += codes
        active += codes
    ledger.active_params = round(active)
