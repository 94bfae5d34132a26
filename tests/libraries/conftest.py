"""Tests of scripts that use other libraries, in an environment of their own: ``make test-libraries``.

What is missing there fails; nothing is skipped. Triton's kernels are those of a GPU, not the interpreter's.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # Set for the other tests; Triton reads it when it is imported.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
