"""The space of a search: what its options keep on every GPU."""

from typing import Any

from planned_recipe import recipe
from trainfit.planning.search.space import offered


def test_the_least_bytes_of_what_a_mesh_keeps_on_every_gpu() -> None:
    """Of 8B parameters with bf16 weights: what is gathered or reduced whole, and shards of both."""

    def least(fields: dict[str, Any], **of_recipe: Any) -> float:
        own = recipe(**{"hardware": {"gpu": "h200", "count": 16}, **of_recipe})
        (option,) = (one for one in offered(own) if dict(one.values) == fields)
        return option.least_bytes(8 * 10**9, 2 * 10**9) / 1e9

    kept = {"parallel.reshard_after_forward": False}
    assert least({"loss": "fused"}) == 0
    assert least(kept) == 16
    assert least({**kept, "parallel.sync_each_batch": False}) == 20
    assert least({"parallel.replicate": 2, "parallel.shard": 8}) == 20 / 8
    assert least({"parallel.strategy": "ddp"}) == 20
    assert least({"parallel.strategy": "ddp"}, precision="mixed-bf16") == 40
    assert least(kept, parallel={"tensor": 2}) == 0
    # What divides whole weights is not refused for them.
    assert least({"parallel.tensor": 2}, parallel={"strategy": "ddp"}) == 0
