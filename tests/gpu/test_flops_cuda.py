"""On a CUDA GPU: FLOPs of a real step as torch's own counter counts them, against the virtual GPU's ledger,
op by op."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainfit.prediction.trace import trace
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.step import assemble

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


MODEL = {"math": "smollm-135m", "eager": "smollm-135m", "flash": "pythia-160m"}
"""torch's counter refuses flash attention with grouped key heads (smollm has them)."""


@pytest.mark.parametrize("attention", ["math", "flash", "eager"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ledger_counts_what_torch_counts_on_cuda(attention: str, recompute: str) -> None:
    wanted = recipe_from(
        {
            "model": {"config": MODEL[attention]},
            "batch": {"micro": 2, "seq": 128},
            "attention": attention,
            "recompute": recompute,
        }
    )
    step = assemble(wanted, torch.device("cuda"))
    batches = step.random_batches()
    step(batches)
    with FlopCounterMode(display=False) as counter:
        step(batches)
    torch_counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items() if flops}
    ledger = trace(wanted)
    ours: dict[str, float] = {}
    for op in ledger.ops:
        if ledger.segments[op.segment].step == "steady" and op.flops:
            name = op.name.rpartition(".")[0]
            ours[name] = ours.get(name, 0) + ledger.times(op) * op.flops
    assert ours == torch_counts
