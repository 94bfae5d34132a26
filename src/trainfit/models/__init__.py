"""A config becomes a module: any transformers causal LM (``hf``) or our own decoder (``native``)."""
