"""Private names that the trace of a user's script relies on, in PyTorch and in the libraries above it."""

from trainfit.spec.private_names import entry
from trainfit.virtual.torch_internals import calls

# fmt: off
SCRIPTS = (
    entry(
        "torch._C:_cuda_getCurrentRawStream", "the stream of a kernel that a script launches", "absent",
        "builtin",
    ),
    entry("torch._C:_cuda_hostMemoryStats", "statistics of pinned memory", "absent", "builtin"),
    entry("torch._C:_cuda_memorySnapshot", "snapshots of the virtual GPU's memory", "absent", "builtin"),
    entry("torch._C:_cuda_memoryStats", "statistics of the virtual GPU's memory", "absent", "builtin"),
    entry(
        "torch._C:_cuda_record_memory_history", "snapshots of the virtual GPU's memory", "absent",
        "builtin (arg0, arg1, arg2, arg3, arg4, arg5, arg6, arg7)",
    ),
    entry(
        "torch._C:_cuda_record_memory_history_legacy", "snapshots of the virtual GPU's memory", "absent",
        "builtin (arg0, arg1, arg2, arg3, arg4, arg5, arg6, arg7, arg8)",
    ),
    entry("torch._C:_host_emptyCache", "statistics of pinned memory", "absent", "builtin"),
    entry(
        "torch._C:_group_tensors_by_device_and_dtype", "foreach functions on the virtual GPU",
        "builtin (arg0, arg1)", call=calls.groups, result=[("torch.float16", 1), ("torch.float32", 2)],
    ),
    entry(
        "torch._C:_dispatch_tls_is_dispatch_key_excluded", "the Python code of a custom operator",
        "builtin (arg0)", call=calls.key_excluded, result=False,
    ),
    entry(
        "torch._C:_dispatch_tls_set_dispatch_key_excluded", "the Python code of a custom operator",
        "builtin (arg0, arg1)",
    ),
    entry(
        "torch._C:_nn._parse_to", "the device of Tensor.to", "builtin", call=calls.parsed,
        result=["cpu", "torch.float16"],
    ),
    entry(
        "torch:_has_compatible_shallow_copy_type", "moving a module as on real tensors", "builtin",
        call=calls.compatible, result=[True, False],
    ),
    entry(
        "torch:_use_cudnn_rnn_flatten_weight", "recurrent layers without cuDNN's copy of the weights",
        "builtin",
    ),
    entry("torch.cuda:_exchange_device", "guards of the current device", "(device)", "builtin"),
    entry("torch.cuda:_maybe_exchange_device", "guards of the current device", "(device)", "builtin"),
    entry("torch.cuda:_get_nvml_device_index", "queries of NVML", "(device)"),
    entry("torch.cuda:_is_compiled", "scripts that ask for CUDA", "()"),
    entry("torch.cuda:_lazy_call", "functions of torch.cuda without a driver", "(callable, **kwargs)"),
    entry("torch.cuda:_lazy_init", "functions of torch.cuda without a driver", "()"),
    entry("torch.cuda.memory:_use_uvm", "memory that host and GPU share", "(device=)", "absent"),
    entry(
        "torch._dynamo.convert_frame:_compile", "capturing the frames of a script",
        "(code, globals, locals, builtins, closure, compiler_fn, one_graph, export, "
        "export_constraints, hooks, cache_entry, cache_entries, cache_entries_for_reasons, "
        "cache_size, frame=, frame_state=, *, compile_id, skip=, package=, convert_frame_box=)",
        "(code, globals, locals, builtins, closure, compiler_fn, one_graph, export, "
        "export_constraints, hooks, cache_entry, cache_size, frame=, frame_state=, *, compile_id, "
        "skip=, package=, convert_frame_box=)",
    ),
    entry(
        "torch._dynamo.eval_frame:_callback_from_stance", "running other compiled code eagerly", "(callback)",
    ),
    entry(
        "torch._dynamo.eval_frame:innermost_backend", "running other compiled code eagerly", "(fn)",
        call=calls.innermost, result=True,
    ),
    entry("torch._dynamo.trace_rules:get_torch_obj_rule_map", "capturing torch.cuda's own functions", "()"),
    entry(
        "torch._dynamo.utils:run_node", "capturing the frames of a script",
        "(tracer, node, args, kwargs, nnmodule)",
    ),
    entry(
        "torch._dynamo.variables.tensor:TensorVariable.specialize", "capturing tensors on the virtual GPU",
        "(value)", call=calls.specialized, result=["cpu", "torch.float32", "2"],
    ),
    entry(
        "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers",
        "capturing torch.cuda's own functions", "()",
    ),
    entry("torch._library.custom_ops:OPDEFS", "custom operators that run as their parts", "value"),
    entry(
        "torch._library.custom_ops:CustomOpDef._abstract_fn", "custom operators that run as their parts",
        "instance attribute",
    ),
    entry(
        "torch._library.custom_ops:CustomOpDef._backend_fns", "custom operators that run as their parts",
        "instance attribute",
    ),
    entry("torch._library.triton:set_wrap_triton_enabled", "launches of wrapped Triton kernels", "(enabled)"),
    entry("torch._library.triton:triton_ops_to_kernels", "custom operators that run as their parts", "dict"),
    entry(
        "torch._utils:_rebuild_tensor", "loading tensors onto the virtual GPU",
        "(storage, storage_offset, size, stride)", call=calls.rebuilt, result=[2.0, 4.0],
    ),
    entry(
        "torch._utils:_rebuild_tensor_v3", "loading tensors onto the virtual GPU",
        "(storage, storage_offset, size, stride, requires_grad, backward_hooks, dtype, metadata=)",
    ),
    entry(
        "torch._weights_only_unpickler:_get_allowed_globals", "loading tensors onto the virtual GPU", "()",
        call=calls.allowed, result=[True, True],
    ),
    entry("torch.autograd.graph:Node._sequence_nr", "which forward a backward belongs to", "(self)"),
    entry(
        "torch.nn.attention.flex_attention:flex_attention_hop", "FlexAttention without a GPU",
        "(query, key, value, score_mod, block_mask, scale, kernel_options, score_mod_other_buffers=, "
        "mask_mod_other_buffers=)",
    ),
    entry(
        "torch.nn.attention.flex_attention:_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        "FlexAttention without a GPU", "bool",
    ),
    entry("torch.profiler:_KinetoProfile", "profilers in a script"),
    entry(
        "torch.serialization:_get_restore_location", "loading tensors onto the virtual GPU", "(map_location)",
        call=calls.restored, result=[True],
    ),
    entry(
        "torch.serialization:_is_zipfile", "mapping a checkpoint into memory", "(f)", call=calls.zip_files,
        result=[True, False],
    ),
    entry("torch.storage:_StorageBase", "loading tensors onto the virtual GPU"),
    entry("torch.utils._python_dispatch:_pop_mode", "files that are read outside the trace's modes", "(k=)"),
    entry(
        "torch.utils._python_dispatch:_push_mode", "files that are read outside the trace's modes", "(mode)",
    ),
    entry("torch.utils.data.dataloader:DataLoader._get_iterator", "data loaders without workers", "(self)"),
    entry("torch.utils.data.dataloader:_SingleProcessDataLoaderIter", "data loaders without workers"),
    entry("triton.runtime:driver._active", "Triton kernels without a GPU", "value"),
    entry("triton.runtime.autotuner:Autotuner.run", "launches of Triton kernels", "(self, *args, **kwargs)"),
    entry(
        "triton.runtime.autotuner:Autotuner.check_disk_cache", "launches of Triton kernels",
        "(self, tuning_key, configs, bench_fn)",
    ),
    entry("triton.runtime.autotuner:Autotuner.do_bench", "launches of Triton kernels", "value"),
    entry(
        "triton.runtime.interpreter:InterpretedFunction.run", "launches of Triton kernels",
        "(self, *args, grid, warmup, **kwargs)",
    ),
    entry(
        "triton.runtime.jit:JITFunction.run", "launches of Triton kernels",
        "(self, *args, grid, warmup, **kwargs)",
    ),
    entry(
        "triton.testing:do_bench", "launches of Triton kernels",
        "(fn, warmup=, rep=, grad_to_none=, quantiles=, return_mode=)",
    ),
    entry("safetensors.torch:_flatten", "saving tensors of the virtual GPU", "absent"),
    entry(
        "safetensors.torch:_flatten_as_ptr", "saving tensors of the virtual GPU",
        "(tensors, keep_alive_buffer)",
    ),
    entry(
        "torch.storage:TypedStorage._untyped_storage", "loading tensors onto the virtual GPU",
        "instance attribute",
    ),
)
