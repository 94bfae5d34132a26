"""Private names that transformers' models are built with."""

from trainfit.spec.private_names import entry
from trainfit.virtual.torch_internals import calls

# fmt: off
MODELS = (
    entry(
        "transformers.modeling_utils:get_torch_context_manager_or_global_device",
        "building a model on the meta device", "()",
    ),
    entry(
        "transformers.masking_utils:find_packed_sequence_indices",
        "masks without a search for packed sequences", "(position_ids)", call=calls.packed_sequences,
        result=None,
    ),
    entry(
        "transformers.masking_utils:AttentionMaskInterface",
        "registering masks for the package's attention kernels",
    ),
    entry("transformers.modeling_utils:AttentionInterface", "registering the package's attention kernels"),
    entry(
        "transformers.modeling_utils:PreTrainedModel._init_weights", "initialising a model's weights",
        "(self, module)",
    ),
    entry(
        "transformers.modeling_utils:PreTrainedModel._from_config", "building a model from its config",
        "(cls, config, **kwargs)",
    ),
    entry(
        "transformers.modeling_utils:PreTrainedModel._no_split_modules", "the class of a model's blocks",
        "value",
    ),
    entry("transformers.modeling_utils:PreTrainedModel._tied_weights_keys", "tied embeddings", "value"),
    entry(
        "transformers.modeling_utils:PreTrainedModel._keys_to_ignore_on_load_unexpected",
        "tensors of a folder of weights that a model's code skips", "value",
    ),
    entry(
        "transformers.core_model_loading:revert_weight_conversion",
        "the names and places of a folder's weights in a model", "(model, state_dict)",
    ),
    entry("transformers.core_model_loading:WeightRenaming", "names of weights in former releases"),
    entry(
        "transformers.conversion_mapping:get_model_conversion_mapping", "names of weights in former releases",
        "(model, key_mapping=, hf_quantizer=, add_legacy=)",
    ),
    entry(
        "transformers.modeling_utils:PreTrainedModel._supports_attention_backend",
        "models with attention of their own", "bool",
    ),
    entry(
        "transformers.modeling_utils:PreTrainedModel._is_stateful",
        "models that carry a state along a sequence, which packed documents would share", "bool",
    ),
    entry(
        "transformers.initialization:no_init_weights",
        "finding what a config lacks, and reading weights, without making any", "()",
    ),
    entry(
        "transformers.configuration_utils:PreTrainedConfig._attn_implementation", "the attention of a config",
        "property",
    ),
    entry(
        "transformers.modeling_utils:PreTrainedModel._initialize_weights",
        "initialising the blocks that are traced, and no others", "(self, module, is_custom_code=)",
        call=calls.skips_initialised, result=["_is_hf_initialized"],
    ),
    entry(
        "peft.tuners.lora.config:LoraConfig._register_custom_module",
        "PEFT's own layers for bitsandbytes over layers whose tensors are buffers", "(self, mapping)",
    ),
)
