"""User code that trains on "cuda", traced on the virtual GPU.

Device tensors are fake CPU tensors that report ``cuda:0``. Host tensors are real, except a model's
parameters, which are fake and marked.
"""

from trainfit.user.gpu import UserGpu, user_gpu

__all__ = ["UserGpu", "user_gpu"]
