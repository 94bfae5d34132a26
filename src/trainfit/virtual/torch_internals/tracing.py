"""Private names that every trace relies on: fake tensors, the dispatcher, autograd and dispatch modes."""

from trainfit.spec.private_names import entry
from trainfit.virtual.torch_internals import calls

# fmt: off
TRACING = (
    entry("torch._C:_AutoDispatchBelowAutograd", "calling an operator's kernel below autograd"),
    entry("torch._C:_DisableTorchDispatch", "making a meta tensor without recording it"),
    entry(
        "torch._C:_ExcludeDispatchKeyGuard", "casting as CUDA's autocast does, with the CPU's autocast off",
    ),
    entry(
        "torch._C:_autograd._get_sequence_nr", "numbering the autograd nodes of a forward", "builtin ()",
        call=calls.sequence, result=1,
    ),
    entry(
        "torch._C:_current_autograd_node", "the autograd node that a backward operation belongs to",
        "builtin", call=calls.node_outside, result="NoneType",
    ),
    entry(
        "torch._C:_dispatch_get_all_op_names", "the operators that autocast casts on the CPU alone",
        "builtin ()", call=calls.operators, result=[True, True, False],
    ),
    entry(
        "torch._C:_dispatch_has_kernel_for_dispatch_key", "the operators that autocast casts on CUDA",
        "builtin (arg0, arg1)", call=calls.autocast_kernels, result=[True, False, True],
    ),
    entry(
        "torch._C:_dispatch_keys", "the key set of a call that came without one", "builtin (arg0)",
        call=calls.keys_of, result=[True, True, False],
    ),
    entry(
        "torch._C:_dispatch_keyset_full_after", "continuing an operator below a replaced kernel",
        "builtin (arg0)", call=calls.keys_below, result=[False, True, False],
    ),
    entry("torch._C:DispatchKey", "registering kernels for a dispatch key"),
    entry("torch._C:DispatchKeySet", "registering kernels for a dispatch key"),
    entry(
        "torch._C:_get_fp32_precision_getter", "restoring the precision settings of a script",
        "builtin (arg0, arg1)", call=calls.precision, result=True,
    ),
    entry(
        "torch._C:_set_fp32_precision_setter", "restoring the precision settings of a script",
        "builtin (arg0, arg1, arg2)",
    ),
    entry(
        "torch._C:_len_torch_function_stack", "leaving the function modes before Dynamo captures a graph",
        "builtin", call=calls.function_modes, result=[0, 1],
    ),
    entry(
        "torch._C:_pop_torch_function_stack", "leaving the function modes before Dynamo captures a graph",
        "builtin",
    ),
    entry(
        "torch._C:_push_on_torch_function_stack", "entering the function modes again after a capture",
        "builtin",
    ),
    entry("torch._C:_set_grad_enabled", "restoring the gradient mode", "builtin"),
    entry(
        "torch._C:_set_throw_on_mutable_data_ptr", "making fake tensors as FakeTensor does", "builtin (arg0)",
    ),
    entry(
        "torch._C:_storage_Use_Count", "whether autograd adds a gradient in place", "builtin (arg0)",
        call=calls.uses_of_storage, result=1,
    ),
    entry("torch._C:DisableTorchFunction", "reading tensors without a function mode"),
    entry("torch._C:_has_cuda", "whether PyTorch was built for CUDA", "bool"),
    entry("torch:_GLOBAL_DEVICE_CONTEXT", "restoring the default device", "value"),
    entry("torch.utils._device:CURRENT_DEVICE", "the default device of a script", "value"),
    entry(
        "torch:Tensor._make_subclass", "making fake tensors faster than FakeTensor does", "builtin",
        call=calls.made_subclass, result=["FakeTensor", (2, 3), False],
    ),
    entry(
        "torch:Tensor._use_count", "whether autograd adds a gradient in place", "builtin",
        call=calls.uses_of_tensor, result=1,
    ),
    entry(
        "torch:Tensor._post_accumulate_grad_hooks", "freeing a gradient that a hook of its parameter takes",
        "property",
    ),
    entry(
        "torch:UntypedStorage._cdata", "identifying a storage by its address", "property",
        call=calls.same_addresses, result=[True, False],
    ),
    entry(
        "torch:UntypedStorage.resize_", "following storages that FSDP2 frees and takes back", "builtin",
        call=calls.resized, result=[0, 16],
    ),
    entry("torch:nn.Module._apply", "converting adapters in the order of a module", "(self, fn, recurse=)"),
    entry("torch:nn.Module._compiled_call_impl", "the compiled code of a module", "value"),
    entry(
        "torch:nn.init._no_grad_trunc_normal_", "deferring initialisation on the meta device",
        "(tensor, mean, std, a, b, generator=)",
    ),
    entry(
        "torch:autograd._engine_run_backward", "entering function modes inside the autograd engine",
        "(t_outputs, *args, **kwargs)",
    ),
    entry("torch:autograd.graph.Node", "nodes of the autograd graph"),
    entry(
        "torch.optim.optimizer:_foreach_supported_types",
        "letting optimizers take their foreach path on fake tensors", "list", call=calls.names,
        result=["Tensor"],
    ),
    entry(
        "torch:overrides._get_current_function_mode_stack", "whether a function mode is entered", "()",
        call=calls.function_mode_stack, result=[0, 1],
    ),
    entry("torch:random.default_generator", "keeping a script's own random state", "value"),
    entry(
        "torch._guards:active_fake_mode", "the fake mode of tensors that are made", "()",
        call=calls.fake_mode_of, result=[False, True],
    ),
    entry("torch._ops:OpOverload", "telling operators from other functions"),
    entry("torch._ops:OpOverload._schema", "which arguments an operator writes", "instance attribute"),
    entry("torch._ops:OpOverload._overloadname", "overloads of an operator", "instance attribute"),
    entry(
        "torch._ops:OpOverload._dispatch_cache", "forgetting the kernels that a trace replaced",
        "instance attribute",
    ),
    entry("torch.library:Library._op_impls", "the kernels that a trace replaced", "instance attribute"),
    entry("torch.library:Library._destroy", "giving the replaced kernels back after a trace", "(self)"),
    entry(
        "torch._prims_common:is_non_overlapping_and_dense_or_false",
        "whether autograd adds a gradient in place", "(a)", call=calls.dense, result=[True, False, False],
    ),
    entry(
        "torch._prims_common:suggest_memory_format", "the memory format of a convolution", "(x)",
        call=calls.memory_formats, result=["torch.contiguous_format", "torch.channels_last"],
    ),
    entry("torch._subclasses.fake_tensor:FakeTensor", "fake tensors"),
    entry("torch._subclasses.fake_tensor:FakeTensorMode", "fake tensors"),
    entry(
        "torch._subclasses.fake_tensor:FakeTensor.constant", "fake tensors with known values",
        "instance attribute",
    ),
    entry(
        "torch._subclasses.fake_tensor:FakeTensor.fake_device", "the device of a fake tensor", "property",
        "instance attribute",
    ),
    entry(
        "torch._subclasses.fake_tensor:FakeTensor.fake_mode", "the mode of a fake tensor",
        "instance attribute",
    ),
    entry(
        "torch._subclasses.fake_tensor:FakeTensorMode.in_kernel_invocation",
        "calling meta kernels without FakeTensorMode", "bool",
    ),
    entry(
        "torch._subclasses.fake_tensor:FakeTensorMode.shape_env",
        "sizes that are symbols, which are not traced", "instance attribute",
    ),
    entry("torch._subclasses.fake_tensor:DataDependentOutputException", "refusing a step that reads a value"),
    entry(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException",
        "refusing a step whose sizes depend on values",
    ),
    entry(
        "torch._subclasses.fake_tensor:UnsupportedFakeTensorException",
        "refusing a step that no fake tensor can run",
    ),
    entry(
        "torch._subclasses.fake_tensor:UnsupportedOperatorException",
        "refusing a step with an operator without fake kernel",
    ),
    entry(
        "torch._subclasses.fake_tensor:in_kernel_invocation_manager",
        "calling meta kernels without FakeTensorMode", "(fake_mode)", call=calls.meta_inside,
        result=["meta", "cpu"],
    ),
    entry(
        "torch._subclasses.fake_tensor:run_fallback_kernel", "reporting operators without a fake kernel",
        "(fake_mode, func, flat_args, args_spec, orig_not_implemented_exception)",
    ),
    entry(
        "torch._subclasses.fake_tensor:init_gpu_context", "avoiding a CUDA context for fake tensors",
        "(device)",
    ),
    entry("torch.utils._python_dispatch:TorchDispatchMode", "recording every operation"),
    entry(
        "torch.utils._python_dispatch:_disable_current_modes", "running an operation unrecorded", "()",
        call=calls.without_modes, result=["Tensor", "FakeTensor"],
    ),
    entry(
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
        "leaving the modes while initialisation is deferred", "()", call=calls.dispatch_mode_stack,
        result=[0, 1],
    ),
    entry(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "telling DTensors and quantized weights from plain tensors", "(t)", call=calls.wrapped,
        result=[False, False],
    ),
    entry(
        "torch.utils._pytree:tree_iter", "finding the tensors of nested arguments", "(tree, is_leaf=)",
        call=calls.leaves, result=[1, 2, "c"],
    ),
    entry(
        "torch.utils._pytree:tree_leaves", "finding the tensors of nested arguments", "(tree, is_leaf=)",
        call=calls.leaves, result=[1, 2, "c"],
    ),
    entry(
        "torch.utils._pytree:tree_map", "changing the tensors of nested arguments",
        "(func, tree, *rests, is_leaf=)", call=calls.increased, result=[2, {"b": (3,)}],
    ),
    entry(
        "torch.utils._pytree:tree_map_only", "changing the tensors of nested arguments",
        "(type_or_types_or_pred, func, tree, is_leaf=)", call=calls.increased_leaves,
        result=[2, "a", {"b": (3, 3.0)}],
    ),
    entry("torch:amp._enter_autocast", "autocast inside a captured graph", "(*vals)"),
    entry(
        "torch:inference_mode._inference_mode_context", "entering no_grad for inference mode",
        "instance attribute",
    ),
    entry(
        "transformers.utils.import_utils:is_fake_tensor",
        "the masks and keys that transformers makes for real tensors", "(x)", call=calls.is_fake,
        result=[False, True],
    ),
    entry(
        "torch._functorch.config:patch", "the memory budget of a compiled graph and its caches",
        "(arg1=, arg2=, **kwargs)", call=calls.functorch_settings, result=[False, True, 0.5],
    ),
    entry(
        "torch.utils._foreach_utils:_foreach_supported_types", "letting foreach functions take fake tensors",
        "list", call=calls.names, result=["Tensor"],
    ),
    entry(
        "torch.utils.flop_counter:sdpa_flop_count",
        "the share of attention in a compiled graph's memory budget", "(query_shape, key_shape, value_shape)",
        call=calls.sdpa_flops, result=1024,
    ),
    entry(
        "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", "fake tensors on the CPU alone",
        "property",
    ),
)
