"""Rules by which the figures of a step of many micro-batches follow from those of a step of fewer.

Each field of a value that is continued states its rule with its type: ``step_s: Added[Seconds]``. A field
without one is an error, since its value for few micro-batches would be kept in silence.
"""

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, TypeVar

from trainfit.spec.value import Value

T = TypeVar("T")
AnyValue = TypeVar("AnyValue", bound=Value)


class Rule(Enum):
    """What more micro-batches change in a field."""

    SAME = "nothing"
    ADDED = "each adds the same"
    DERIVED = "it follows from the other fields"


Same = Annotated[T, Rule.SAME]
Added = Annotated[T, Rule.ADDED]
"""A number; or values, or a tuple of them, whose own fields state rules. None stays None."""
Derived = Annotated[T, Rule.DERIVED]


def rules(kind: type[Value]) -> dict[str, Rule]:
    """Return the rule of each field.

    Raises:
        TypeError: a field states none, or several.
    """
    stated = {
        name: [one for one in field.metadata if isinstance(one, Rule)]
        for name, field in kind.model_fields.items()
    }
    for name, found in stated.items():
        if len(found) != 1:
            raise TypeError(
                f"{kind.__name__}.{name} states {len(found)} rules for steps of more micro-batches: annotate "
                "it with one of Same, Added and Derived (spec/micro_batches.py)"
            )
    return {name: found[0] for name, found in stated.items()}


def continued(before: AnyValue, after: AnyValue, on: Callable[[Any, Any], Any], **derived: Any) -> AnyValue:
    """Return ``after`` with more micro-batches.

    Args:
        on: (number before, number after) -> the number with more micro-batches, for fields that are added.
        derived: values of exactly the fields that follow from others.

    Raises:
        TypeError: a field states no rule, or the derived fields are not those that state to be.
    """
    stated = rules(type(after))
    wanted = {name for name, rule in stated.items() if rule is Rule.DERIVED}
    if wanted != derived.keys():
        names = ", ".join(sorted(wanted ^ derived.keys()))
        raise TypeError(f"fields of {type(after).__name__} that are derived, or given, but not both: {names}")
    added = {
        name: _added(getattr(before, name), getattr(after, name), on)
        for name, rule in stated.items()
        if rule is Rule.ADDED
    }
    return after.model_copy(update={**added, **derived})


def _added(before: Any, after: Any, on: Callable[[Any, Any], Any]) -> Any:
    if before is None or after is None:
        return None
    if isinstance(after, tuple):
        return tuple(_added(one, other, on) for one, other in zip(before, after, strict=True))
    if isinstance(after, Value):
        return continued(before, after, on)
    number = on(before, after)
    return round(number) if isinstance(after, int) else number
