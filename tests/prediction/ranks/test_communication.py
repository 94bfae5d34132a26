"""Communication: closed forms with published numbers, rings inside and between hosts, bounds of a recipe."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tiny_recipe import tiny_recipe
from trainfit.api.explanation_text import show
from trainfit.catalog.load import gpu
from trainfit.cli import options
from trainfit.cli.main import main
from trainfit.explanation.communication import communication_bound
from trainfit.explanation.peak import explain
from trainfit.flops import layer_times as closed
from trainfit.flops.layer_memory import device_memory, fewest_ranks, most_tokens
from trainfit.flops.layer_times import Layers
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.communication import ring
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import machine_of
from trainfit.prediction.predict import ledger_of
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Batch, Hardware, Parallel, Recipe
from trainfit.spec.units import GIB
from virtual_runs import with_layers

XXL = ["--hidden", "16384", "--feed-forward", "53248", "--blocks", "126"]
"""Stanford CS336, assignment 2, communication accounting."""
Captured = pytest.CaptureFixture[str]


def answers(arguments: list[str], capsys: Captured) -> dict[str, float]:
    assert main(["communication", *XXL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_xxl_example_has_the_numbers_of_its_exercise(capsys: Captured) -> None:
    v5p = ["--gpu", "tpu-v5p", "--fsdp", "16", "--tensor", "4", "--fsdp-axes", "2"]
    found = answers([*v5p, "--peak-flops", "4.6e14", "--link-rate", "1.8e11"], capsys)
    assert found["state_bytes"] == 3276 * GIB
    assert round(found["saved_bytes_per_token"] / GIB, 5) == 0.01634
    assert found["devices_to_hold_states"] == {"95 GB": 38, "95 GiB": 35}
    assert math.ceil(found["compute_bound_tokens"]) == 25_302
    assert round(found["compute_bound_tokens"] / 64) == 395
    assert round(found["overlapped_compute_bound_tokens"] / 64) == 319
    on_h100 = answers(["--gpu", "h100"], capsys)
    assert on_h100["devices_to_hold_states"] == {"80 GB": 44, "80 GiB": 41}
    assert on_h100["compute_bound_tokens"] == 0


def test_the_printed_xxl_example_has_them_too(capsys: Captured) -> None:
    arguments = ["--gpu", "tpu-v5p", "--fsdp", "16", "--tensor", "4", "--fsdp-axes", "2"]
    assert main(["communication", *XXL, *arguments, "--peak-flops", "4.6e14", "--link-rate", "1.8e11"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("3,276 GiB", "38 of 95 GB", "0.01634 GiB", "25,302 tokens 395 a device", "319 a device"):
        assert words in text


def test_a_device_of_the_xxl_example_holds_what_the_course_says(capsys: Captured) -> None:
    """3276/n + 0.002 x batch GB, and n > 34 at 95 GB: 0.002 is half of the blocks' inputs, 0.003845 a token.

    Without recomputation, as the exercise states it, both linears' inputs are kept: 0.01634 / 2 = 0.00817.
    """
    v5p = ["--gpu", "tpu-v5p", "--memory-gib", "95", "--batch", "500,1000", "--sharded", "50%"]
    for recompute, whole_gib, fewest in (("full", 0.0019, (35, 35, 36)), ("none", 0.0082, (35, 37, 38))):
        found: Any = answers([*v5p, "--recompute", recompute], capsys)
        assert [one["devices"] for one in found["fewest_devices"]] == list(fewest)
        assert [one["tokens"] for one in found["fewest_devices"]] == [0, 500, 1000]
        for one in found["device_memory"]:
            assert one["states"] == 3276 * GIB / one["devices"]
            assert one["whole_activations"] / one["tokens"] / GIB == pytest.approx(whole_gib, abs=5e-5)
            assert one["sharded_activations"] * one["devices"] == pytest.approx(one["whole_activations"])
            parts = one["states"] + one["whole_activations"] + one["sharded_activations"]
            assert one["total"] == pytest.approx(parts)
    assert main(["communication", *XXL, *v5p]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "3,276/n + 0.008171 x batch + 0.008171 x batch/n GiB",
        "without activations: from 35 devices",
    ):
        assert words in text


def test_the_fewest_ranks_and_the_largest_batch_are_where_the_memory_ends() -> None:
    layers = Layers(hidden=4096, feed_forward=14336, blocks=32)
    limit = 80 * GIB
    for share, tokens in ((0.5, 100_000), (1.0, 3_000_000), (0.0, 60_000)):
        ranks = fewest_ranks(layers, limit, tokens, share)
        assert ranks is not None
        assert device_memory(layers, ranks, tokens, share).total <= limit
        assert ranks > 1
        assert device_memory(layers, ranks - 1, tokens, share).total > limit
        most = most_tokens(layers, limit, ranks, share)
        assert most >= tokens
        assert device_memory(layers, ranks, most, share).total == pytest.approx(limit)
    assert fewest_ranks(layers, limit, 1_000_000, 0.5) is None  # 0.5 x 1.1 MiB x 1,000,000 on each device
    assert most_tokens(layers, GIB, 8) == 0
    assert fewest_ranks(Layers(hidden=1, feed_forward=1), limit) == 1


def test_what_lowers_the_smallest_batch_does_so_by_what_it_should() -> None:
    layers = Layers(hidden=16384, feed_forward=53248)
    rates: dict[str, Any] = {"flops_per_s": 4.6e14, "data_bytes_per_s": 3.6e11, "tensor_bytes_per_s": 1.8e11}
    mesh = closed.Mesh(data=16, tensor=4, **rates)
    others = [closed.Mesh(data=64 // tensor, tensor=tensor, **rates) for tensor in (1, 2, 4, 8, 16, 32)]
    found = {way.change: way for way in closed.ways_to_lower(layers, mesh, others)}
    now = closed.compute_bound_tokens(layers, mesh)
    assert found["gather in 8 bits"].tokens == pytest.approx(now * 3 / 4)  # 1 + 2 bytes of 2 + 2
    assert found["two pipeline stages"].tokens == pytest.approx(now / 2)
    assert found["overlap"].tokens == pytest.approx(16 * 4.6e14 / 3.6e11)
    best = found["mesh"].mesh
    assert (best.data, best.tensor) == (8, 8)
    assert found["mesh"].tokens == min(closed.compute_bound_tokens(layers, other) for other in others)
    assert all(way.tokens < now for way in found.values())
    # Tensor parallel past its limit: nothing that leaves its traffic helps, another mesh does.
    past = closed.Mesh(data=2, tensor=32, **rates)
    assert [way.change for way in closed.ways_to_lower(layers, past, others)][-1] == "mesh"
    assert closed.ways_to_lower(layers, closed.Mesh(**rates)) == []


def test_batches_and_plots_of_the_layers_memory(tmp_path: Path, capsys: Captured) -> None:
    assert main(["communication", *XXL, "--gpu", "h100", "--batch", "0"]) == 2
    assert "no number of tokens: write --batch 4096 or 1k,4k" in capsys.readouterr().err
    assert main(["communication", *XXL, "--gpu", "h100", "--plot", str(tmp_path / "a.txt")]) == 65
    assert main(["communication", *XXL, "--gpu", "tpu-v5p", "--batch", "4k,4096,1M"]) == 0
    text = capsys.readouterr().out
    assert text.count("4,096 tokens") == 2  # A line and a heading: a batch counts once.
    assert "with 1,000,000 tokens: on no number of devices" in text
    assert "! more than 95 GiB" in text
    drawn = tmp_path / "a.svg"
    assert main(["communication", *XXL, "--gpu", "h100", "--batch", "1k", "--plot", str(drawn)]) == 0
    assert "<svg" in drawn.read_text()


def test_tokens_of_a_batch_are_read_as_those_of_a_sequence(capsys: Captured) -> None:
    for text, tokens in (("8k", options.length("8k")), ("1.5K", 1536), ("1M", 1_000_000), ("500", 500)):
        assert options.token_count(text) == tokens
    for wrong in ("k", "1e16", "1000T", "4kk"):
        assert main(["communication", *XXL, "--gpu", "h100", "--batch", wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) <= 6


def test_a_given_memory_holds_the_states_too(capsys: Captured) -> None:
    given = ["--gpu", "h100", "--memory-gib", "40"]
    found: Any = answers(given, capsys)
    assert found["devices_to_hold_states"] == {"40 GiB": 82}  # 3276 / 40
    assert main(["communication", *XXL, *given]) == 0
    assert "82 of 40 GiB" in capsys.readouterr().out


def test_more_axes_than_the_links_build_are_refused(capsys: Captured) -> None:
    assert main(["communication", *XXL, "--gpu", "h100", "--fsdp", "8", "--fsdp-axes", "2"]) == 2
    assert "links of h100-sxm build 1" in capsys.readouterr().err


def test_closed_bounds_are_where_the_times_are_equal() -> None:
    layers = closed.Layers(hidden=4096, feed_forward=14336)
    rates: dict[str, Any] = {"flops_per_s": 1e15, "data_bytes_per_s": 5e10, "tensor_bytes_per_s": 4.5e11}
    for data, tensor in ((8, 1), (16, 4)):
        mesh = closed.Mesh(data=data, tensor=tensor, **rates)
        tokens = closed.compute_bound_tokens(layers, mesh)
        one = closed.layer_time(layers, mesh, tokens)
        assert one.compute_s == pytest.approx(one.data_s + one.tensor_s)
        tokens = closed.compute_bound_tokens(layers, mesh, overlapped=True)
        one = closed.layer_time(layers, mesh, tokens)
        assert one.compute_s == pytest.approx(one.data_s)
    # FSDP and data parallel alone: C / W tokens a device, whatever the sizes.
    assert closed.compute_bound_tokens(layers, closed.Mesh(data=8, **rates)) / 8 == pytest.approx(1e15 / 5e10)
    most = closed.most_tensor_ranks(layers, closed.Mesh(**rates))
    for tensor, bound in ((math.floor(most), False), (math.ceil(most), True)):
        tokens = closed.compute_bound_tokens(layers, closed.Mesh(data=2, tensor=tensor, **rates))
        assert math.isinf(tokens) is bound


def test_a_ring_between_hosts_uses_the_port_of_each_of_its_gpus() -> None:
    h100 = gpu("h100-sxm")
    assert ring(8, 8, h100)[::2] == (450e9, False)
    assert ring(16, 16, h100)[::2] == (400e9, True)  # 8 ports of 50 GB/s a host, below NVLink's rate
    assert ring(2, 9, h100).bytes_per_s == 50e9  # Replicas: one GPU of each host
    assert ring(4, 13, h100).bytes_per_s == 100e9
    assert ring(16, 16, gpu("a100-sxm4-80gb")).bytes_per_s == 200e9
    assert ring(16, 16, gpu("rtx-4090")).bytes_per_s == 31.5e9  # PCI Express is slower than two ports.
    assert ring(64, 64, gpu("tpu-v5p"))[::2] == (200e9, False)


def recipe(count: int, **fields: object) -> Recipe:
    return tiny_recipe("native", 2, hardware=Hardware(gpu="h100-sxm", count=count), **fields)


def test_nodes_decide_which_groups_leave_a_host() -> None:
    two = recipe(8).model_copy(update={"hardware": Hardware(gpu="h100-sxm", count=8, nodes=2)})
    assert {
        one.between_hosts
        for one in estimate(recipe(8), machine_of(recipe(8).hardware), ledger_of(recipe(8))).traffic
    } == {False}
    found = estimate(two, machine_of(two.hardware), ledger_of(two))
    assert {one.between_hosts for one in found.traffic} == {True}
    assert any("4 GPUs a host" in line for line in found.assumptions)
    assert machine_of(Hardware(gpu="h100", count=16)).gpu.gpus_per_host == 8


def test_nodes_that_do_not_divide_the_gpus_are_refused_and_others_are_another_recipe() -> None:
    fields = {"model": {"config": "llama-3.2-1b"}, "hardware": {"gpu": "h200", "count": 8, "nodes": 3}}
    with pytest.raises(InputError, match=r"hardware\.nodes"):
        recipe_from(fields)
    assert recipe(8).model_copy(update={"hardware": Hardware(count=8, nodes=1)}).id != recipe(8).id


def test_a_step_takes_at_least_its_collectives_at_the_links_full_rate() -> None:
    """Tiny computation: the lower bound is the communication's, between hosts each GPU on its own port."""
    parallel = Parallel(replicate=2, shard=8)
    one = recipe(16, parallel=parallel)
    ledger = ledger_of(one)
    found = estimate(one, machine_of(one.hardware), ledger)
    reduced = next(t for t in found.traffic if t.kind == "all_reduce")
    assert reduced.between_hosts
    assert found.bounds["step_s"].low >= reduced.bytes_sent / 50e9 > 0
    assert found.step_s is not None
    assert found.bounds["step_s"].low < found.step_s


