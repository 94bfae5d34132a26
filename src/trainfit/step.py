"""Assemble a recipe into one training step: model, then techniques in order, then optimizer.

The same step runs on the virtual GPU (fake CPU tensors) and on a real device, so nothing here requires
CUDA. Shapes: b micro-batch, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode

from trainfit.models.build import build_model
from trainfit.models.deferred_init import DeferredInit
from trainfit.models.layers import max_positions
from trainfit.models.packed import model_inputs
from trainfit.models.quantized import WithinBlock
from trainfit.offload.blocks import HostBlocks
from trainfit.optim.all_or_nothing import one_update
from trainfit.parallel.cluster import REAL, Cluster
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import RANDOM, Recipe
from trainfit.techniques import registry
from trainfit.techniques.draft import Compiler, ContextFactory, Draft, LossFunction, weight_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from trainfit.models.weights.read import Weights
    from trainfit.spec.hardware import Gpu
    from trainfit.spec.pipeline import Stage

Batch = dict[str, Tensor]
"""One micro-batch: ``input_ids`` and ``labels``, both int64 [b, s]; the model shifts the labels.

Of pairs of answers, 2 i is the chosen and 2 i + 1 the rejected answer of pair i.

``position_ids`` [b, s] where documents are kept apart. ``weight`` [] on the host: the micro-batch's labels
over their mean in all micro-batches of the step and of all ranks, where they differ; so the step's loss is
the mean over its labels.
"""


def assemble(
    recipe: Recipe,
    device: torch.device,
    *,
    on_model: Callable[[nn.Module], None] = lambda model: None,
    within_block: WithinBlock = lambda block: nullcontext(),
    compiler: Compiler | None = None,
    mesh: DeviceMesh | None = None,
    cluster: Cluster | None = None,
    stage: Stage | None = None,
    gpu: Gpu | None = None,
    reads_weights: bool = True,
) -> Step:
    """Return the training step that ``recipe`` describes, its parameters on ``device``.

    Seeds torch's generators with ``recipe.seed``, so equal recipes start from equal weights; with fake
    tensors only the CPU's. Ranks that read different data draw different random numbers afterwards.
    Fake tensors have no values, so that no ``model.weights`` are read into them.

    Args:
        on_model: called with the bare model before any technique changes it.
        within_block: returns the context in which a decoder block on the device is quantised.
        compiler: compiles a module in place; None: ``module.compile()``.
        mesh: the ranks of a recipe for several GPUs, with the dimensions of ``recipe.mesh``.
        cluster: what those ranks do apart from collectives; None: the ranks are real.
        stage: the stage of a pipeline that ``on_model`` leaves of the model. Its recipe is not checked.
        gpu: the catalog's row of the recipe's GPU; None: it is looked up.
        reads_weights: False leaves the recipe's ``model.weights`` unread, for a checkpoint that is loaded.

    Raises:
        InputError: a value that no technique covers, techniques that exclude each other, or too long
            a sequence; ``model.weights`` that do not fit the model.
    """
    if stage is None:
        registry.check(recipe, gpu)
    weights = _weights(recipe) if reads_weights else None
    _seed(recipe.seed)
    # FSDP2 shards the model on meta, so that no rank ever has all weights.
    deferred = DeferredInit() if mesh is not None and recipe.mesh.shards_weights else None
    with deferred or nullcontext():
        build_on = device if deferred is None else torch.device("meta")
        model, hosted = _build(recipe, build_on, on_model, within_block, weights)
        _check_positions(recipe, model)
        if weights is not None:
            _seed(recipe.seed)  # As on several ranks, which draw none for these weights either.
        compiler = compiler or (lambda module, **settings: module.compile(**settings))
        draft = Draft(model, device, compiler, hosted, mesh=mesh, cluster=cluster or REAL, stage=stage)
        for technique in registry.applied(recipe):
            technique.apply(recipe, draft)
    if deferred is not None:
        _seed(recipe.seed)
        deferred.materialise(draft.outermost or draft.model, device)
    if weights is not None and weights.adapter is not None:
        from trainfit.models.weights.adapter import read_adapter

        read_adapter(weights.adapter, recipe, draft.model)
    if not draft.optimizers:
        draft.optimizers = draft.optimizers_for(draft.trainable())
    if mesh is not None:
        _seed(recipe.seed + data_rank(mesh))
    if weights is not None:
        weights.close()
    return Step(recipe, draft, weights)


def data_rank(mesh: DeviceMesh | None) -> int:
    """Return this rank's number among those that read different data."""
    if mesh is None:
        return 0
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    at = dict(zip(mesh.mesh_dim_names or (), coordinate, strict=True))
    return at["replicate"] * mesh["shard"].size() + at["shard"]


