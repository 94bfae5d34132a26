"""Figures in sentences on busy GPUs, generation and memories are those of the records."""

from evidence.scripts.tables import bench, generation
from evidence.scripts.tables.joined import join, records
from page_claims import check
from trainfit.bench.workloads import pointer_chase
from trainfit.catalog.load import gpu
from trainfit.spec.units import GIB, KIB, MIB

BUSY, GENERATION = "docs/tasks/busy.md", "evidence/pages/generation.md"
HIERARCHY = "evidence/pages/memory-hierarchy.md"


def best_mfu(model: str) -> float:
    """Return the highest MFU measured of a plan's recipes on one H100, in %."""
    peak = gpu("h100-sxm").peak_flops_per_s["bf16"]
    pairs = join(records(f"plan-choices/*-{model}-free-h100-sxm.jsonl"))
    shares = [
        pair.predicted.model_flops / pair.measured.step_s / peak
        for pair in pairs
        if pair.predicted and pair.measured and pair.measured.step_s and pair.recipe.precision == "bf16"
    ]
    return 100 * max(shares)


def test_the_mfu_that_plans_reach() -> None:
    models = ("llama-3.2-1b", "qwen3-4b", "llama-3.1-8b")
    pattern = r"reach # % MFU in bf16 for Llama 3.2 1B, # % for Qwen3 4B and # % for Llama 3.1 8B"
    check(BUSY, pattern, map(best_mfu, models))


def test_generation() -> None:
    found = {(row.point["batch"], row.point["body"]): row.numbers for row in generation.rows()}
    ours, theirs = ([numbers for (_, body), numbers in found.items() if body == name]
                    for name in ("trainfit", "transformers"))  # fmt: skip
    mfu = [100 * float(found[batch, "trainfit"]["mfu_share"]) for batch in (1, 64)]
    check(BUSY, r"is # % MFU for one sequence and # % for 64", mfu)
    check(GENERATION, r"for one token, at # % MFU", mfu[:1])
    milliseconds = [[1e3 * float(one["a_step_s"]) for one in some] for some in (theirs, ours)]
    check(GENERATION, r"spends # to # ms a step from batch 1 to 256, and trainfit # to # ms",
          [edge(some) for some in milliseconds for edge in (min, max)])  # fmt: skip
    shares = [100 * float(one["mbu_share"]) for one in ours]
    check(GENERATION, r"must read take # to # % of it", (min(shares), max(shares)))


def test_the_edges_of_caches() -> None:
    found = bench.newest("gpu", "chase")
    assert found is not None
    ns = pointer_chase.global_latencies(found.rows)
    check(HIERARCHY, r"a load takes # ns in 208 KiB, # ns in 224 KiB and # ns in 512 KiB",
          [ns[size * KIB] for size in (208, 224, 512)])  # fmt: skip
    check(HIERARCHY, r"from # ns in 16 MiB to # ns in 1 GiB", (ns[16 * MIB], ns[GIB]))
    some = [ns[size] for size in sorted(ns) if size >= 16 * MIB]
    assert some == sorted(some)
    assert pointer_chase.edge("L1", ns) == 208 * KIB
