"""A person's own training code on the virtual GPU: it says "cuda", and gets fake tensors that are followed.

``user_gpu`` is the door. Inside, device tensors are fake CPU tensors that say they are on ``cuda:0``; host tensors
are real, except the parameters of a model that is built on the host: those are fake as well, and marked.
"""

from trainfit.virtual.user.gpu import UserGpu, user_gpu

__all__ = ["UserGpu", "user_gpu"]
