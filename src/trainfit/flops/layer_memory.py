"""Memory of blocks of two linears on one of several devices, in closed form.

The states S (fp32 master weights, gradients and two Adam moments) are sharded over all n devices. Of the
activations of a batch of B tokens, A bytes a token, a share is sharded over them too and the rest is whole on
each. A device then holds

    S / n + A B (share / n + 1 - share)

docs/internals/communication.md has an example with published numbers.
"""

import math

from trainfit.flops.layer_times import Layers
from trainfit.spec.value import Value

SHARDED_SHARE = 0.5
"""Every second layer's activations."""


class DeviceMemory(Value):
    """Bytes of one device."""

    states: float
    sharded_activations: float
    whole_activations: float

    @property
    def total(self) -> float:
        return self.states + self.sharded_activations + self.whole_activations


def device_memory(layers: Layers, ranks: int, tokens: float, share: float = SHARDED_SHARE) -> DeviceMemory:
    """Return the bytes that one of ``ranks`` devices holds for a batch of ``tokens``.

    Args:
        share: of the activations, what is sharded over the ranks.
    """
    saved = layers.saved_bytes_per_token * tokens
    return DeviceMemory(
        states=layers.state_bytes / ranks,
        sharded_activations=share * saved / ranks,
        whole_activations=(1 - share) * saved,
    )


def fewest_ranks(
    layers: Layers, limit_bytes: float, tokens: float = 0, share: float = SHARDED_SHARE
) -> int | None:
    """Return the smallest number of ranks whose devices hold at most ``limit_bytes``.

    None: what is whole on each device does not fit, on however many.
    """
    one = device_memory(layers, 1, tokens, share)
    room = limit_bytes - one.whole_activations
    return max(1, math.ceil((one.states + one.sharded_activations) / room)) if room > 0 else None


def most_tokens(layers: Layers, limit_bytes: float, ranks: int, share: float = SHARDED_SHARE) -> float:
    """Return the largest batch with which each of ``ranks`` devices holds at most ``limit_bytes``.

    0 where the states alone take more.
    """
    one = device_memory(layers, ranks, 1, share)
    return max(0.0, (limit_bytes - one.states) / (one.sharded_activations + one.whole_activations))
