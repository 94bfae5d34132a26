"""The Python functions of the package (``trainfit.predict`` ...), and what the command line shares with them."""
