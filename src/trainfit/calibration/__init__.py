"""Measure a device and its host once: the rates that step times are predicted with."""