def _seed(seed: int) -> None:
    """Seed every device's generator; with fake tensors only the CPU's, from which host tensors are drawn."""
    if active_fake_mode() is None:
        torch.manual_seed(seed)
    else:
        torch.random.default_generator.manual_seed(seed)


def _weights(recipe: Recipe) -> Weights | None:
    """Return the weights that are read into the model; None: they are random, or have no values."""
    if recipe.model.weights == RANDOM or active_fake_mode() is not None:
        return None
    from trainfit.models.weights.read import open_weights

    return open_weights(recipe.model.weights)


def _build(
    recipe: Recipe,
    device: torch.device,
    on_model: Callable[[nn.Module], None],
    within_block: WithinBlock,
    weights: Weights | None,
) -> tuple[nn.Module, HostBlocks | None]:
    """Return the bare model in training mode, and the blocks whose weights are on the host."""
    options: dict[str, Any] = {
        "dtype": weight_dtype(recipe),
        "device": device,
        "attention": recipe.attention,
        "quantize": recipe.base,
        "weights": weights,
    }
    build = next((one.build for one in registry.applied(recipe) if one.build), None)
    if build is not None:
        model, hosted = build(recipe, on_model, **options)
    else:
        model = build_model(recipe.model, on_model=on_model, within_block=within_block, **options)
        hosted = None
    return model.train(), hosted


