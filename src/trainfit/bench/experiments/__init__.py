"""One file for each experiment: ``EXPERIMENT`` declares its run, columns and plots."""
