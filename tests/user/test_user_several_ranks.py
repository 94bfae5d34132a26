"""``trainfit.trace`` with a world size: DDP, FSDP2, tensor parallel and the Trainer, each as rank 0 of N."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as distributed_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import _random as random
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.models.build import build_model
from trainfit.models.layers import decoder_blocks
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from user_training import MIB
from virtual_runs import with_layers

N = 1024
MATRIX = 4 * MIB  # Bytes of one of the model's four matrices in fp32
ROWS = 8
WORKSPACES = 2 * 32 * MIB  # Of the cuBLAS handles of the forward and the backward on an H200
LOSS = 512  # The allocator's smallest block
BATCH = 4 * ROWS * N


def four_matrices() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(N, N, bias=False) for _ in range(4)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> None:
    for _ in range(num_steps):
        loss = model(torch.randn(ROWS, N, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sent(found: Estimate) -> dict[str, tuple[int, int]]:
    """Return calls and bytes by kind of collective."""
    return {one.kind: (one.calls, one.bytes_sent) for one in found.traffic}


def train_with_batch_norm(synced: bool) -> None:
    dist.init_process_group("nccl")
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(64))
    if synced:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 3, 64, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_batch_norm_over_all_ranks() -> None:
    """SyncBatchNorm gathers means, deviations and a count, and reduces two sums a channel in the backward."""
    plain, synced = (
        trainfit.trace(lambda synced=synced: train_with_batch_norm(synced), gpu="h200", world_size=2)
        for synced in (False, True)
    )
    gathers, reductions = sent(synced)["all_gather"], sent(synced)["all_reduce"]
    assert gathers == (2, 2 * 4 * (2 * 64 + 1))
    assert reductions[0] == sent(plain)["all_reduce"][0] + 2
    assert reductions[1] == sent(plain)["all_reduce"][1] + 2 * 4 * 2 * 64
    assert synced.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.02)


def ddp_worker(rank: int, world_size: int) -> None:
    """Train as PyTorch's tutorial does; ``torch.multiprocessing.spawn`` starts it."""
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 2, "nccl")
    model = DistributedDataParallel(four_matrices().to(rank), device_ids=[rank], bucket_cap_mb=8)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dist.destroy_process_group()


def ddp_script() -> None:
    world_size = torch.cuda.device_count()
    torch.multiprocessing.spawn(ddp_worker, args=(world_size,), nprocs=world_size)  # pyright: ignore


def test_ddp_takes_weights_gradients_and_buckets() -> None:
    found = trainfit.trace(ddp_script, world_size=2)
    weights = gradients = buckets = 4 * MATRIX
    assert found.num_gpus == 2
    assert found.params == 4 * N * N
    assert found.phases.after_init == weights + buckets + BATCH
    steady = found.phases.steady
    assert steady.optimizer == weights + gradients + buckets + WORKSPACES + LOSS
    # The first step's: all gradients and one bucket of them; gradients of two outputs, the loss.
    assert found.peak_phase == "first.backward"
    assert found.peak_allocated_bytes == weights + gradients + buckets + WORKSPACES + 2 * BATCH + 2 * LOSS
    # The second step's: two of four gradients, the first buckets and the rebuilt ones; inputs of three
    # layers, gradients of two outputs, the loss and its gradient.
    outputs = (3 + 2) * BATCH + 2 * LOSS
    peaks = found.two_peaks
    assert peaks is not None
    assert peaks.expected.allocated == found.peak_allocated_bytes
    assert peaks.possible.allocated == weights + gradients // 2 + 2 * buckets + WORKSPACES + outputs
    words = " ".join(str(found).split())
    assert "possible " in words
    assert "NCCL may hold DDP's first buckets into the second backward" in words
    assert "at the expected peak (first step, backward)" in words
    assert sent(found) == {"all_reduce": (2, gradients)}  # A ring over two sends each byte once.
    assert "each of 2 x h200" in str(found)
    assert "on 2 x h200" in str(found)
    assert "each of 2 x h200" in found._repr_html_()


