"""``torch.cuda``, ``torch.accelerator`` and related modules on the virtual GPU."""

from trainfit.user.torch_cuda.memory_stats import MemoryStats
from trainfit.user.torch_cuda.module import cuda_module
from trainfit.user.torch_cuda.streams import Streams

__all__ = ["MemoryStats", "Streams", "cuda_module"]
