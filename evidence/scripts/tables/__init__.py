"""Tables and figures of the documentation, computed from the records in ``results/``. One module a page."""
