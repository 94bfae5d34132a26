"""What training frameworks do with metrics on the virtual GPU: deep copies, sums on the device, results on
the host."""

import copy
import pickle
from typing import Any

import torch
from torch import nn

from user_training import inside


class Metric(nn.Module):
    """A running mean as torchmetrics, and so Lightning's ``self.log``, keeps it: states are copies of default
    tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.defaults = {"value": torch.tensor(0.0), "count": torch.tensor(0)}
        self.device = torch.device("cpu")
        self.reset()

    def reset(self) -> None:
        self.states = {
            name: default.detach().clone().to(self.device)
            for name, default in copy.deepcopy(self.defaults).items()
        }

    def update(self, value: torch.Tensor, count: int) -> None:
        self.device = value.device
        self.states = {name: state.to(value.device) for name, state in self.states.items()}
        self.states["value"] = self.states["value"] + value.detach().clone() * count
        self.states["count"] += count


def test_metrics_are_copied_and_read() -> None:
    def check() -> None:
        metrics = {"loss": Metric(), "accuracy": Metric()}
        for _ in range(2):
            loss = nn.Linear(8, 1).cuda()(torch.randn(4, 8, device="cuda")).mean()
            for metric in metrics.values():
                metric.update(loss, 4)
        kept = copy.deepcopy(metrics)
        assert kept["loss"].states["value"].device.type == "cuda"
        assert kept["loss"].defaults["value"].device.type == "cpu"
        assert kept["loss"].states["count"].item() == 8
        results = {name: (m.states["value"] / m.states["count"]).cpu() for name, m in kept.items()}
        assert isinstance(results["loss"].item(), float)
        metrics["loss"].reset()
        assert metrics["loss"].states["count"].item() == 0

    inside(check)


def test_host_tensors_are_copied_with_their_values() -> None:
    outside = torch.arange(3)

    def check() -> None:
        value = torch.tensor([1.5, 2.5], requires_grad=True)
        value.grad = torch.ones(2)
        held: dict[str, Any] = {
            "value": value,
            "again": value,
            "outside": outside,
            "low": torch.zeros(2, dtype=torch.bfloat16),
        }
        held["view"] = torch.arange(6.0).view(2, 3)[:, 1]
        copied = copy.deepcopy(held)
        assert copied["value"] is copied["again"] is not value
        assert copied["value"].tolist() == [1.5, 2.5]
        assert copied["value"].requires_grad
        assert copied["value"].grad.tolist() == [1.0, 1.0]
        assert copied["view"].tolist() == [1.0, 4.0]
        copied["outside"][0] = 9
        assert outside.tolist() == [0, 1, 2]
        assert copied["low"].dtype == torch.bfloat16
        assert copy.copy(value).tolist() == [1.5, 2.5]
        assert pickle.loads(pickle.dumps(value.detach())).tolist() == [1.5, 2.5]

    inside(check)
