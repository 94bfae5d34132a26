"""One file for each experiment: ``EXPERIMENT`` says its name and how it runs."""
