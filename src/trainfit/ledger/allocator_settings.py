"""What the environment asks of CUDA's caching allocator: PYTORCH_ALLOC_CONF and its older name. No torch here.

torch (2.11 to 2.13) reads the older name first, and the newer one only where that is not set (c10/core/AllocatorConfig.cpp,
``AcceleratorAllocatorConfig::instance``).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from trainfit.spec.errors import InputError

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order in which torch looks."""
HOST_ONLY = re.compile(r"pinned_")
"""Settings of pinned host memory; the device's is the same."""
AS_MODELLED = {"expandable_segments": ("True", "False"), "backend": ("native",)}


class AllocatorSettings(NamedTuple):
    """The settings that replay follows, and what a prediction has to say about them."""

    expandable_segments: bool = False
    assumptions: tuple[str, ...] = ()


def allocator_settings(environment: Mapping[str, str]) -> AllocatorSettings:
    """What the first set variable says.

    Raises:
        InputError: a value of ``expandable_segments`` that torch would not start with.
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
        assumptions.append(f"reserved bytes: in expandable segments, as {name} asks for in this environment")
    unknown = [
        key for key, value in options.items()
        if not HOST_ONLY.match(key) and value not in AS_MODELLED.get(key, ())
    ]  # fmt: skip
    if unknown:
        assumptions.append(
            f"reserved bytes: {name} sets {', '.join(unknown)}, which is not followed; a run will reserve other amounts"
        )
    return AllocatorSettings(expandable == "True", tuple(assumptions))


def _options(text: str) -> dict[str, str]:
    """``key:value`` pairs between commas; a value in square brackets may have commas of its own."""
    found = re.findall(r"\s*([^,:\s]+)\s*:\s*(\[[^\]]*\]|[^,]*)", text)
    return {key: value.strip() for key, value in found}
