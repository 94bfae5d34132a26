"""The bytes that straight-line SASS of Hopper stores in shared memory, traced to the conversions to fp8 that
make them.

A program of registers, bytes of 32 bits each: a conversion makes two bytes, the others move them. What
another instruction writes is unknown (None).
"""

import re
from collections.abc import Iterator

Byte = tuple[int, int] | int | None
"""(number of the conversion, 0 or 1), the constant 0, or unknown."""
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s+([^;]*);")
REGISTER = re.compile(r"\bR(\d+|Z)\b")
SHIFTS = [["RZ", by] for by in ("0x8", "0x10", "0x18")]  # By whole bytes
UNKNOWN: list[Byte] = [None] * 4


class Registers:
    """Bytes of registers, and of local memory, where a thread keeps what its registers do not hold."""

    def __init__(self) -> None:
        self._bytes = dict[str, list[Byte]]()

    def read(self, operand: str) -> list[Byte]:
        found = REGISTER.search(operand)
        if found is None:
            return UNKNOWN
        return [0] * 4 if found[1] == "Z" else self._bytes.get(found[0], UNKNOWN)

    def write(self, operand: str, value: list[Byte], width: int = 1) -> None:
        for name in registers(operand, width):
            self._bytes[name] = value

    def keep(self, address: str, operand: str, width: int) -> None:
        for number, name in enumerate(registers(operand, width)):
            self._bytes[f"{address} {number}"] = self.read(name)

    def restore(self, address: str, operand: str, width: int) -> None:
        for number, name in enumerate(registers(operand, width)):
            self._bytes[name] = self._bytes.get(f"{address} {number}", UNKNOWN)


def registers(operand: str, width: int) -> list[str]:
    found = REGISTER.search(operand)
    if found is None or found[1] == "Z":
        return ["RZ"] * width
    return [f"R{int(found[1]) + number}" for number in range(width)]


def width_of(operation: str) -> int:
    """Return how many registers an operation reads or writes."""
    return 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1


def stored_in_shared(sass: str) -> Iterator[list[Byte]]:
    """Yield the bytes of each store to shared memory."""
    state = Registers()
    for number, (operation, text) in enumerate(INSTRUCTION.findall(sass)):
        operands = [one.strip() for one in text.split(",")]
        name, width = operation.split(".")[0], width_of(operation)
        if name == "STS":
            size = 1 if ".U8" in operation else 2 if ".U16" in operation else 4 * width
            found = [byte for one in registers(operands[-1], width) for byte in state.read(one)]
            yield found[:size]
        elif name == "STL":
            state.keep(operands[0], operands[-1], width)
        elif name == "LDL":
            state.restore(operands[-1], operands[0], width)
        elif REGISTER.match(operands[0]):
            state.write(operands[0], result(number, operation, operands, state), width)


def result(number: int, operation: str, operands: list[str], state: Registers) -> list[Byte]:
    """Return the bytes that an operation writes."""
    if re.match(r"F2FP\.SATFINITE\.E\dM\d.*MERGE_C", operation):
        return [(number, 0), (number, 1), *state.read(operands[3])[:2]]
    if operation == "PRMT" and operands[2].startswith("0x"):
        eight = state.read(operands[1]) + state.read(operands[3])
        return [eight[int(operands[2], 16) >> 4 * place & 7] for place in range(4)]
    if operation.startswith("SHF.R.U32.HI") and operands[1:3] in SHIFTS:
        shift = int(operands[2], 16) // 8
        return state.read(operands[3])[shift:] + [0] * shift
    if operation == "LOP3.LUT" and "0xc0" in operands and operands[2] in ("0xff", "0xffff"):
        size = len(operands[2]) // 2 - 1
        return state.read(operands[1])[:size] + [0] * (4 - size)
    if operation in ("MOV", "IMAD.MOV.U32"):
        return state.read(operands[-1])
    return UNKNOWN
