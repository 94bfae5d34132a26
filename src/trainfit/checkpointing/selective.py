"""Recomputation of one decoder block: all of it, or all but what is dear to compute again. No technique by itself.

``selective`` keeps what operations of a list gave, and runs the rest of the block's forward again in backward (by
operation, as Korthikanti et al., https://arxiv.org/abs/2205.05198, but the other way round: what is cheap goes). Of matrix
products those over a long inner dimension are kept, because a product over k does k FLOPs for each byte of a 16-bit
result. One that is only added to what goes past the block (in most models the block's last) is asked for by nobody, and
is not kept.

Under ``torch.compile`` the same choice is handed to torch's own selective checkpointing, which the partitioner obeys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainfit.models.layers import ORIGINAL
from trainfit.spec.errors import InputError
from trainfit.virtual.cuda.op_kinds import base_name, written
from trainfit.virtual.trace.tensors import tensors_of

DEFAULT_SAVED = ("mm", "attention")
"""What ``selective`` keeps unless the recipe lists it."""
PRODUCTS = {
    "mm": 0, "bmm": 0, "_scaled_mm": 0, "_int_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0, "addmm": 1, "baddbmm": 1,
}  # fmt: skip
"""Matrix products -> which argument is the left factor."""
SHORTEST_INNER = 512
"""A product over fewer is computed again: on an H200 (700 TFLOP/s, 4.3 TB/s: 163 FLOPs a byte) one over 512 takes as
long as three passes over its result. Scores of attention written out are such: large, over a head's 64 to 256."""
PASSES_ON = frozenset({"add", "_unsafe_view", "_to_copy"})
"""Beside views: their backward asks for no value of their inputs."""


