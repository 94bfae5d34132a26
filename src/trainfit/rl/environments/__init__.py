"""Tasks that a model answers in text, and the rewards of its answers."""
