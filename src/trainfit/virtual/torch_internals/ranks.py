"""Private names that a rank of several relies on: FSDP2's, DDP's, DTensor's and process groups'."""

from trainfit.spec.private_names import entry
from trainfit.virtual.torch_internals import calls

# fmt: off
RANKS = (
    entry(
        "torch._C:_clear_DTensor_sharding_propagator_cache",
        "forgetting the meshes of DTensor's cached rules", "builtin",
    ),
    entry(
        "torch._C:_autograd._top_saved_tensors_default_hooks",
        "saving sharded parameters instead of gathered ones", "builtin (arg0)",
    ),
    entry(
        "torch._dynamo.config:patch", "DDP without Dynamo's splitting of graphs", "(arg1=, arg2=, **kwargs)",
        call=calls.dynamo_settings, result=False,
    ),
    entry(
        "torch._utils:_flatten_dense_tensors", "buckets of gradients", "(tensors)", call=calls.flattened,
        result=[10],
    ),
    entry(
        "torch._utils:_unflatten_dense_tensors", "buckets of gradients", "(flat, tensors)",
        call=calls.unflattened, result=[(2, 3), (4,)],
    ),
    entry("torch:autograd._unsafe_preserve_version_counter", "writing gathered parameters under autograd"),
    entry(
        "torch.distributed:_register_comm_hook", "DDP's reducer on fake tensors",
        "builtin (reducer, state, comm_hook)",
    ),
    entry(
        "torch.distributed._functional_collectives:all_gather_tensor", "tensor parallelism's collectives",
        "(self, gather_dim, group, tag=)",
    ),
    entry(
        "torch.distributed._functional_collectives:reduce_scatter_tensor", "tensor parallelism's collectives",
        "(self, reduceOp, scatter_dim, group, tag=)",
    ),
    entry(
        "torch.distributed._symmetric_memory:empty", "memory that the GPUs of a host share",
        "(*size, dtype=, device=)",
    ),
    entry(
        "torch.distributed._symmetric_memory:rendezvous", "memory that the GPUs of a host share",
        "(tensor, group)",
    ),
    entry(
        "torch.distributed.tensor._shards_wrapper:LocalShardsWrapper",
        "checkpoints with the model's rows of fused projections",
    ),
    entry(
        "torch.distributed.device_mesh:DeviceMesh._flatten", "ranks that share weights and sequences",
        "(self, mesh_dim_name=, backend_override=)",
    ),
    entry(
        "torch.distributed.distributed_c10d:_get_default_group",
        "collectives replaced by copies between GPUs", "()",
    ),
    entry(
        "torch.distributed:ProcessGroup._allgather_base", "collectives replaced by copies between GPUs",
        "builtin (self, output, input, opts)",
    ),
    entry(
        "torch.distributed:ProcessGroup._reduce_scatter_base", "collectives replaced by copies between GPUs",
        "builtin (self, outputTensor, inputTensor, opts)",
    ),
    entry(
        "torch.distributed.distributed_c10d:_resolve_process_group", "the ranks of a functional collective",
        "builtin (group_name)",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:AllGatherResult",
        "gathers by copies between GPUs",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather",
        "gathers by copies between GPUs",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultReduceScatter",
        "reductions by copies between GPUs",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty",
        "making only the chunk of this rank", "(tensor, num_chunks, dim)", call=calls.chunks,
        result=[2, 2, 1, 0],
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._sharded_param_data",
        "the shard of a parameter", "instance attribute",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:foreach_all_gather",
        "the parameters of a gather",
        "(fsdp_params, group, async_op, all_gather_copy_in_stream, all_gather_stream, device, "
        "all_gather_comm)",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:foreach_reduce",
        "the parameters of a reduction",
        "(fsdp_params, unsharded_grads, reduce_scatter_group, reduce_scatter_stream, "
        "reduce_scatter_comm, orig_dtype, reduce_dtype, device, gradient_divide_factor, "
        "all_reduce_group, all_reduce_stream, all_reduce_grads, partial_reduce_output, "
        "all_reduce_hook, force_sum_reduction_for_comms=)",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._all_gather_comm",
        "gathers by copies between GPUs", "instance attribute",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._reduce_scatter_comm",
        "reductions by copies between GPUs", "instance attribute",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group",
        "the parameters that FSDP2 gathers together", "property", "instance attribute",
    ),
    entry(
        "torch.distributed.fsdp:FSDPModule._get_fsdp_state", "the parameters that FSDP2 gathers together",
        "(self)",
    ),
    entry(
        "torch.distributed.tensor:DTensor._op_dispatcher", "forgetting the meshes of DTensor's cached rules",
        "value",
    ),
    entry("torch.distributed.tensor:DTensor._local_tensor", "this rank's part of a tensor", "property"),
    entry("torch.distributed.tensor:DTensor._spec", "the placement of a tensor on its mesh", "property"),
    entry(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
        "leaving out operations that DTensor runs for a shape", "(self, op_schema)",
    ),
    entry(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding",
        "forgetting the meshes of DTensor's cached rules", "instance attribute",
    ),
    entry(
        "torch.nn.parallel.distributed:DistributedDataParallel._ddp_init_helper",
        "DDP's reducer on fake tensors",
        "(self, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)",
    ),
    entry(
        "torch.nn.parallel.distributed:DistributedDataParallel._pre_forward", "DDP's rebuilt buckets",
        "(self, *inputs, **kwargs)",
    ),
    entry(
        "torch.nn.parallel.distributed:DistributedDataParallel._has_rebuilt_buckets", "DDP's rebuilt buckets",
        "instance attribute",
    ),
    entry(
        "torch.nn.parallel.distributed:DistributedDataParallel.register_comm_hook",
        "refusing a hook of the script's own", "(self, state, hook)",
    ),
    entry(
        "torch.nn.parallel.distributed:_verify_param_shape_across_processes", "DDP without other ranks",
        "(process_group, tensors, logger=)",
    ),
    entry("torch.testing._internal.distributed.fake_pg:FakeStore", "process groups without other ranks"),
    entry("torch.cpu:Event.record", "the streams of FSDP2's collectives", "(self, stream=)"),
    entry("torch.cpu:Stream.record_event", "the streams of FSDP2's collectives", "(self)"),
    entry("torch.cpu:Stream.wait_event", "the streams of FSDP2's collectives", "(self, event)"),
    entry("torch.cpu:Stream.wait_stream", "the streams of FSDP2's collectives", "(self, stream)"),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_groups",
        "the parameters that FSDP2 gathers together", "instance attribute", "absent",
    ),
    entry("torch._C:_get_accelerator", "process groups on the virtual GPU", "builtin (check)"),
    entry(
        "torch.distributed.distributed_c10d:_get_default_timeout", "process groups on the virtual GPU",
        "(backend)", call=calls.timeout_s, result=1800.0,
    ),
    entry(
        "torch.distributed.distributed_c10d:_new_process_group_helper", "process groups on the virtual GPU",
        "(group_size, group_rank, global_ranks_in_group, backend, store, group_name, "
        "backend_options=, timeout=, pg_tag=, device_id=, group_desc=)",
    ),
    entry("torch.distributed.distributed_c10d:_world.pg_map", "process groups on the virtual GPU", "dict"),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_init:_get_managed_states",
        "moving parameters and buffers as FSDP2 does", "(modules, ignored_params=)",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fully_shard:_get_managed_states",
        "moving parameters and buffers as FSDP2 does", "absent",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._init_sharded_param",
        "refusing FSDP2's offload to the host", "(self, param, device, shard_placement_fn, mesh_info)",
        "(self, param, device, shard_placement_fn)",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_unsharded_param",
        "counting parameters once", "(self)",
    ),
    entry(
        "torch.distributed.tensor._op_schema:_rebuild_tensor_from_dtensor_meta",
        "shapes of DTensor's results", "(arg)",
    ),
    entry("torch.distributed.tensor._random:OffsetBasedRNGTracker", "random numbers of shards"),
    entry(
        "torch.distributed.tensor._random:OffsetBasedRNGTracker._distribute_region",
        "random numbers of shards", "(self, spec, generator=)",
    ),
    entry("torch.distributed.tensor._random:_rng_tracker", "random numbers of shards", "value"),
    entry("torch.nn.modules._functions:SyncBatchNorm", "batch norm over all ranks"),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.fsdp_params",
        "the parameters that FSDP2 gathers together", "instance attribute",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.mesh_info",
        "the ranks that FSDP2 shards over", "instance attribute",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.sharded_param", "the shard of a parameter",
        "instance attribute",
    ),
    entry(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.offload_to_cpu",
        "refusing FSDP2's offload to the host", "instance attribute",
    ),
    entry(
        "torch.distributed.tensor._dispatch:OpDispatcher.sharding_propagator",
        "forgetting the meshes of DTensor's cached rules", "instance attribute",
    ),
    entry(
        "torch:ops.c10d._allgather_base_", "bytes and group of a collective",
        "default(output_tensor, input_tensor, process_group, async_op=, timeout=) -> 2",
    ),
    entry(
        "torch:ops.c10d._reduce_scatter_base_", "bytes and group of a collective",
        "default(output_tensor, input_tensor, process_group, reduce_op, async_op=, timeout=) -> 2",
    ),
    entry(
        "torch:ops._c10d_functional.all_gather_into_tensor", "bytes and group of a collective",
        "default(input, group_size, group_name) -> 1",
    ),
    entry(
        "torch:ops._c10d_functional.reduce_scatter_tensor", "bytes and group of a collective",
        "default(input, reduce_op, group_size, group_name) -> 1",
    ),
    entry(
        "torch:ops._c10d_functional.all_reduce", "bytes and group of a collective",
        "default(input, reduce_op, group_name) -> 1",
    ),
    entry(
        "torch:ops._c10d_functional.all_reduce_", "bytes and group of a collective",
        "default(input, reduce_op, group_name) -> 1",
    ),
)