class SavePolicy(NamedTuple):
    """Which results are kept: the groups ``mm`` and ``attention``, and ATen operations by name."""

    save: tuple[str, ...] = DEFAULT_SAVED

    def keeps(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether this call's results are kept."""
        if not isinstance(func, torch._ops.OpOverload) or not _can_be_kept(func):
            return False
        name = base_name(func)
        if name in PRODUCTS and "mm" in self.save:
            return args[PRODUCTS[name]].shape[-1] >= SHORTEST_INNER
        return ("attention" if "attention" in name else name) in self.save


@lru_cache(maxsize=4096)
def _can_be_kept(func: Any) -> bool:
    """Whether what an operation gives is memory of its own."""
    returns = func._schema.returns
    return bool(returns) and all(result.alias_info is None for result in returns)


def check_names(save: Iterable[str]) -> None:
    """Nothing, if the list names groups and operations whose results can be kept.

    Raises:
        InputError: an unknown operation, or one that gives its input's memory.
    """
    for name in save:
        if name in DEFAULT_SAVED:
            continue
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and any(_can_be_kept(getattr(packet, each)) for each in packet.overloads()):
            continue
        raise InputError(
            "no operation of PyTorch (torch.ops.aten)"
            if packet is None
            else "its result is its input's own memory",
            f"write {', '.join(DEFAULT_SAVED)} or operations such as silu, native_layer_norm",
            field="recompute.selective.save",
            value=name,
        )


def set_recompute(
    block: nn.Module,
    policy: Literal["full", "selective"],
    *,
    save: tuple[str, ...] = DEFAULT_SAVED,
    compiled: bool = False,
) -> None:
    """Let one decoder block compute its forward again in backward: in place, its class changes.

    Never reentrant. Random generators and autocast are as in the forward. Without gradients nothing changes.

    Args:
        save: with ``selective``, what is kept: ``mm``, ``attention``, or ATen operations by name.
        compiled: the block will be compiled, by itself or with the model.
    """
    contexts = None if policy == "full" else _contexts(SavePolicy(tuple(save)), compiled)
    block.__class__ = _recomputed(type(block), contexts)


@cache
def _recomputed(block: type[nn.Module], contexts: Callable[[], Any] | None) -> type[nn.Module]:
    """The block's class with its forward checkpointed.

    One class for all, not a function set on each block: equal blocks stay equal and share one compiled graph.
    """

    settings: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(block.forward, self, *args, use_reentrant=False, **settings, **kwargs)

    return type(f"Recomputed{block.__name__}", (block,), {"forward": forward, ORIGINAL: block})


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@cache
def _contexts(choice: SavePolicy, compiled: bool) -> Callable[[], Contexts]:
    """What ``checkpoint`` enters: around a forward, and around its recomputation."""

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if choice.keeps(func, args) else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Contexts:  # A plain function: Dynamo takes no other callable.
        if compiled:
            return create_selective_checkpoint_contexts(policy)
        keeping = CachingMode(choice)
        return keeping, CachedMode(keeping)

    return contexts


class Result(NamedTuple):
    """What one call gave, and the state in which it left the random generator, if it drew from it."""

    out: Any
    generator: Tensor | None


class CachingMode(TorchDispatchMode):
    """Around a block's forward: keeps the chosen calls' results by their number, until ``CachedMode`` takes them."""

    def __init__(self, choice: SavePolicy):
        super().__init__()
        self.choice = choice
        self.results: dict[int, Result] = {}
        self._num_calls = 0
        self._unasked: set[int] = set()
        """Calls whose results no operation has asked for, beside those that pass them on."""
        self._calls_in: dict[int, set[int]] = {}
        """Address of a storage -> the calls whose results it is, or is a sum of."""
        # While it is referenced, weakly too, no other storage gets the same address.
        self._storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        calls = self._calls_of((args, kwargs)) if self._calls_in else set()
        out = func(*args, **kwargs)
        if calls and (func.is_view or base_name(func) in PASSES_ON):
            self._note(out, calls)
        elif calls and tensors_of(out):  # not a question about the tensor itself, such as its device
            self._unasked -= calls
        if func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        if self.choice.keeps(func, args):
            self._keep(func, args, kwargs, out)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for call in self._unasked:
            self.results.pop(call, None)
        self._calls_in.clear()
        self._storages.clear()

    def _keep(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        generator = generator_state(device_of(out)) if draws(func, args, kwargs) else None
        # Another tensor of the same memory: autograd makes the one that it gets its own.
        self.results[self._num_calls] = Result(tree_map_only(Tensor, torch.detach, out), generator)
        if base_name(func) in PRODUCTS:
            self._unasked.add(self._num_calls)
            self._note(out, {self._num_calls})
        self._num_calls += 1

    def _note(self, out: Any, calls: set[int]) -> None:
        for t in tensors_of(out):
            storage = t.untyped_storage()
            self._storages.append(StorageWeakRef(storage))
            self._calls_in.setdefault(storage._cdata, set()).update(calls)

    def _calls_of(self, values: Any) -> set[int]:
        found: set[int] = set()
        for t in tensors_of(values):
            found |= self._calls_in.get(t.untyped_storage()._cdata, set())
        return found

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """What an operation wrote into is no result any more: it is computed again."""
        addresses = {t.untyped_storage()._cdata for t in tensors_of(written(func, args, kwargs))}
        for call, result in list(self.results.items()):
            if any(t.untyped_storage()._cdata in addresses for t in tensors_of(result.out)):
                del self.results[call]


class CachedMode(TorchDispatchMode):
    """Around a block's recomputation: what was kept is given, all else runs."""

    def __init__(self, keeping: CachingMode):
        super().__init__()
        self._keeping = keeping
        self._num_calls = 0

    def __enter__(self) -> CachedMode:
        self._num_calls = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._keeping.choice.keeps(func, args):
            return func(*args, **kwargs)
        result = self._keeping.results.pop(self._num_calls, None)
        self._num_calls += 1
        if result is None:
            return func(*args, **kwargs)
        if result.generator is not None:
            set_generator_state(device_of(result.out), result.generator)
        return result.out


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers. Attention does where it drops out."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


def device_of(out: Any) -> torch.device:
    """Device of the first tensor."""
    return tensors_of(out)[0].device


def generator_state(device: torch.device) -> Tensor:
    """State of the device's default random generator. A virtual GPU's is the CPU's."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Put the device's default random generator into a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
