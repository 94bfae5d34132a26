"""``trainfit.watch``: live speed, utilisation and memory of a training loop of one's own. No torch here.

with trainfit.watch(model, gpu="h100-sxm") as w:
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step()
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainfit.api.recipes import Source
from trainfit.spec.result import Estimate

if TYPE_CHECKING:
    from torch import nn

    from trainfit.integrations.meter import Watch

PRINT_EVERY_S = 10.0


def watch(
    model: "nn.Module",
    *,
    gpu: str | None = None,
    prediction: Estimate | Source | None = None,
    flops_per_token: float | None = None,
    seq: int | None = None,
    peak_flops: float | None = None,
    ranks_per_batch: int = 1,
    log: Callable[[dict[str, float], int], object] | None = None,
    log_every: int = 1,
    print_every_s: float | None = PRINT_EVERY_S,
    record: str | Path | None = None,
    name: str | None = None,
) -> "Watch":
    """Return a context manager whose ``step`` is called after each optimizer step of a loop.

    It prints a line every ten seconds and a summary at the end, on standard error and from rank 0.

    Args:
        model: what the loop calls: a module, or what DDP, FSDP, torch.compile or PEFT made of it.
        gpu: a GPU of the catalog, for MFU; None: the one that the model is on.
        prediction: what memory and step are compared with: an Estimate, the file of ``predict --json`` or
            ``trace --json``, or a recipe, which is predicted now.
        flops_per_token: of forward and backward; None: the closed form of a Hugging Face model's type, else
            the prediction's, else 6 a weight of linear layers.
        seq: tokens a sequence, where no forward shows them (a model compiled inside).
        peak_flops: dense peak in FLOP/s, in place of the catalog's for the dtype of the products.
        ranks_per_batch: processes that share a batch (tensor, context and pipeline parallel together).
        log: receives the values by name and the step, of every ``log_every`` steps together, on every rank.
        print_every_s: None: print nothing.
        record: an SQLite file to which rank 0 appends the result.
        name: of the run in the summary and the record; None: the model's class.

    Raises:
        InputError: an unknown GPU, a prediction that cannot be read, a file that is no record file.
    """
    from trainfit.integrations.meter import Watch

    return Watch(
        model,
        gpu=gpu,
        prediction=prediction,
        flops_per_token=flops_per_token,
        seq=seq,
        peak_flops=peak_flops,
        ranks_per_batch=ranks_per_batch,
        log=log,
        log_every=log_every,
        print_every_s=print_every_s,
        record=record,
        name=name,
    )
