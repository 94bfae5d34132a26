"""Constants of predictions that were fitted or measured, from constants.toml.

Those of one GPU are columns of gpus.toml, and those of a step are in rates.toml.
"""

import functools

from trainfit.catalog.fitted import fitted_table
from trainfit.catalog.load import FOLDER
from trainfit.spec.hardware import PositiveFloat, Share
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import PositiveInt, Seconds, Value

FILE = FOLDER / "constants.toml"


class FixedSeconds(Value):
    """Part of an operation's time that its size does not change."""

    product: Seconds
    attention: Seconds
    other: Seconds


class OperationConstants(Value):
    """How rows of a calibration give the time of another operation (prediction/time/op_times.py)."""

    nearest: PositiveInt
    close: PositiveFloat
    far: PositiveFloat
    fixed_s: FixedSeconds
    latency: Share
    reached: Share
    copied: Share
    tiles: tuple[tuple[PositiveInt, PositiveInt, PositiveFloat], ...]
    partial: PositiveInt
    long: PositiveInt
    attention_tiles: dict[str, tuple[PositiveInt, PositiveInt]]
    unlike: PositiveFloat
    other_kind: PositiveFloat
    not_faster_bytes: int


class ExpertConstants(Value):
    """Tiles of PyTorch's grouped product (prediction/time/experts.py)."""

    few: PositiveInt
    rows_if_few: PositiveInt
    rows: PositiveInt
    epilogue: PositiveInt


class ShareConstants(Value):
    """Shares of the data sheet where nothing alike was timed."""

    fp8: Share
    unknown: Share
    tile_filters: PositiveInt
    attention_masked: Share
    attention_unmeasured: Share


class PaddingConstants(Value):
    """When Inductor pads a product (virtual/compile/pad_matmul.py)."""

    machine_balance: PositiveFloat
    aligned: Share
    even: Share
    odd: Share
    odd_output: Share
    copy_share: Share
    transposing_copy: Share
    near: PositiveFloat


class HostConstants(Value):
    """Facts of the host that are not rates (rates.toml has those)."""

    operation_s: Seconds
    recomputed_operation_s: Seconds
    slowest: PositiveFloat
    queue: PositiveInt


class MemoryConstants(Value):
    """The device's memory."""

    margin: Share


class CompileConstants(Value):
    """Seconds of torch.compile (prediction/compilation.py)."""

    process_s: Seconds
    start_s: Seconds
    kernel_s: Seconds
    low: PositiveFloat
    high: PositiveFloat
    basis: str


class Constants(Value):
    """The values of constants.toml; the file says what each is, and what it was fitted to."""

    operations: OperationConstants
    experts: ExpertConstants
    shares: ShareConstants
    padding: PaddingConstants
    host: HostConstants
    memory: MemoryConstants
    compile: CompileConstants


@functools.cache
def constants() -> Constants:
    """Return the values by name."""
    return parse(Constants, fitted_table(FILE).values, file=FILE.name)
