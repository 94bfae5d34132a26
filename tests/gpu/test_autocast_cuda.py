"""Every operation of PyTorch's list under CUDA's autocast has the dtypes that the virtual GPU gives it."""

import pytest
import torch

from trainfit.bench.experiments.autocast import LOW, predicted_dtypes
from trainfit.bench.workloads.autocast_list import OPERATIONS, dtypes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("low", LOW)
def test_dtypes_are_those_predicted(low: str) -> None:
    dtype, wrong = LOW[low], []
    for name, operation in OPERATIONS.items():
        found = dtypes(operation, torch.device("cuda"), dtype)
        if found != (predicted := predicted_dtypes(operation, dtype)):
            wrong.append((name, found, predicted))
    assert not wrong
