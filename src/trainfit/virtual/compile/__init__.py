"""torch.compile on the virtual GPU.

Dynamo captures, AOTAutograd differentiates and partitions, and Inductor lowers, schedules and writes its
program, all as on CUDA. Nothing is compiled to machine code: the program runs on fake tensors. Each of its
buffers is an allocation, each ``del`` a free, and each fused kernel an operation. So fusion, saved tensors,
recomputation and buffer reuse are Inductor's decisions.
"""

from trainfit.virtual.compile.compiler import VirtualCompiler

__all__ = ["VirtualCompiler"]
