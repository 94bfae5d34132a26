"""Training on several ranks: how they are started, what they exchange, and how all of them end alike."""
