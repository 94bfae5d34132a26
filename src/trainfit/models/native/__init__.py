"""trainfit's decoder: fused projections, common norms, positions and activations, Hugging Face weights."""
