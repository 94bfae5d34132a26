"""Training on several ranks: their start, their exchanges on the host, and their common end."""
