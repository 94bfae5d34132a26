"""The command line: one file a verb, each with ``register(app)``; heavy imports stay inside the verbs."""
