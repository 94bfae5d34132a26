"""Losses computed without holding all logits, and terms added to the loss."""
