"""Units: everything inside is bytes, seconds and FLOPs; these convert only for printing.

GiB is 2**30 bytes, GB is 10**9 bytes.
"""

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12


def format_bytes(num_bytes: float) -> str:
    """A size for people, in binary units: ``57.32 GiB``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """A count for people, in decimal units: ``8.03 B`` is 8.03e9."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def format_flops(flops: float) -> str:
    """FLOPs for people: ``215.2 TFLOP``."""
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if abs(flops) >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops:.0f} FLOP"


def format_seconds(seconds: float) -> str:
    """A duration for people: ``431 ms``, ``2 h 05 min``, ``70 d 06 h``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400):,} d {int(seconds % 86400 // 3600):02d} h"
