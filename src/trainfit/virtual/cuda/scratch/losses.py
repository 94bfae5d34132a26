"""Scratch of losses and softmax; contiguous cross-entropy (``_log_softmax``, ``nll_loss``) takes none.

Sources: aten/src/ATen/native/Loss.cpp, BinaryOps; aten/src/ATen/native/cuda/SoftMax.cu, NLLLoss2d.cu,
Loss.cu.
"""

from trainfit.virtual.cuda.scratch.call import Call, Registry, copy_if_strided, num_bytes

SCRATCH: Registry[tuple[int, ...]] = Registry()


@SCRATCH.rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
def reduced_loss(call: Call) -> tuple[int, ...]:
    """The elementwise loss (Loss.cpp: ``Tensor loss``), which is the output with reduction 0."""
    name, source = call.name, call.args[0]
    position = 3 if name == "aten::binary_cross_entropy" else 2
    return () if call.arg(position, "reduction", 1) == 0 else (num_bytes(source),)


@SCRATCH.rule("_softmax", "_log_softmax", "nll_loss_forward", "nll_loss2d_forward")
def softmax(call: Call) -> tuple[int, ...]:
    """A copy of a strided input (SoftMax.cu host_softmax, NLLLoss)."""
    return copy_if_strided(call.args[0])


@SCRATCH.rule("_log_softmax_backward_data")
def log_softmax_backward(call: Call) -> tuple[int, ...]:
    """Copies of strided grad and output (SoftMax.cu host_softmax_backward)."""
    return copy_if_strided(call.args[0], call.args[1])


@SCRATCH.rule("_softmax_backward_data")
def softmax_backward(call: Call) -> tuple[int, ...]:
    """``grad * output`` (SoftMax.cu softmax_backward_cuda_out), and a copy of a strided output."""
    return (num_bytes(call.args[0]), *copy_if_strided(call.args[1]))


@SCRATCH.rule("_safe_softmax")
def safe_softmax(call: Call) -> tuple[int, ...]:
    """Booleans of -inf scores and of rows of -inf alone (SoftMax.cpp ``_safe_softmax``)."""
    x, dim = call.args[0], call.args[1]
    return (*copy_if_strided(x), x.numel(), x.numel() // max(1, x.shape[dim]))
