"""A collective of a library: one row in a folder that TRAINFIT_CATALOG names."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainfit.catalog import collectives, names
from trainfit.catalog.load import gpu, link, transfers
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.communication import collective_s, traffic
from trainfit.spec.errors import InputError
from trainfit.virtual.cluster.rank import fake_group, one_rank, rank_observers
from trainfit.virtual.cuda.op_kinds import does_no_matrix_work, is_elsewhere
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import virtual_gpu

H200 = gpu("h200")
RANKS, NUM_BYTES = 4, 4 * 1024
ROW = '[ring_shift]\nschemas = ["trainfit_tests::ring_shift"]\npasses = 2\nlike = "all_gather"\n'


@torch.library.custom_op("trainfit_tests::ring_shift", mutates_args=())
def ring_shift(x: Tensor, group: str) -> Tensor:
    return x.clone()


@ring_shift.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRAINFIT_CATALOG", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    rows = collectives.collective_kinds, collectives.kinds_by_schema, collectives.namespaces
    for each in (names.rows, names._read, *rows, does_no_matrix_work):
        each.cache_clear()


def traced() -> Ledger:
    """Return the ledger of one shift of 1,024 floats among four ranks."""
    with (
        fake_group({"shard": RANKS}) as mesh,
        virtual_gpu(GpuTraits.of(H200), prefers_cudnn=False, observers=rank_observers()) as virtual,
        one_rank(virtual.tracer),
    ):
        x = torch.ones(1024, device=torch.device("cpu"))
        torch.ops.trainfit_tests.ring_shift(x, mesh.get_group().group_name)
        return virtual.finish()


def test_a_row_is_all_that_a_collective_takes(folder: Path) -> None:
    assert traced().collectives == []
    assert not is_elsewhere(torch.ops.trainfit_tests.ring_shift.default)
    (folder / "collectives.toml").write_text(ROW)
    forget()
    [found] = traced().collectives
    assert (found.name, found.num_bytes, found.num_ranks) == ("ring_shift", NUM_BYTES, RANKS)
    assert is_elsewhere(torch.ops.trainfit_tests.ring_shift.default), "it is priced once, as a collective"
    known, inside = transfers(H200), link(H200.link)
    bytes_sent = 2 * NUM_BYTES * (RANKS - 1) / RANKS
    through_link_s = bytes_sent / (known.collectives["all_gather"] * inside.bytes_per_s)
    expected_s = through_link_s + (RANKS - 1) * inside.latency_s + known.start_s
    assert collective_s(found, H200) == pytest.approx(expected_s)


def test_it_is_listed_with_what_it_sends(folder: Path) -> None:
    (folder / "collectives.toml").write_text(ROW)
    ledger = traced()
    ledger.segments[:] = [one._replace(step="steady") for one in ledger.segments]
    [row] = traffic(ledger, H200)
    assert (row.kind, row.calls, row.bytes_sent) == ("ring_shift", 1, 2 * NUM_BYTES * (RANKS - 1) // RANKS)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (ROW.replace('like = "all_gather"\n', ""), "ring_shift: no GPU's row has a share .* add like"),
        (ROW.replace("all_gather", "all_gathers"), "like = 'all_gathers': no such collective"),
        (ROW.replace("all_gather", "ring_shift"), "one that is like another itself"),
        (ROW.replace("trainfit_tests::ring_shift", "c10d::allreduce_"), "all_reduce has this operation"),
        (ROW.replace("passes = 2", "passes = -2"), "passes"),
        (ROW.replace("passes = 2", 'pattern = "tree"'), "pattern"),
    ],
)
def test_a_row_that_is_wrong_is_named(folder: Path, row: str, line: str) -> None:
    (folder / "collectives.toml").write_text(row)
    with pytest.raises(InputError, match=line):
        collective_s(traced().collectives[0], H200)
