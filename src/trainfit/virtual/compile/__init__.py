"""torch.compile on the virtual GPU.

Dynamo captures, AOTAutograd partitions, and Inductor lowers, schedules and writes its program, as on CUDA.
The program runs on fake tensors instead of being compiled: buffers are allocations, fused kernels operations.
"""

from trainfit.virtual.compile.compiler import VirtualCompiler

__all__ = ["VirtualCompiler"]
