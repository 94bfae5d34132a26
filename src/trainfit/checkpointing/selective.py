"""Full and selective activation checkpointing of one decoder block.

``selective`` saves the results of listed operations and recomputes the rest of the block (compare Korthikanti
et al., https://arxiv.org/abs/2205.05198). Matrix products are saved only over a long inner dimension: a
product over k does k FLOPs for each byte of a 16-bit result. A product that is only added to the residual
stream (in most models the block's last) is used by no backward, and is not saved.

Under ``torch.compile`` torch's own selective checkpointing passes the same policy to the partitioner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainfit.models.layers import ORIGINAL
from trainfit.spec.errors import InputError
from trainfit.spec.value import texts
from trainfit.virtual.cuda.op_kinds import base_name, written
from trainfit.virtual.trace.counted_mode import CountedMode
from trainfit.virtual.trace.tensors import tensors_of

DEFAULT_SAVED = ("mm", "attention")  # Operations that selective saves by default
PRODUCTS = {
    "mm": 0, "bmm": 0, "_scaled_mm": 0, "_int_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0,
    "addmm": 1, "baddbmm": 1,
}  # fmt: skip
"""Matrix products -> position of the left factor."""
SHORTEST_INNER = 512
"""Products over a shorter inner dimension are recomputed. On an H200 (700 TFLOP/s, 4.3 TB/s) one over 512
takes as long as three passes over its result; eager attention's scores are products over 64 to 256."""
PASSES_ON = frozenset({"add", "_unsafe_view", "_to_copy"})
"""Operations other than views whose backward uses no value of their inputs."""


class SavePolicy(NamedTuple):
    """Results to save: the groups ``mm`` and ``attention``, and ATen operations by name.

    Attributes:
        every: of a block's matrix products the first and every ``every``-th after it are in ``mm``.
    """

    save: tuple[str, ...] = DEFAULT_SAVED
    every: int = 1

    def choice(self) -> Callable[[Any, Sequence[Any]], bool]:
        """Return a function for one run of a block: whether a call's results are saved."""
        num_products = 0

        def keeps(func: Any, args: Sequence[Any]) -> bool:
            nonlocal num_products
            if not isinstance(func, torch._ops.OpOverload) or not _can_be_saved(func):
                return False
            name = base_name(func)
            if name in PRODUCTS and "mm" in self.save:
                num_products += 1
                is_due = (num_products - 1) % self.every == 0
                return is_due and args[PRODUCTS[name]].shape[-1] >= SHORTEST_INNER
            return ("attention" if "attention" in name else name) in self.save

        return keeps


@lru_cache(maxsize=4096)
def _can_be_saved(func: Any) -> bool:
    """Return whether an operation's results are new memory."""
    returns = func._schema.returns
    return bool(returns) and all(result.alias_info is None for result in returns)


def check_names(save: Iterable[str]) -> None:
    """Refuse names that are neither a group nor an operation whose results can be saved."""
    for name in save:
        packet = getattr(torch.ops.aten, name, None)
        problem = (
            "its result is its input's own memory" if packet else "no operation of PyTorch (torch.ops.aten)"
        )
        remedy = f"write {', '.join(DEFAULT_SAVED)} or operations such as silu, native_layer_norm"
        overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
        if name not in DEFAULT_SAVED and not any(map(_can_be_saved, overloads)):
            raise InputError(problem, remedy, field="recompute.selective.save", value=name)


def set_recompute(
    block: nn.Module,
    policy: Literal["full", "selective"],
    *,
    save: Sequence[str] | str = DEFAULT_SAVED,
    every: int = 1,
    compiled: bool = False,
    whole: bool = False,
) -> None:
    """Checkpoint one decoder block in place, by changing its class; random state and autocast are restored.

    Args:
        save: with ``selective``, results to save: ``mm``, ``attention``, or ATen operations by name.
        every: as in ``SavePolicy``.
        compiled: the block will be compiled, alone or with the model.
        whole: with ``full``, the block's graph, compiled alone, runs again as a whole, with its last product.
            Otherwise the compiler decides what of it runs again, and saves what functions of
            ``torch.autograd.Function`` in it save.
    """
    if whole:
        assert policy == "full", "what is kept of a graph is the compiler's choice"
        block.__class__ = _recomputed_whole(type(block))
        return
    contexts = None if policy == "full" else _contexts(SavePolicy(texts(save, field="save"), every), compiled)
    block.__class__ = _recomputed(type(block), contexts)


