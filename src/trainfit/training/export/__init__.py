"""A run's weights as a folder that transformers and PEFT load."""
