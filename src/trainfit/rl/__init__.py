"""Reinforcement learning of a language model: rollouts, environments, objectives."""