@cache
def _recomputed(block: type[nn.Module], contexts: Callable[[], Any] | None) -> type[nn.Module]:
    """Return the block's class, its forward checkpointed; equal blocks share one class and compiled graph."""
    settings: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(block.forward, self, *args, use_reentrant=False, **settings, **kwargs)

    return type(f"Recomputed{block.__name__}", (block,), {"forward": forward, ORIGINAL: block})


@cache
def _recomputed_whole(block: type[nn.Module]) -> type[nn.Module]:
    """Return the block's class with its call checkpointed, which ``compile()`` leaves as it is."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(block.__call__, self), *args, use_reentrant=False, **kwargs)

    return type(f"Recomputed{block.__name__}", (block,), {"__call__": call, ORIGINAL: block})


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@cache
def _contexts(choice: SavePolicy, compiled: bool) -> Callable[[], Contexts]:
    """Return a factory of the contexts around a forward and around its recomputation."""

    def contexts() -> Contexts:  # A plain function: Dynamo takes no other callable.
        if compiled:
            return create_selective_checkpoint_contexts(_policy(choice))
        keeping = CachingMode(choice)
        return keeping, CachedMode(keeping)

    return contexts


def _policy(choice: SavePolicy) -> Callable[..., CheckpointPolicy]:
    """Return the policy of one run of a block and its recomputation, which count products separately."""
    runs = {False: choice.choice(), True: choice.choice()}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = runs[bool(context.is_recompute)](func, args)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Result(NamedTuple):
    """Result of one call, and the state of the random generator after it if it drew random numbers."""

    out: Any
    generator: Tensor | None


class CachingMode(CountedMode):
    """Save the results of selected calls during a block's forward, by call number."""

    def __init__(self, policy: SavePolicy):
        super().__init__()
        self.policy, self._keeps = policy, policy.choice()
        self.results: dict[int, Result] = {}
        self._num_calls = 0
        self._unused: set[int] = set()  # Calls whose results no operation has used, except those in PASSES_ON
        self._calls_in: dict[int, set[int]] = {}
        """Address of a storage -> calls whose results it contains or sums."""
        # A weak reference keeps the address from being reused.
        self._storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        calls = self._calls_of((args, kwargs)) if self._calls_in else set()
        out = func(*args, **kwargs)
        if calls and (func.is_view or base_name(func) in PASSES_ON):
            self._track(out, calls)
        elif calls and tensors_of(out):  # Not a query such as prim::device.
            self._unused -= calls
        if func._schema.is_mutable:
            self._drop_written(func, args, kwargs)
        if self._keeps(func, args):
            self._save(func, args, kwargs, out)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for call in self._unused:
            self.results.pop(call, None)
        self._calls_in.clear()
        self._storages.clear()

    def _save(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        generator = generator_state(tensors_of(out)[0].device) if is_random(func, args, kwargs) else None
        # Detached: autograd sets the gradient function of ``out`` itself.
        self.results[self._num_calls] = Result(tree_map_only(Tensor, torch.detach, out), generator)
        if base_name(func) in PRODUCTS:
            self._unused.add(self._num_calls)
            self._track(out, {self._num_calls})
        self._num_calls += 1

    def _track(self, out: Any, calls: set[int]) -> None:
        for t in tensors_of(out):
            storage = t.untyped_storage()
            self._storages.append(StorageWeakRef(storage))
            self._calls_in.setdefault(storage._cdata, set()).update(calls)

    def _calls_of(self, values: Any) -> set[int]:
        found: set[int] = set()
        for t in tensors_of(values):
            found |= self._calls_in.get(t.untyped_storage()._cdata, set())
        return found

    def _drop_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Drop saved results that an operation wrote into; they are recomputed."""
        addresses = {t.untyped_storage()._cdata for t in tensors_of(written(func, args, kwargs))}
        for call, result in list(self.results.items()):
            if any(t.untyped_storage()._cdata in addresses for t in tensors_of(result.out)):
                del self.results[call]


class CachedMode(CountedMode):
    """Return saved results during a block's recomputation; other calls run."""

    def __init__(self, cache: CachingMode):
        super().__init__()
        self._cache, self._keeps = cache, cache.policy.choice()
        self._num_calls = 0

    def __enter__(self) -> CachedMode:
        self._num_calls, self._keeps = 0, self._cache.policy.choice()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._keeps(func, args):
            return func(*args, **kwargs)
        result = self._cache.results.pop(self._num_calls, None)
        self._num_calls += 1
        if result is None:
            return func(*args, **kwargs)
        if result.generator is not None:
            set_generator_state(tensors_of(result.out)[0].device, result.generator)
        return result.out


def is_random(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; attention does with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


def generator_state(device: torch.device) -> Tensor:
    """Return the state of the device's default random generator; a virtual GPU's is the CPU's."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the device's default random generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
