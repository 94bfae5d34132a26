"""Results as text for a terminal, imported when a result is there."""
