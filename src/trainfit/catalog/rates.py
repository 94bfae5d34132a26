"""Rates of a step, from rates.toml: the host's seconds, and operations in a step over those timed alone."""

import functools

from trainfit.catalog.fitted import fitted_table
from trainfit.catalog.load import FOLDER
from trainfit.spec.hardware import PositiveFloat
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import Seconds, Value

FILE = FOLDER / "rates.toml"


class HostRates(Value):
    """Seconds of the host's work; ``in_graph``: a launch of a compiled graph, ``graph``: a call of one."""

    forward: Seconds
    backward: Seconds
    optimizer: Seconds
    update_in_backward: Seconds
    foreach: Seconds
    step: Seconds  # A step, on top of its operations: of calls of the model, autograd and the optimizer
    in_graph: Seconds
    allocation: Seconds  # A buffer of a compiled graph
    view: Seconds
    view_in_backward: Seconds
    view_in_graph: Seconds
    module: Seconds
    checkpoint: Seconds  # Of a recomputed block, on top of its operations
    graph: Seconds
    read: Seconds  # Until the host goes on after it waited for a value
    parametrized: Seconds  # PEFT computes experts' weights with their adapter, by a parametrization
    looped: Seconds  # A product of a loop over experts
    launch: Seconds  # From a launch by the host to its start on an idle GPU
    wrapped: Seconds  # An operation on DTensors or other subclasses, in addition to the one inside
    wrapped_tensor: Seconds  # Each of its tensors
    python_op: Seconds  # An operator implemented in Python, which launches a Triton kernel
    python_op_backward: Seconds  # One of a backward, with the Python around it
    python_update: Seconds  # One of an optimizer
    scaled_product: Seconds  # torchao's Python around an fp8 product in eager code: casts and wrappers
    in_mode: Seconds  # A call that passes through a dispatch mode in Python
    script_launch: Seconds  # In a traced script: a launch, with dispatch and autograd
    script_block: Seconds  # A recomputed block, on top of both
    script_call: Seconds  # A Python function that it calls, its launches not counted
    collective: Seconds
    unshard: Seconds  # FSDP2: a group's gather, its copies and its release
    unshard_parameter: Seconds
    reduce: Seconds  # FSDP2: a group's reduction
    reduce_parameter: Seconds


class PowerRates(Value):
    """Clocks fall at the power limit where tensor cores are busy for most of the step."""

    share: PositiveFloat  # Of the step, or load, above which clocks fall
    slope: PositiveFloat  # Relative time that products take longer, for each share beyond it
    attention: PositiveFloat  # Multiplies Rates.attention below that load
    attention_slope: (
        PositiveFloat  # Relative time that attention takes longer, for each unit of load above it
    )
    attention_load: PositiveFloat  # Power of attention over that of 16-bit products
    fp8_load: PositiveFloat  # Power of fp8 products over that of 16-bit products

    def slowdown(self, share: float) -> float:
        """Return how much longer products take where they are this share of the step."""
        return 1 + self.slope * max(0.0, share - self.share)

    def attention_slowdown(self, products: float, fp8_products: float, attention: float) -> float:
        """Return attention's time over that in the mean step; below 1 where clocks are full.

        Attention was timed alone for milliseconds, at full clocks; products at the power limit.

        Args:
            products: Share of the step of 16-bit products.
            fp8_products: Share of products in fp8.
            attention: Share of attention.
        """
        load = products + self.fp8_load * fp8_products + self.attention_load * attention
        return self.attention * (1 + self.attention_slope * max(0.0, load - self.share))


class OverlapRates(Value):
    """Speeds while computation and collectives run at the same time, of those alone."""

    computation: PositiveFloat
    collectives: PositiveFloat


class Band(Value):
    """Measured steps over predicted ones: the middle of those that may be learned from."""

    low: PositiveFloat
    high: PositiveFloat
    basis: str
    """Steps that it holds, as a prediction states it."""


class Rates(Value):
    """Times of products, attention and other operations in a step over those alone; the host's seconds."""

    host_of: str
    """GPU of the calibration on whose machine the host's seconds rest."""
    products: PositiveFloat
    products_fp16: PositiveFloat
    products_fp32: PositiveFloat
    grouped: PositiveFloat  # Products of experts' tokens, whose numbers differ
    attention: PositiveFloat
    memory: PositiveFloat
    fp8_casts: PositiveFloat  # Compiled casts to fp8, on top of ``memory``
    kernel_s: Seconds  # At least this for every launch
    kernel_in_graph_s: Seconds  # And this in a CUDA graph, whose kernels follow one another sooner
    script_host_ratio: PositiveFloat  # What ``calibrate --host`` found of the host that scripts' costs are of
    power: PowerRates
    host: HostRates
    overlap: OverlapRates
    device_bound: Band
    host_bound: Band
    own_host: Band  # The host decides, and was calibrated
    compiled_device_bound: Band
    compiled_host_bound: Band
    script_host: Band  # The host's part of a traced script
    several_gpus: Band

    def on_host(self, ratio: float) -> "Rates":
        """Return the rates of a host whose small steps take ``ratio`` times as long as the catalog's."""
        of_script = ratio / self.script_host_ratio
        scaled = {
            name: seconds * (of_script if name.startswith("script_") else ratio)
            for name, seconds in self.host
        }
        return self.model_copy(update={"host": HostRates(**scaled)})


@functools.cache
def rates() -> Rates:
    """Return factors of operations in an H200's step, and rates of the hosts on which steps were measured."""
    return parse(Rates, fitted_table(FILE).values, file=FILE.name)
