"""Losses of completions: of their tokens' log-probabilities, rewards and references."""