def test_the_smallest_compute_bound_batch_is_where_computation_takes_as_long(capsys: Captured) -> None:
    # Large enough that twice the batch takes longer: tiny operations take their launch.
    one = recipe_from(
        {
            "model": {"config": with_layers("llama-3.2-1b", 2), "implementation": "native"},
            "batch": {"micro": 1, "seq": 512},
            "hardware": {"gpu": "h100-sxm", "count": 16},
        }
    )
    found = communication_bound(one, machine_of(one.hardware), ledger_of(one))
    assert found is not None
    assert found.tokens == 16 * one.batch.tokens
    assert found.is_bound
    assert found.compute_bound_tokens is not None
    micro = math.ceil(1.2 * found.compute_bound_tokens / (16 * one.batch.seq))
    larger = one.model_copy(update={"batch": Batch(micro=micro, seq=one.batch.seq)})
    again = communication_bound(larger, machine_of(larger.hardware), ledger_of(larger))
    assert again is not None
    assert not again.is_bound
    time = estimate(one, machine_of(one.hardware), ledger_of(one)).time
    assert time is not None
    assert sum(phase.exposed_s for phase in found.phases) == pytest.approx(time.communication_s, rel=1e-6)
    assert again.compute_bound_tokens == pytest.approx(found.compute_bound_tokens, rel=0.15)
    show(one, explain(one), 1)
    text = " ".join(capsys.readouterr().out.split())
    assert "Communication-bound at 512 tokens a GPU; compute-bound from" in text
    assert communication_bound(recipe(1), machine_of(recipe(1).hardware), Ledger()) is None