def fsdp_script() -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size() if dist.is_initialized() else 2,))
    model = four_matrices()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(ROWS, N, device="cuda")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_fsdp2_takes_half_of_every_state_and_gathers_two_layers() -> None:
    found = trainfit.trace(fsdp_script, world_size=2)
    shard = 4 * MATRIX // 2
    assert found.params == 4 * N * N
    assert found.phases.after_init == shard + BATCH
    # Weights, gradients, two moments, and as much of the update's temporary tensors.
    update = 5 * shard + WORKSPACES
    assert 0 <= found.phases.steady.optimizer - update <= 8 * LOSS
    assert found.breakdown.gradients == found.breakdown.weights == shard
    # In bf16 a layer's parameters, the next one's, and the buffer that these are gathered into.
    gathered = 3 * MATRIX // 2
    activations = found.phases.steady.forward - (3 * shard + gathered + WORKSPACES)
    assert 0 <= activations <= 8 * BATCH
    calls = sent(found)
    assert calls["all_gather"] == (8, 8 * MATRIX // 2 // 2)
    assert calls["reduce_scatter"] == (4, 4 * MATRIX // 2)
    assert calls["all_reduce"][0] == 1  # the norm


def tensor_script() -> None:
    mesh = init_device_mesh("cuda", (2,))
    plan: dict[str, Any] = {str(n): ColwiseParallel() if n % 2 == 0 else RowwiseParallel() for n in range(4)}
    model = parallelize_module(four_matrices().cuda(), mesh, plan)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_tensor_parallel_reduces_each_pair_of_layers() -> None:
    found = trainfit.trace(tensor_script, world_size=2)
    assert found.phases.after_init == 4 * MATRIX // 2 + BATCH
    # In the forward both pairs, in the backward the second one: the first one's input has no gradient.
    assert sent(found) == {"all_reduce": (3, 3 * BATCH)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_script_equals_the_recipe_to_the_byte(strategy: str) -> None:
    recipe = Recipe.model_validate({
        "model": {"config": with_layers("tiny-llama-demo", 2)}, "batch": {"micro": 2, "seq": 128},
        "precision": "mixed-bf16" if strategy == "fsdp" else "fp32", "hardware": {"count": 2},
        "parallel": {"strategy": strategy},
    })  # fmt: skip

    def script() -> None:
        dist.init_process_group("nccl")
        model: Any = build_model(recipe.model, dtype=torch.float32, device="cuda")
        if strategy == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=25, broadcast_buffers=False)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in decoder_blocks(model):
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            tokens = torch.randint(0, 100, (2, 128)).cuda()
            labels = tokens.clone()
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, tokens, labels

    traced = trainfit.trace(script, world_size=2)
    expected = trainfit.predict(recipe, use_cache=False)
    tokens = 2 * 8 * 2 * 128  # and labels; they come after a recipe's init
    assert traced.phases.after_init == expected.phases.after_init + tokens
    assert (traced.phases.first, traced.phases.steady) == (expected.phases.first, expected.phases.steady)
    assert traced.breakdown == expected.breakdown
    for field in (
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "peak_device_bytes",
        "traffic",
        "model_flops",
    ):
        assert getattr(traced, field) == getattr(expected, field), field


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "use_cache": False,
}  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(64)
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: Any, **options: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, bf16=True, report_to=[],
        save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    assert arguments.world_size == 2
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


def test_the_trainer_runs_under_ddp_and_under_fsdp2(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = trainfit.trace(lambda: trainer(tmp_path), world_size=2, steps=2)
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    argument = trainfit.trace(
        lambda: trainer(tmp_path, fsdp="full_shard auto_wrap", fsdp_config=wrapped), world_size=2, steps=2
    )
    assert "ACCELERATE_USE_FSDP" not in os.environ  # TrainingArguments sets it.
    for name, value in {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    variables = trainfit.trace(lambda: trainer(tmp_path), world_size=2, steps=2)
    assert ddp.params == argument.params == variables.params == 2 * 1024 * 64 + 2 * (40960 + 128) + 64
    assert argument.phases == variables.phases
    # All dimensions are even; the rest is rounding to blocks of 512 bytes, and rotary frequencies.
    for category in ("weights", "optimizer"):
        half = getattr(ddp.breakdown, category) / 2
        assert getattr(argument.breakdown, category) == pytest.approx(half, abs=32 * 512)
    weights = 4 * ddp.params
    assert ddp.breakdown.communication == pytest.approx(weights, abs=4096)  # one bucket
    assert sent(ddp)["all_reduce"][1] >= weights
    # Of the embedding, two layers, the norm and the head, reduced in bf16.
    assert sent(argument)["reduce_scatter"] == (4, weights // 2 // 2)


def collectives() -> None:
    dist.init_process_group()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [os.environ[name] for name in names] == ["0", "0", "16", "8"]
    assert torch.cuda.device_count() == 8
    objects: list[Any] = [None] * 16
    dist.all_gather_object(objects, {"loss": 1.0})
    assert objects == [{"loss": 1.0}] * 16
    dist.broadcast_object_list(objects)
    dist.barrier()
    host = torch.ones(2)
    dist.all_reduce(host)
    sizes = torch.empty(16, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(sizes, torch.tensor([7]).cuda())
    assert sizes.tolist() == [7] * 16
    neighbours = dist.new_group([0, 1])
    model = nn.Linear(N, N, bias=False).cuda()
    model(torch.randn(ROWS, N, device="cuda")).sum().backward()
    assert model.weight.grad is not None
    work = dist.all_reduce(model.weight.grad, async_op=True)
    assert work is not None
    assert work.is_completed()  # Code that polls it ends.
    dist.all_reduce(model.weight.grad, group=neighbours)


def test_ranks_of_two_hosts_see_torchruns_environment_which_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "5")
    found = trainfit.trace(collectives, world_size=16)
    assert [(one.num_ranks, one.between_hosts) for one in found.traffic] == [(16, True), (2, False)]
    assert os.environ["RANK"] == "5"
    assert "LOCAL_WORLD_SIZE" not in os.environ
    assert not dist.is_initialized()


def test_nodes_decide_which_collectives_leave_a_host() -> None:
    def run() -> None:
        dist.init_process_group()
        model = nn.Linear(N, N, bias=False).cuda()
        model(torch.randn(ROWS, N, device="cuda")).sum().backward()
        dist.all_reduce(model.weight.grad)  # pyright: ignore[reportArgumentType]
        assert os.environ["LOCAL_WORLD_SIZE"] == str(torch.cuda.device_count())

    for nodes, leaves, warned in ((None, True, False), (4, True, False), (1, False, True)):
        found = trainfit.trace(run, gpu="h100-sxm", world_size=16, nodes=nodes)
        assert [one.between_hosts for one in found.traffic] == [leaves]
        assert any("16 GPUs in a host, and hosts of h100-sxm have 8" in w for w in found.warnings) is warned
    for ranks, words in ((16, "16 ranks cannot be shared equally by 3 nodes"), (None, "one process cannot")):
        with pytest.raises(InputError, match=words):
            trainfit.trace(run, world_size=ranks, nodes=3)


def with_group(then: Any) -> Any:
    def run() -> None:
        dist.init_process_group("nccl")
        then()

    return run


REFUSED: dict[str, tuple[Any, str]] = {
    "send": (lambda: dist.send(torch.ones(2, device="cuda"), 1), "only rank 0 runs"),
    "receive on the host": (lambda: dist.recv(torch.ones(2), 1), "only rank 0 runs"),
    "store": (lambda: dist.TCPStore("127.0.0.1", 0, 2, True), "waits for the others"),
    "hook": (
        lambda: DistributedDataParallel(four_matrices().cuda()).register_comm_hook(None, print),
        "communication hooks",
    ),
    "fsdp1": (
        lambda: FullyShardedDataParallel(four_matrices().cuda()),
        "FSDP1.*fully_shard.*FSDP version 2",
    ),
    "offload": (
        lambda: fully_shard(four_matrices(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "offload of parameters",
    ),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_one_rank_cannot_serve_ends_in_one_line(way: str) -> None:
    run, words = REFUSED[way]
    with pytest.raises(InputError, match=words) as refused:
        trainfit.trace(with_group(run), world_size=2)
    assert "\n" not in str(refused.value)
    assert not dist.is_initialized()


def test_another_world_size_in_the_code_names_the_option() -> None:
    def setup() -> None:
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:1", rank=3, world_size=4)

    with pytest.raises(InputError, match="--world-size 4"):
        trainfit.trace(setup, world_size=2)
    with pytest.raises(InputError, match="at least one rank"):
        trainfit.trace(setup, world_size=0)


def train_from_meta(seeded: bool) -> None:
    """As torchtitan builds: on meta, sharded, then initialised shard by shard."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    if seeded:
        random.manual_seed(1, mesh)
    with torch.device("meta"):
        model = four_matrices()
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        (nn.init.trunc_normal_ if seeded else nn.init.zeros_)(parameter)
    if seeded:
        assert distributed_tensor.randn(8, 8, device_mesh=mesh).to_local().is_cuda
        assert random._rng_tracker is not None
    train(model, torch.optim.AdamW(model.parameters()))


def test_shards_are_initialised_with_a_seed() -> None:
    """Seeds change no size: the same peak as with zeros."""
    seeded, zeros = (trainfit.trace(partial(train_from_meta, one), world_size=4) for one in (True, False))
    assert random._rng_tracker is None
    assert seeded.peak_allocated_bytes == zeros.peak_allocated_bytes
    assert seeded.phases.steady == zeros.phases.steady


def recompute_sharded() -> None:
    """Recomputation compares the device of what DTensor saves, under which no function mode is entered."""
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    weight = nn.Parameter(distributed_tensor.distribute_tensor(torch.randn(N, N, device="cuda"), mesh))
    model = nn.Linear(N, N).cuda()
    seen: set[str] = set()

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.numel():  # PyTorch 2.11's checkpoint saves an empty tensor of the host too.
            seen.add(t.device.type)
        return t

    for _ in range(2):
        x = distributed_tensor.DTensor.from_local(model(torch.randn(ROWS, N, device="cuda")), mesh)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = checkpoint(lambda x: (x @ weight).relu().square(), x, use_reentrant=False)
            (y @ weight).sum().to_local().backward()
    assert seen == {"cuda"}


def test_dtensors_are_on_the_device_wherever_they_are_asked() -> None:
    assert trainfit.trace(recompute_sharded, world_size=2).model_flops > 0
