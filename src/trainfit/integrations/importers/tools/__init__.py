"""One module a tool, each with an ``IMPORTER``."""
