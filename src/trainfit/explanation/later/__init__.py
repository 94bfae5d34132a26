"""What needs memory later in a run than its steady step: spikes, and steps of varied lengths."""
