"""torch.compile on the virtual GPU.

PyTorch's own compiler runs: Dynamo captures, AOTAutograd differentiates and partitions, Inductor lowers and schedules
for the virtual GPU and writes its program. Nothing is compiled to machine code: the program itself runs on the virtual
GPU. Each buffer that it makes is an allocation, each ``del`` a free, each fused kernel an operation of the bytes that
it reads and writes. So what is fused, saved, recomputed and reused in place is Inductor's decision.
"""

from trainfit.virtual.compile.compiler import VirtualCompiler

__all__ = ["VirtualCompiler"]
