"""Private names that measurements, training and benchmarks on a real device rely on."""

from trainfit.spec.private_names import entry
from trainfit.virtual.torch_internals import calls

# fmt: off
DEVICES = (
    entry(
        "torch._C:_cuda_clearCublasWorkspaces",
        "measuring peaks without cuBLAS's workspaces of an earlier run", "absent", "builtin",
    ),
    entry("torch:_int_mm", "benchmarks of int8 products", "builtin"),
    entry("torch:_scaled_mm", "benchmarks of fp8 products", "builtin"),
    entry(
        "torch:_foreach_div_", "averaging reduced gradients", "builtin", call=calls.scaled,
        result=[[1.5, 2.0]],
    ),
    entry("torch:_foreach_mul_", "clipping gradients", "builtin", call=calls.scaled, result=[[6.0, 8.0]]),
    entry("torch:_foreach_norm", "clipping gradients", "builtin", call=calls.norms, result=[5.0, 0.0]),
    entry("torch.cuda:_sleep", "timing kernels without the host", "(cycles)"),
    entry(
        "torch.cuda.memory:_dump_snapshot", "snapshots of a measured step",
        "(filename=, augment_with_fx_traces=)",
    ),
    entry(
        "torch.cuda.memory:_record_memory_history", "snapshots of a measured step",
        "(enabled=, context=, stacks=, max_entries=, device=, clear_history=, compile_context=, "
        "global_record_annotations=, skip_actions=)",
    ),
    entry("torch._dynamo.utils:counters", "counting recompilations of a measured step", "defaultdict"),
    entry("torch._inductor.compile_fx:inductor_metrics_log", "benchmarks of Inductor's kernels", "value"),
    entry("torch._inductor.metrics:num_bytes_accessed", "benchmarks of Inductor's kernels", "value"),
    entry(
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers",
        "ending the workers of a data loader", "(self)",
    ),
    entry(
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._workers",
        "ending the workers of a data loader", "instance attribute",
    ),
    entry("torch.serialization:_get_layout", "reading the index of a sharded checkpoint", "(name)"),
    entry(
        "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
        "reading the index of a sharded checkpoint",
    ),
    entry(
        "torch.distributed.checkpoint.filesystem:_StorageInfo", "reading the index of a sharded checkpoint",
    ),
)
