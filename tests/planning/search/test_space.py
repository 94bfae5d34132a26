"""The space of a search: what its options keep on every GPU, and offers of any value."""

from typing import Any

import pytest

from planned_recipe import recipe
from trainfit.api.plans import plan_recipe
from trainfit.planning.search.space import offered, space
from trainfit.spec.errors import InputError
from trainfit.techniques import registry
from trainfit.techniques.base import Data, Offer, Technique


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


def offering(monkeypatch: pytest.MonkeyPatch, *several: Data) -> None:
    own = registry.in_order()
    more = Technique(name="more", order=999, title="More", offers=lambda _: map(Offer, several))
    monkeypatch.setattr(registry, "in_order", lambda: (*own, more))


def test_offers_may_hold_mappings_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: Data = {"recompute": {"selective": {"save": ["attention"]}}}
    offering(monkeypatch, saved, {**saved, "optimizer": {"name": "adamw8bit"}}, {"loader": ["a"]})
    found = space(recipe(), keep_quality=False)
    assert list(found.levels) == ['"none"', '"full"', '"selective"', '{"selective": {"save": ["attention"]}}']
    assert len({*found.options, *found.levels.values()}) == len(found.options) + len(found.levels)
    planned = plan_recipe(recipe(), (), vary=("recompute",), processes=0)
    choices = [
        *(one.choice for one in planned.rejected),
        *(each for one in planned.found for each in one.changes),
    ]
    assert 'recompute: {"selective": {"save": ["attention"]}}' in choices


def test_an_offer_of_a_field_that_recipes_lack_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(monkeypatch, {"optimizer": {"betas": [0.8, 0.9]}})
    with pytest.raises(InputError, match=r"optimizer\.betas: a technique offers it"):
        space(recipe(), keep_quality=False)


def test_fp8_offers_scaling_and_sums_with_the_kernels_that_they_need() -> None:
    kernels = {"block_kernels": "fp8", "compile": "block"}
    wanted: list[tuple[Data, bool]] = [
        ({"accumulation": "fused"}, True),
        ({"fp8_scaling": "delayed"}, False),
        ({"accumulation": "fused", "fp8_scaling": "delayed"}, False),
    ]
    own = recipe(precision="fp8", batch={"micro": 1, "seq": 512, "accumulate": 4})
    by_quality = {keeps: space(own, keep_quality=keeps).options for keeps in (False, True)}
    for fields, keeps_quality in wanted:
        values = {**fields, **kernels}
        found = {keeps: [one for one in of if dict(one.values) == values] for keeps, of in by_quality.items()}
        (option,) = found[False]
        assert option.is_slow
        assert bool(option.numerics) is not keeps_quality
        assert bool(found[True]) is keeps_quality
    in_bf16 = [dict(one.values) for one in space(recipe(precision="bf16"), keep_quality=False).options]
    assert {"accumulation": "fused"} in in_bf16
    assert not any("fp8_scaling" in values for values in in_bf16)


def test_copy_engines_are_offered_where_gpus_of_a_host_are_linked() -> None:
    def offers_them(gpu: str, count: int, **fields: Any) -> bool:
        own = recipe(hardware={"gpu": gpu, "count": count}, **fields)
        return any(("parallel.copy_engines", True) in option.values for option in offered(own))

    assert offers_them("h200", 2, precision="bf16")
    assert not offers_them("h200", 2, precision="bf16-master")  # Refused with mixed precision.
    assert not offers_them("h200", 16, precision="bf16")  # Two hosts.
    assert not offers_them("rtx-4090", 2, precision="bf16")  # PCIe.
    assert not offers_them("h200", 1, precision="bf16")
