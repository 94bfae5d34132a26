"""trainfit: does this training run fit, how fast does it go, what does it cost?

Importing the package is fast and needs no torch; the rooms below are imported where they are used.
"""

__version__ = "0.1.0"
