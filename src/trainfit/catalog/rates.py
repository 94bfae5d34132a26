"""Rates of a step, from rates.toml: the host's seconds, and operations in a step over those timed alone."""

import functools
from typing import NamedTuple

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


class TensorShares(NamedTuple):
    """Shares of a step that tensor cores are busy, were the clocks never lowered."""

    products: float  # But for those in fp8
    fp8_products: float
    attention: float


class PowerRates(Value):
    """What a GPU's power limit takes from its clocks, where tensor cores are busy for most of the step."""

    share: PositiveFloat  # Of products in the step, from which on they take longer
    slope: PositiveFloat  # Relative time that products take longer, for each share beyond it
    attention_from: PositiveFloat  # The load from which on attention takes longer
    attention_slope: PositiveFloat  # Relative time that it takes longer, for each unit of load beyond
    attention_load: PositiveFloat  # What attention adds to the load, of what 16-bit products add
    fp8_load: PositiveFloat  # What products in fp8 add, likewise

    def slowdown(self, share: float) -> float:
        """Return how much longer products take where they are this share of the step."""
        return 1 + self.slope * max(0.0, share - self.share)

    def load(self, shares: TensorShares) -> float:
        """Return what tensor cores draw in a step: 1.0 where 16-bit products take all of it."""
        return shares.products + self.fp8_load * shares.fp8_products + self.attention_load * shares.attention

    def attention_slowdown(self, shares: TensorShares) -> float:
        """Return how much longer attention takes in a step than alone, where the clocks are highest."""
        return 1 + self.attention_slope * max(0.0, self.load(shares) - self.attention_from)


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
    """Times of operations in a step over those alone; what the power limit adds; the host's seconds."""

    host_of: str
    """GPU of the calibration on whose machine the host's seconds rest."""
    products: PositiveFloat
    products_fp16: PositiveFloat
    products_fp32: PositiveFloat
    grouped: PositiveFloat  # Products of experts' tokens, whose numbers differ
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
