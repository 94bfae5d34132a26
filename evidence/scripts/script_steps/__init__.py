"""Step times of training scripts on one GPU: predicted by ``trainfit.trace``, and measured."""
