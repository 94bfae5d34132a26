"""Predicted against measured, from records: a table for the terminal, Markdown, and a page with plots."""
