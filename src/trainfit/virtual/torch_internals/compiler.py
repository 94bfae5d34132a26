"""Private names that a compiled step relies on: Dynamo's, AOTAutograd's and Inductor's."""

from trainfit.spec.private_names import entry
from trainfit.virtual.torch_internals import calls

# fmt: off
COMPILER = (
    entry("torch._dynamo:reset", "forgetting what was compiled before", "()"),
    entry(
        "torch._dynamo:mark_dynamic", "benchmarks of changed lengths",
        "(t, index, *, hint_override=, min=, max=, specialize_on=)",
    ),
    entry("torch._inductor.utils:clear_caches", "benchmarks of compilations without kept programs", "()"),
    entry(
        "torch._dynamo:disable", "running FlexAttention outside a captured graph",
        "(fn=, recursive=, *, reason=, wrapping=)",
    ),
    entry("torch._dynamo.exc:TorchDynamoException", "refusing code that Dynamo cannot capture"),
    entry(
        "torch._dynamo.symbolic_convert:get_funcname",
        "leaving the names of functions out of Dynamo's messages", "(filename, lineno)",
    ),
    entry("torch._dynamo.device_interface:CudaInterface", "the properties of the GPU for Inductor"),
    entry(
        "torch._dynamo.device_interface:device_interfaces", "the properties of the GPU for Inductor", "dict",
    ),
    entry(
        "torch._dynamo.device_interface:get_interface_for_device", "the properties of the GPU for Inductor",
        "(device)",
    ),
    entry(
        "torch._C:_conv_determine_backend_memory_format", "the memory format of cuDNN's convolutions",
        "builtin (arg0, arg1, arg2)",
    ),
    entry(
        "torch._inductor.config:patch", "compiling without caches and workers", "(arg1=, arg2=, **kwargs)",
        call=calls.inductor_settings, result=[True, 1, False],
    ),
    entry("torch._inductor.codecache:CacheBase.get_system", "compiling without hashing Triton's files", "()"),
    entry(
        "torch._inductor.codegen.common:DtypePropagationOpsHandler",
        "one dtype handler for all operations of a kernel",
    ),
    entry(
        "torch._inductor.compile_fx:compile_fx", "running Inductor",
        "(model_, example_inputs_, inner_compile=, config_patches=, decompositions=, "
        "ignore_shape_env=, compile_region_name=)",
        "(model_, example_inputs_, inner_compile=, config_patches=, decompositions=, ignore_shape_env=)",
    ),
    entry(
        "torch._inductor.compile_fx:_InProcessFxCompile", "running Inductor up to the source of its program",
    ),
    entry(
        "torch._inductor.compile_fx:_InProcessFxCompile.codegen_and_compile",
        "running Inductor up to the source of its program",
        "(self, gm, example_inputs, inputs_to_check, graph_kwargs)",
    ),
    entry(
        "torch._inductor.compile_fx:joint_graph_passes", "Inductor's passes over a joint graph, as for CUDA",
        "(graph, input_device=)",
    ),
    entry("torch._inductor.debug:DebugContext", "running Inductor"),
    entry(
        "torch._inductor.decomposition:select_decomp_table", "Inductor's decompositions", "()",
        call=calls.decomposed, result=[True, True, True],
    ),
    entry(
        "torch._inductor.dtype_propagation:DtypePropagationOpsHandler",
        "one dtype handler for all operations of a kernel",
    ),
    entry(
        "torch._inductor.fx_passes.fuse_attention:_sfdp_init",
        "skipping patterns of attention where a graph has none", "(input_device=)",
    ),
    entry(
        "torch._inductor.fx_passes.fuse_attention:_sfdp_params_check", "fusing eager attention as on CUDA",
        "(match)",
    ),
    entry(
        "torch._inductor.fx_passes.joint_graph:check_device", "a batch of one product as on CUDA",
        "(a, b, device=)",
    ),
    entry(
        "torch._inductor.fx_passes.joint_graph:lazy_init.cache_clear",
        "registering the skipped patterns later", "builtin", "()",
    ),
    entry(
        "torch._inductor.fx_passes.pad_mm:_should_pad",
        "padding matrix products as a GPU's benchmark decides", "(match, mat1, mat2, op, input=)",
    ),
    entry("torch._inductor.fx_passes.pad_mm:check_device", "padding matrix products as on CUDA", "(a, b)"),
    entry("torch._inductor.fx_passes.pad_mm:has_triton", "padding matrix products as on CUDA", "()"),
    entry(
        "torch._inductor.fx_passes.pad_mm:should_exclude_padding_time",
        "operands that are padded without a copy", "(match, arg_name)",
    ),
    entry("torch._inductor.graph:GraphLowering.run", "lowering a graph", "(self, *args)"),
    entry("torch._inductor.graph:GraphLowering.codegen", "the source of a program", "(self)"),
    entry(
        "torch._inductor.graph:GraphLowering.compile_to_module", "stopping before the program is loaded",
        "(self)",
    ),
    entry(
        "torch._inductor.memory:reorder_for_peak_memory", "the order of the kernels of all layers",
        "(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, methods=)",
    ),
    entry(
        "torch._inductor.memory:estimate_peak_memory", "the order of the kernels of all layers",
        "(nodes, name_to_freeable_input_buf, graph_outputs)", call=calls.peak, result=[1536, [1024, 1536, 0]],
    ),
    entry(
        "torch._inductor.memory:prepare_planning_info", "the order of the kernels of all layers",
        "(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs)",
    ),
    entry(
        "torch._inductor.memory:assign_memory_planning_info_for_scheduler_nodes",
        "the order of the kernels of all layers",
        "(nodes, name_to_fused_node, name_to_buf, name_to_freeable_input_buf)",
        call=calls.neighbours, result=[(1024, [], []), (512, ["first"], ["first"])],
    ),
    entry("torch._inductor.output_code:OutputCode", "handing a program to AOTAutograd"),
    entry(
        "torch._inductor.runtime.hints:DeviceProperties.create.cache_clear",
        "forgetting the properties of another GPU", "builtin", "()",
    ),
    entry("torch._inductor.runtime.hints:DeviceProperties", "the properties of the GPU for Inductor"),
    entry(
        "torch._inductor.runtime.triton_heuristics:cached_autotune",
        "the configurations that a kernel is tuned over",
        "(size_hints, configs, triton_meta, heuristic_type, filename=, inductor_meta=, "
        "custom_kernel=, caching_autotuner_cls=, debug_autotuner_cls=)",
    ),
    entry(
        "torch._inductor.runtime.triton_heuristics:unique_configs",
        "the configurations that a kernel is tuned over", "(configs)", call=calls.unique, result=2,
    ),
    entry(
        "torch._inductor.runtime.triton_heuristics:triton", "the configurations that a kernel is tuned over",
        "module",
    ),
    entry(
        "torch._inductor.runtime.triton_heuristics:Config", "the configurations that a kernel is tuned over",
    ),
    entry(
        "torch._inductor.runtime.triton_heuristics:InductorConfig",
        "the configurations that a kernel is tuned over",
    ),
    entry(
        "torch._inductor.scheduler:BaseSchedulerNode.get_read_write_buffer_accesses",
        "the bytes that a kernel reads and writes", "(self, include_reads, include_writes)",
    ),
    entry("torch._inductor.scheduler:BaseSchedulerNode.get_nodes", "the operations of a kernel", "(self)"),
    entry(
        "torch._inductor.scheduler:BaseSchedulerNode.is_extern",
        "telling calls of libraries from Triton kernels", "(self)",
    ),
    entry(
        "torch._inductor.scheduler:BaseSchedulerNode.unmet_dependencies",
        "the order of the kernels of all layers", "instance attribute",
    ),
    entry("torch._inductor.scheduler:FusedSchedulerNode", "the bytes that a fused kernel reads and writes"),
    entry(
        "torch._inductor.scheduler:Scheduler.enter_context", "the kernel that a line of the program calls",
        "(self, node)",
    ),
    entry("torch._inductor.scheduler:has_triton", "writing Triton kernels without Triton", "()"),
    entry("torch._inductor.utils:BoxedBool", "running Inductor"),
    entry(
        "torch._inductor.utils:set_tracing_context_output_strides", "the strides of a program's outputs",
        "(example_inputs, compiled_graph)",
    ),
    entry("torch._inductor.virtualized:V.graph", "the graph that Inductor lowers", "value"),
    entry("torch._inductor.virtualized:V.fake_mode", "the fake mode of a graph", "value"),
    entry("torch._inductor.virtualized:V.set_debug_handler", "running Inductor", "(value)"),
    entry(
        "torch._refs:_normalize", "LayerNorm's decomposition on CUDA", "(a, norm_dims, eps)",
        call=calls.normalized,
        result=[("torch.float32", (2, 4)), ("torch.float32", (2, 1)), ("torch.float32", (2, 1))],
    ),
    entry(
        "torch.fx:GraphModule.print_readable", "leaving graphs out of Dynamo's messages",
        "(self, print_output=, include_stride=, include_device=, colored=, *, fast_sympy_print=, "
        "expanded_def=, additional_meta=)",
    ),
    entry("torch.utils._triton:triton_hash_with_backend", "compiling without hashing Triton's files", "()"),
    entry(
        "torch._dynamo.decorators:assume_constant_result", "functions that Dynamo calls instead of capturing",
        "(fn)", call=calls.mark, result=["_dynamo_marked_constant"],
    ),
    entry(
        "torch._functorch._aot_autograd.utils:make_boxed_func", "handing a program to AOTAutograd",
        "(f)", call=calls.mark, result=["_boxed_call"],
    ),
    entry(
        "torch.lib.libc10:_ZN3c104impl26device_guard_impl_registryE",
        "a device guard for CUDA in a CPU build", "symbol",
    ),
    entry(
        "torch._inductor.graph:GraphLowering.is_backward", "telling a backward's program from a forward's",
        "instance attribute",
    ),
    entry(
        "torch._inductor.graph:GraphLowering.is_inference", "telling a program without backward",
        "instance attribute",
    ),
    entry(
        "torch._inductor.graph:GraphLowering.graph_outputs", "the strides of a program's outputs",
        "instance attribute",
    ),
    entry(
        "torch._inductor.graph:GraphLowering.constants", "the constants of a program", "instance attribute",
    ),
    entry("torch._inductor.graph:GraphLowering.module", "the graph that is lowered", "instance attribute"),
    entry(
        "torch._inductor.graph:GraphLowering.scheduler", "the scheduled kernels of a program",
        "instance attribute",
    ),
    entry("torch._inductor.graph:GraphLowering.wrapper_code", "the lines of a program", "instance attribute"),
    entry(
        "torch._inductor.scheduler:BaseSchedulerNode.get_outputs", "the order of the kernels of all layers",
        "(self)",
    ),
    entry(
        "torch._inductor.scheduler:BaseSchedulerNode.get_buffer_names",
        "the order of the kernels of all layers", "(self)",
    ),
    entry(
        "torch._inductor.scheduler:BaseSchedulerNode.get_name", "the order of the kernels of all layers",
        "(self)",
    ),
    entry(
        "torch._inductor.scheduler:BaseSchedulerNode.mpi_node", "the order of the kernels of all layers",
        "instance attribute",
    ),
    entry(
        "torch._inductor.scheduler:SchedulerBuffer.mpi_buffer", "the order of the kernels of all layers",
        "instance attribute",
    ),
    entry(
        "torch._inductor.memory:FreeableInputBuffer.mpi_buffer", "the order of the kernels of all layers",
        "instance attribute",
    ),
    entry(
        "torch._inductor.memory:MemoryPlanningInfoForBuffer.succ_nodes",
        "the order of the kernels of all layers", "instance attribute",
    ),
    entry(
        "torch._inductor.output_code:CompiledFxGraph.current_callable", "the callable of a compiled graph",
        "instance attribute",
    ),
)
