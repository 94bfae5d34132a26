"""Private names of bitsandbytes: what it remembers of a GPU."""

from trainfit.spec.private_names import entry

# fmt: off
BITSANDBYTES = (
    entry(
        # Absent before 0.50, and called only where a GPU runs a kernel of bitsandbytes' own.
        "bitsandbytes.backends.cuda.ops:_gpu_dispatch_props", "bitsandbytes' kernels without a GPU",
        "(device_index)", "absent",
    ),
    entry(
        # Its module cannot be imported in a CPU build; in a trace it is the virtual GPU's own function.
        "bitsandbytes.backends.cuda.ops:_get_raw_stream", "bitsandbytes' kernels without a GPU",
        "builtin", "absent", "(device=)",
    ),
    entry("bitsandbytes.functional:CUBLAS_Context._instance", "bitsandbytes' kernels without a GPU", "value"),
    entry(
        "bitsandbytes.functional:GlobalPageManager._instance", "bitsandbytes' kernels without a GPU", "value",
    ),
    entry("bitsandbytes.functional:name2qmap", "bitsandbytes' kernels without a GPU", "dict"),
)
