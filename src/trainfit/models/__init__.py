"""Models from a config: any transformers causal LM (``hf``) or trainfit's decoder (``native``)."""
