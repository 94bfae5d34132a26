"""Tables and figures of the pages, computed from ``evidence/records/``."""
