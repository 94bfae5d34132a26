"""A recipe's step on the virtual GPU: Recipe -> Ledger."""

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from trainfit.catalog.load import gpu as find_gpu
from trainfit.kernels.determinism import deterministic_kernels
from trainfit.ledger.ledger import Ledger, RepeatError
from trainfit.ledger.micro_batches import MicroBatchesDifferError, with_left_out
from trainfit.ledger.slices import check_slices
from trainfit.models.adapted import untied
from trainfit.models.few_blocks import OutlinesLeftError, few_blocks
from trainfit.models.layers import active_shares, code_parameters, slow_layers
from trainfit.models.quantized_libraries import import_library
from trainfit.prediction.config_failure import refuse_config
from trainfit.prediction.shortening import (
    TracedLayers,
    first_block_differs,
    least_period,
    micro_batches_left_out,
    period_multiple,
)
from trainfit.prediction.traced_steps import Run, gpu_of, run_steps
from trainfit.prediction.versions import libraries_of, versions_of
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.optional import optional
from trainfit.spec.pipeline import Stage
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import canonical_json
from trainfit.step import assemble
from trainfit.techniques import registry
from trainfit.techniques.base import Technique, value_at
from trainfit.virtual.compile.generate import OtherStridesError
from trainfit.virtual.gpu import VirtualGpu
from trainfit.virtual.trace.exclusive import exclusive
from trainfit.virtual.trace.host_random import own_generator
from trainfit.virtual.trace.process_state import freeze_more, paused_gc, restored_settings
from trainfit.virtual.trace.repeated_layers import periods
from trainfit.virtual.trace.scope import LayerGroups, ScopeTracker

DETERMINISTIC = (
    "with kernels that repeat bit by bit, as train asks for by default: attention's are counted as they are, "
    "what other operations sort for it (experts' sums, for one) is not"
)

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
    run: Run | None = None,
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
    run: Run


def _traced(
    recipe: Recipe, gpu: Gpu, ends: _Ends, *, whole: bool, shorten: bool, deterministic: bool
) -> Ledger:
    if recipe.adapter is not None:
        # Tensors that are made when it is imported are no part of the step.
        optional("peft", "peft", field="adapter.kind", value=recipe.adapter.kind)
    for technique in registry.applied(recipe):
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
    return [technique for technique in registry.applied(recipe) if technique.trace_whole(recipe)]


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
    lead = int(first_block_differs(recipe))
    period = periods(least_period(recipe), period_multiple(recipe)).start

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
        layers = TracedLayers(recipe, virtual)

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
        ledger.assumptions += tuple(line for one in registry.applied(recipe) for line in one.assumes(recipe))
        if recipe.compile == "model" and recipe.loss == "standard":
            from trainfit.models.hf import sets_loss

            ledger.assumptions += (LOSS_SET,) if sets_loss(step.model) else ()
        ledger.compiled = virtual.compiler.work()
        ledger.empty_cache_every = recipe.empty_cache_every
        _count_parameters(step.model, ledger, virtual, layers.groups)
        ledger.warnings = (*slow_layers(step.model), *untied(step.model))
    return ledger


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
