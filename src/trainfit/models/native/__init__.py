"""Our own decoder: fused projections, every common norm, position and feed-forward variant, Hugging Face weights."""
