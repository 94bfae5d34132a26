"""Collectives: what the ledger calls each, and what passes through a link.

A row of collectives.toml, here or in one's own catalog folder, is all that a collective takes.
"""

import functools
from typing import Literal

from trainfit.catalog import names
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Transfers
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import PositiveInt, Value


class CollectiveKind(Value):
    """One row of collectives.toml."""

    name: str
    """In the ledger."""
    schemas: tuple[str, ...] = ()
    """Operations of PyTorch, or of a library registered with it, such as ``c10d::broadcast_``."""
    pattern: Literal["ring", "chain", "exchange"] = "ring"
    """ring: parts pass from rank to rank; chain: so does the whole tensor; exchange: each rank sends a part
    to each other rank at once."""
    passes: PositiveInt = 1
    """Multiples of (n - 1) / n of the tensor that a ring over n ranks sends through each GPU's link."""
    gathers: bool = False
    """The result is as large as all ranks' arguments together."""
    by_copy_engines: bool = False
    """No NCCL, and no SM, takes part."""
    like: str | None = None
    """The collective whose share of a link's rate is taken, where a GPU has none for this one."""


@functools.cache
def collective_kinds() -> dict[str, CollectiveKind]:
    """Return the rows by name.

    Raises:
        InputError: naming the row that is wrong.
    """
    found = {
        name: parse(CollectiveKind, {"name": name, **row}, file=names.place(names.COLLECTIVES, name))
        for name, row in names.rows(names.COLLECTIVES).items()
    }
    schemas: dict[str, str] = {}
    for row in found.values():
        file = names.place(names.COLLECTIVES, row.name)
        if row.like is not None and (row.like not in found or found[row.like].like is not None):
            known = ", ".join(name for name, one in found.items() if one.like is None)
            problem = "no such collective, or one that is like another itself"
            raise InputError(problem, f"use one of {known}", field="like", value=row.like, file=file)
        for schema in row.schemas:
            if schemas.setdefault(schema, row.name) != row.name:
                problem = f"{schemas[schema]} has this operation"
                raise InputError(problem, "name each in one row", field="schemas", value=schema, file=file)
    return found


@functools.cache
def kinds_by_schema() -> dict[str, CollectiveKind]:
    """Return the row of each operation that communicates, by its schema name."""
    return {schema: row for row in collective_kinds().values() for schema in row.schemas}


@functools.cache
def namespaces() -> frozenset[str]:
    """Return the namespaces of the operations that communicate."""
    return frozenset(schema.partition("::")[0] for schema in kinds_by_schema())


def share_of(name: str, known: Transfers) -> float:
    """Return the share of a link's rate that a collective reaches on a GPU.

    Raises:
        InputError: neither the GPU's row nor ``like`` states one.
    """
    row: CollectiveKind | None = collective_kinds()[name]
    while row is not None:
        if row.name in known.collectives:
            return known.collectives[row.name]
        row = collective_kinds()[row.like] if row.like else None
    problem = "no GPU's row has a share of the links' rates for it"
    raise InputError(problem, "add like = 'all_gather', or another collective that is as fast", field=name)