def _check_positions(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a sequence longer than the learned positions, which on a GPU ends in a device assert."""
    positions = max_positions(model)
    if positions is not None and recipe.batch.seq > positions:
        raise InputError(
            f"the model has {positions} learned positions",
            f"use a sequence of at most {positions} tokens, or a model with more positions",
            field="batch.seq",
            value=recipe.batch.seq,
        )


class Step:
    """One training step: a plain training loop's body.

    Which tensors stay alive decides the peak. As in the Hugging Face Trainer, the model's output is dropped
    once the loss is taken from it, so in backward only autograd holds the logits. The loss tensor lives
    until its backward is done. Gradients are set to None after the update. The caller owns the batches.
    """

    def __init__(self, recipe: Recipe, draft: Draft, weights: Weights | None = None):
        self.recipe = recipe
        self.weights = weights
        """The weights that were read; None: they are random."""
        self.model = draft.model
        self.device = draft.device
        self.optimizers = draft.optimizers
        self.scaler = draft.scaler
        self.readings = draft.readings
        """Values that techniques measured in the last update, by name (``Draft.readings``)."""
        self.carried = draft.carried
        """What techniques carry from step to step besides, by name."""
        self._loss, self._cross_entropy = draft.loss, draft.cross_entropy
        self._token_logs, self.reference = draft.token_logs, draft.reference
        self._pair_losses = draft.pair_losses
        self._outermost = draft.outermost or draft.model
        if self.reference is not None:
            self.reference.begin(self.model)
        self._after_backward, self._before_update = draft.after_backward, draft.before_update
        self._after_step = draft.after_step
        self._around_forward = draft.around_forward
        self._around_backward = draft.around_backward
        self._num_micro_batches = draft.num_micro_batches
        self._packs_documents = draft.packs_documents
        self._batch_tensors = draft.batch_tensors
        self._wrapped, self._before_batch = draft.wrapped, draft.before_batch
        self.mesh = draft.mesh  # The ranks; None: one rank
        self.data_rank = data_rank(draft.mesh)  # This rank's number among those that read different data
        self._steps_in_backward = draft.steps_in_backward
        self.hosted = draft.hosted
        """The decoder blocks whose weights are on the host; None: all weights are on the device."""

        self.host_state = draft.host_state
        """The optimizers' state that is on the host between updates; None: it stays on the device."""

        self.left_out: Collection[int] = ()
        """Numbers of micro-batches that are not run: a trace lets the one before them stand for them."""

    def random_batches(self, seed: int = 0, sequences: int | None = None) -> list[Batch]:
        """Return ``accumulate`` micro-batches of uniform token ids, equal for a seed on every device.

        Ranks that read different data get different ones.

        Args:
            sequences: of a micro-batch; None: the recipe's.
        """
        generator = torch.Generator().manual_seed(seed + self.data_rank)
        shape = (sequences or self.recipe.micro_sequences, self.recipe.batch.seq)
        batches: list[Batch] = []
        for _ in range(self._num_micro_batches):
            ids_bs = torch.randint(vocabulary(self.model), shape, generator=generator).to(self.device)
            batch = {"input_ids": ids_bs, "labels": ids_bs.clone()}
            if self._packs_documents:  # One document, of which the mask is that of many.
                batch["position_ids"] = torch.arange(shape[1], device=self.device).repeat(shape[0], 1)
            if self._batch_tensors is not None:
                batch |= self._batch_tensors(ids_bs)
            batches.append(batch)
        return batches

    def __call__(
        self, batches: Sequence[Batch], on_phase: Callable[[str], None] = lambda phase: None
    ) -> Tensor:
        """Run forward and backward of every micro-batch, then one update.

        Args:
            on_phase: called as each phase begins: "forward" and "backward" for each micro-batch, "optimizer"
                once.

        Returns:
            The mean loss, detached, fp32 scalar.
        """
        losses: list[Tensor] = []
        batches, weights = zip(*map(_weighed, batches), strict=True)
        if self._pair_losses is not None:
            on_phase("forward")
            batches = self.with_reference(batches)
        for number, batch in enumerate(batches):
            if number in self.left_out:
                losses.append(losses[-1])
                continue
            on_phase("forward")
            for hook in self._before_batch:
                hook(number == len(batches) - 1)
            loss = self.loss(batch)
            weight = weights[number]
            losses.append(loss.detach() if weight == 1 else loss.detach() * weight)
            on_phase("backward")
            self._backward(loss, weight)
            del loss
        on_phase("optimizer")
        self._update()
        for hook in self._after_step:
            hook()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward and return the training loss, fp32 scalar. The model's output is dropped here."""
        if self._wrapped is not None:
            with entered(self._around_forward):
                return self._wrapped(batch)
        return self._forward(self._loss, batch)

    def cross_entropy(self, batch: Batch) -> Tensor:
        """Run the forward and return the mean next-token cross-entropy, fp32 scalar."""
        return self._forward(self._cross_entropy or self._loss, batch)

    @torch.no_grad()
    def token_logs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return the log-probability of each position's next token, fp32 [b, s], of a policy's model.

        The model is in evaluation mode meanwhile. The last position's value means nothing.

        Args:
            batch: ``input_ids``, int64 [b, s].
            reference: of the reference that the recipe names, instead of the model.
        """
        assert self._token_logs is not None, "the objective is a policy's, or a preference's"
        with self._scoring(reference=reference):
            return self._forward(self._token_logs, batch)

    @contextmanager
    def _scoring(self, *, reference: bool) -> Iterator[None]:
        """Let the model, or its reference, be in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            if not reference:
                yield
                return
            assert self.reference is not None, "the recipe names a reference"
            self._reshard()
            with self.reference.active(self.model):
                yield
                self._reshard()
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def with_reference(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return micro-batches of pairs with ``reference``, fp32 [b].

        It is each answer's log-probability by the reference; 0 where the recipe names none.
        """
        if self.reference is None:
            sizes = [len(batch["input_ids"]) for batch in batches]
            zeros = [torch.zeros(size, dtype=torch.float32, device=self.device) for size in sizes]
            return [{**batch, "reference": zero} for batch, zero in zip(batches, zeros, strict=True)]
        with self._scoring(reference=True):
            return [{**batch, "reference": self._forward(self._token_logs, batch)} for batch in batches]

    @torch.no_grad()
    def preferences(self, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch's pairs, then ``PairLosses.means``, fp32 [4]; for held-out
        pairs.
        """
        assert self._pair_losses is not None, "the objective is a preference's"
        (batch,) = self.with_reference([batch])
        found = self._pair_losses(self.token_logs(batch), batch)
        return torch.cat((found.losses.mean()[None], found.means()))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold all weights whole on every rank, for forwards that call the model's parts; a collective.

        Where weights are not sharded nothing changes. Gathered weights are in the dtype of the forward.
        """
        for module in self._sharded_modules():
            module.unshard()
        try:
            yield
        finally:
            self._reshard()

    @property
    def compares_pairs(self) -> bool:
        """Whether its micro-batches hold pairs of answers."""
        return self._pair_losses is not None

    @property
    def shards_weights(self) -> bool:
        """Whether FSDP2 shards weights, so that whole ones have another address each time."""
        return bool(self._sharded_modules())

    def _sharded_modules(self) -> list[FSDPModule]:
        if self.mesh is None:
            return []
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self._outermost.modules() if isinstance(module, FSDPModule)]

    def _reshard(self) -> None:
        """Free gathered weights, which would not follow a change of their shards."""
        for module in self._sharded_modules():
            module.reshard()

    def forward_contexts(self) -> ExitStack:
        """Enter the contexts of the recipe's forwards, such as autocast."""
        return entered(self._around_forward)

    def _forward(self, loss: LossFunction | None, batch: Batch) -> Tensor:
        with entered(self._around_forward):
            if loss is not None:
                return loss(self.model, batch)
            return self.model(**model_inputs(batch), labels=batch["labels"]).loss

    def _backward(self, loss: Tensor, weight: float = 1.0) -> None:
        if weight != 1:
            loss = loss * (weight / self._num_micro_batches)
        elif self._num_micro_batches > 1:
            loss = loss / self._num_micro_batches
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        with entered(self._around_backward):
            loss.backward()

    def _update(self) -> None:
        if self._steps_in_backward:
            return
        for hook in self._after_backward:
            hook()
        update = one_update(self.optimizers)
        if self._before_update and self.scaler is not None:
            self.scaler.unscale_(update)
        for hook in self._before_update:
            hook()
        if self.scaler is not None:
            self.scaler.step(update)
            self.scaler.update()
        else:
            update.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Wait for background copies to the host."""
        for each in (self.hosted, self.host_state):
            if each is not None:
                each.copy_streams.synchronize()

    def parameters_with_host_state(self) -> set[int]:
        """Return the ``id`` of each parameter whose optimizer state is on the host between updates."""
        if self.hosted is not None:
            indices = range(len(self.hosted.blocks))
            return {id(parameter) for index in indices for parameter in self.hosted.parameters(index)}
        if self.host_state is None:
            return set()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizers and scaler by reference, without random generators and data."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "carried": self.carried,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit from a ``state_dict()`` of the same recipe. Takes over its tensors."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, tensor in self.carried.items():
            tensor.copy_(state["carried"][name])


def _weighed(batch: Batch) -> tuple[Batch, float]:
    """Return a micro-batch's tensors on the device, and its weight."""
    if "weight" not in batch:
        return batch, 1.0
    return {name: tensor for name, tensor in batch.items() if name != "weight"}, batch["weight"].item()


def entered(factories: Sequence[ContextFactory]) -> ExitStack:
    """Enter all contexts, the first outermost."""
    stack = ExitStack()
    for factory in factories:
        stack.enter_context(factory())
    return stack


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state with the dtypes that were saved.

    torch casts floating state to its parameter's dtype, which would round fp32 moments of bf16 weights.
    """
    optimizer.load_state_dict(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in saved["state"].items():
        state = optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)


def vocabulary(model: nn.Module) -> int:
    """Return the number of token ids that the model takes."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text.vocab_size
