"""Timing harness of the experiments: device timers, sampling rules, the runner, profiling."""
