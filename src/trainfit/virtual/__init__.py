"""The virtual GPU: a training step on fake tensors, every allocation and operation written into a ledger."""
