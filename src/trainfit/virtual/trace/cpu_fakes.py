"""Fake tensors on the CPU, in every build of PyTorch alike."""

from torch._subclasses.fake_tensor import FakeTensorMode


class CpuFakeMode(FakeTensorMode):
    """A mode whose fake tensors are all on the CPU, as the virtual GPU's are.

    PyTorch's own mode also prepares for fakes on a GPU. In a CUDA build that sees no GPU it replaces, for the
    whole process, the guard of CUDA devices by one that counts eight. The next backward, even a real one on
    the CPU, then starts a thread for each, and a fork of the process cannot run a backward any more.
    """

    @property
    def avoid_device_init(self) -> bool:
        """Return False: there is no device to avoid."""
        return False
