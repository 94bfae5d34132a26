"""Training scripts of real libraries on one GPU: predicted by ``trainfit.trace``, then run.

    python -m evidence.scripts.library_scripts predict OUT.jsonl [NAME ...]    # no GPU
    python -m evidence.scripts.library_scripts run PREDICTED.jsonl OUT.jsonl   # on the GPU
    python -m evidence.scripts.library_scripts table PREDICTED.jsonl MEASURED.jsonl

The scripts (scripts.py) know nothing of trainfit. Models have random weights; data are generated.
"""
