"""From a goal to a recipe: what to choose so that it fits and is fast."""
