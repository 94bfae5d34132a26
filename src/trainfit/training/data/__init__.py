"""Rows of files and datasets, the conversations in them, and how they become sequences with labels."""
