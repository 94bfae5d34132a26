"""What the power limit of a GPU adds to a step: clocks fall where tensor cores are busy. No torch here.

Operations are timed alone for milliseconds. Attention then runs at nearly full clocks, products of linear
layers at about those of a step in which they take half of the time. In a longer step the limit lowers the
clocks by what tensor cores draw, the load: the sum of their shares of the step, each weighed by its power.

Example, an H200's step of Llama-3.1-8B with 8,192 tokens in bf16. Products take 0.774 of it and attention
0.160, so the load is 0.774 + 0.7 * 0.160 = 0.886. Products take 1 + 0.374 * (0.774 - 0.5) = 1.10 times as
long as alone, attention 1 + 1.0 * (0.886 - 0.65) = 1.24 times.
"""

from collections.abc import Iterable

from trainfit.catalog.load import reference
from trainfit.catalog.rates import TensorShares
from trainfit.ledger.ledger import Ledger, Op
from trainfit.prediction.machine import Machine
from trainfit.prediction.time.device_time import on_tensor_cores, uses_tensor_cores
from trainfit.prediction.time.peaks import PEAK_DTYPE


def slow_down(ledger: Ledger, machine: Machine, device: dict[int, float], issue: dict[int, float]) -> None:
    """Lengthen products and attention in ``device`` by what the power limit takes from the clocks.

    Of the reference's architecture alone: published steps of A100s show nothing of the kind.

    Args:
        device: Seconds on the GPU of each entry at full clocks, by its ``id``.
        issue: Seconds that the host needs for each, likewise.
    """
    if machine.gpu.compute_capability != reference(machine.gpu).compute_capability:
        return
    shares = shares_of(ledger, device, issue)
    power = machine.known.rates.power
    longer = power.slowdown(shares.products + shares.fp8_products)
    attention_longer = power.attention_slowdown(shares)
    products, attention = _products(ledger), _attention(ledger)  # An entry may be there twice.
    device.update({id(op): longer * device[id(op)] for op in products})
    device.update({id(op): attention_longer * device[id(op)] for op in attention})


def shares_of(ledger: Ledger, device: dict[int, float], issue: dict[int, float]) -> TensorShares:
    """Return how much of the steady step tensor cores are busy, by seconds as ``slow_down`` takes them."""
    step_s = max(_sum(ledger, ledger.steady_ops, device), _sum(ledger, ledger.steady_ops, issue))
    if not step_s:
        return TensorShares(0.0, 0.0, 0.0)
    products = _products(ledger)
    fp8_s = _sum(ledger, (op for op in products if PEAK_DTYPE.get(op.dtype) == "fp8"), device)
    products_s, attention_s = (_sum(ledger, ops, device) for ops in (products, _attention(ledger)))
    return TensorShares((products_s - fp8_s) / step_s, fp8_s / step_s, attention_s / step_s)


def _products(ledger: Ledger) -> list[Op]:
    return [op for op in ledger.steady_ops if uses_tensor_cores(op)]


def _attention(ledger: Ledger) -> list[Op]:
    return [op for op in ledger.steady_ops if op.kernel and on_tensor_cores(op)]


def _sum(ledger: Ledger, ops: Iterable[Op], seconds: dict[int, float]) -> float:
    """Return the seconds of entries of a step, in all layers that they stand for."""
    return sum(ledger.times(op) * seconds.get(id(op), 0.0) for op in ops)
