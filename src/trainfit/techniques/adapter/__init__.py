"""Adapters: small trainable additions to a frozen base."""
