"""The package's Python functions (``trainfit.predict`` ...) and what the command line shares with them."""
