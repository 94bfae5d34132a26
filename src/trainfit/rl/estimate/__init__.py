"""Predict the phases of a policy's loop: rollout, scoring, update."""
