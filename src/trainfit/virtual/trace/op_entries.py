"""Ledger entries of an operation: FLOPs, bytes and the groups of layers that it belongs to."""

from typing import Any

from trainfit.ledger.ledger import Op
from trainfit.virtual.cuda.attention_kernel import AttentionKernel
from trainfit.virtual.cuda.bytes_moved import bytes_moved
from trainfit.virtual.cuda.flops import OpFlops
from trainfit.virtual.cuda.op_layout import layout, product_dtype, product_shape
from trainfit.virtual.trace.scope import Scope
from trainfit.virtual.trace.tensors import tensors_of


def op_entries(
    func: Any,
    args: Any,
    kwargs: Any,
    out: Any,
    *,
    counted: OpFlops | None,
    scope: Scope,
    owners: list[Scope],
    phase: str,
    segment: int,
    attention: AttentionKernel,
    capability: tuple[int, int] | None,
    host: dict[str, Any],
) -> list[Op]:
    """Return one entry; for an operation on a list of several groups' parameters, one per group.

    Args:
        counted: the result of ``flops.count``.
        capability: the GPU's; None: a CPU.
        owners: scope of each parameter of an operation on a list; else one scope, or none.
        host: fields that count the host's work before it.
    """
    dtype = dtype_of(args, out)
    groups = {owner.group for owner in owners}
    if len(groups) > 1:
        shares = _shares(func, args, kwargs, out, owners)
        return [
            Op(
                str(func),
                "",
                segment,
                group,
                0,
                0,
                0,
                0,
                num_bytes,
                dtype,
                int(number == 0),
                scope.updating,
                **(host if number == 0 else {}),
            )
            for number, (group, num_bytes) in enumerate(shares)
        ]
    num_bytes, dtype = bytes_moved(func, args, kwargs, out), product_dtype(func, dtype, capability)
    full, causal = (counted.full, counted.causal) if counted else (0, 0)
    # Model FLOPs exclude recomputation and updates (Muon multiplies matrices).
    extra = scope.recomputing or scope.updating
    needed = phase in ("forward", "backward") and not extra
    model, model_full = (counted.model_causal, counted.model_full) if counted and needed else (0, 0)
    return [
        Op(
            str(func), scope.module, segment, scope.group, full, causal, model, model_full, num_bytes, dtype,
            1, scope.updating, *attention, product_shape(func, args), layout(func, args, out), **host,
        )
    ]  # fmt: skip


def _shares(func: Any, args: Any, kwargs: Any, out: Any, owners: list[Scope]) -> list[tuple[int, int]]:
    """Return each group's bytes; tensors without an owner (a loss scale) count for the first group."""
    shared = bytes_moved(func, *(_of_group(part, owners, None) for part in (args, kwargs, out)))
    shares: list[tuple[int, int]] = []
    for number, group in enumerate(sorted({owner.group for owner in owners})):
        share = bytes_moved(func, *(_of_group(part, owners, group) for part in (args, kwargs, out)))
        shares.append((group, share - (shared if number else 0)))
    return shares


def _of_group(value: Any, owners: list[Scope], group: int | None) -> Any:
    """Filter the lists in arguments or results to the entries whose owner is in the group."""
    if isinstance(value, dict):
        return {name: _of_group(item, owners, group) for name, item in value.items()}
    if isinstance(value, list) and len(value) == len(owners):
        return [item for item, owner in zip(value, owners, strict=True) if owner.group == group]
    if isinstance(value, list | tuple):
        return type(value)(_of_group(item, owners, group) for item in value)
    return value


def dtype_of(args: Any, out: Any) -> str:
    """Return the dtype of the first floating-point input, else of the output."""
    for t in tensors_of((args, out)):
        if t.is_floating_point():
            return str(t.dtype).removeprefix("torch.")
    return "int64"
