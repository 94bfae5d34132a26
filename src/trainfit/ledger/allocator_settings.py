"""The caching allocator's settings in the environment: PYTORCH_ALLOC_CONF and its older name. No torch here.

torch 2.11 to 2.13 reads the older name first (c10/core/AllocatorConfig.cpp,
``AcceleratorAllocatorConfig::instance``).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from trainfit.spec.errors import InputError

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order in which torch reads them."""
HOST_ONLY = re.compile(r"pinned_")
"""Settings of pinned host memory, which leave device memory unchanged."""
AS_MODELLED = {"expandable_segments": ("True", "False"), "backend": ("native",)}


class AllocatorSettings(NamedTuple):
    """Settings that ``replay`` models, and the assumptions that a prediction reports."""

    expandable_segments: bool = False
    assumptions: tuple[str, ...] = ()


def allocator_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """Return the settings of the first variable that is set.

    Raises:
        InputError: ``expandable_segments`` is neither True nor False, which torch refuses.
    """
    name = next((name for name in VARIABLES if environment.get(name)), None)
    if name is None:
        return AllocatorSettings()
    options = _options(environment[name])
    expandable = options.get("expandable_segments", "False")
    if expandable not in AS_MODELLED["expandable_segments"]:
        raise InputError(
            "torch takes True or False here", f"write {name}=expandable_segments:True, or unset it",
            field=name, value=environment[name],
        )  # fmt: skip
    assumptions: list[str] = []
    if expandable == "True":
        assumptions.append(f"reserved bytes: in expandable segments, as {name} sets in this environment")
    unknown = [
        key for key, value in options.items()
        if not HOST_ONLY.match(key) and value not in AS_MODELLED.get(key, ())
    ]  # fmt: skip
    if unknown:
        assumptions.append(
            f"reserved bytes: {name} sets {', '.join(unknown)}, which is not modelled; "
            "a run will reserve other amounts"
        )
    return AllocatorSettings(expandable == "True", tuple(assumptions))


def _options(text: str) -> dict[str, str]:
    """Parse comma-separated ``key:value`` pairs; a value in square brackets may contain commas."""
    found = re.findall(r"\s*([^,:\s]+)\s*:\s*(\[[^\]]*\]|[^,]*)", text)
    return {key: value.strip() for key, value in found}
