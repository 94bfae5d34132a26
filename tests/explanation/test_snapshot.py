"""Memory snapshots: an H100's (tests/data/snapshots: three steps of a small Llama, and one that failed), and
forged ones.

Both were saved by torch 2.11 on one H100 while transformers' Llama trained in bf16; paths were shortened.
"""

import json
import lzma
import os
import pickle
import pickletools
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainfit.cli.main import main
from trainfit.explanation.oom_text import read_message
from trainfit.explanation.peak import difference
from trainfit.explanation.snapshot.explain import explain_snapshot, explained_snapshot
from trainfit.explanation.snapshot.read import Frame, read_snapshot
from trainfit.explanation.snapshot.stacks import made_by
from trainfit.explanation.snapshot.unpickle import NotPlainError, loads
from trainfit.integrations.exporters.memory_viz import write_snapshot
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import Explanation
from trainfit.spec.units import GIB, MIB

SAVED = Path(__file__).parents[1] / "data" / "snapshots"
PEAK_ALLOCATED, PEAK_RESERVED = 604_627_968, 652_214_272
"""Of the three steps: torch.cuda.max_memory_allocated() and max_memory_reserved()."""
WEIGHTS = 42_477_568
"""2 bytes of each of the model's parameters, and its buffers."""


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("snapshots")
    for packed in SAVED.glob("*.xz"):
        (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(snapshots: dict[str, Path]) -> Explanation:
    return explain_snapshot(snapshots["whole"])


def test_the_peak_is_what_the_gpu_counted(whole: Explanation) -> None:
    assert whole.snapshot is not None
    assert whole.snapshot.is_whole
    assert whole.peak_allocated_bytes == PEAK_ALLOCATED
    assert whole.snapshot.peak_reserved_bytes == PEAK_RESERVED


def test_memory_has_the_category_of_who_made_it(whole: Explanation) -> None:
    alive = whole.breakdown
    assert alive.weights == WEIGHTS
    assert alive.optimizer == pytest.approx(2 * WEIGHTS, rel=0.01), "two moments in bf16"
    assert alive.gradients == 0, "the backward has only begun"
    assert (whole.moment.step, whole.moment.phase) == ("steady", "backward")
    attention = [one for one in whole.holders if "modeling_llama.py:175" in one.path]
    assert [(one.category, one.made_in, one.count) for one in attention] == [
        ("activations", "steady.forward", 12)
    ]
    assert alive.total == PEAK_ALLOCATED


def test_it_is_compared_with_a_prediction_by_category(
    snapshots: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192,
        "max_position_embeddings": 512,
    }  # fmt: skip
    recipe = {"model": {"config": config}, "batch": {"micro": 4, "seq": 512}, "hardware": {"gpu": "h100-sxm"}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert main(["explain", str(snapshots["whole"]), str(tmp_path / "recipe.json"), "--json"]) == 0
    found, predicted = json.loads(capsys.readouterr().out)["explanations"]
    assert found["breakdown"]["workspace"] == 64 * MIB, "cuBLAS keeps 32 MiB for each thread"
    for category, measured in found["breakdown"].items():
        assert predicted["breakdown"][category] == pytest.approx(measured, rel=0.01), category


def test_an_exported_snapshot_equals_the_run_that_it_is_of(
    snapshots: dict[str, Path], whole: Explanation, tmp_path: Path
) -> None:
    exported = tmp_path / "a.pickle"
    found = explained_snapshot(snapshots["whole"])
    write_snapshot(found.ledger, exported, found.capacity_bytes, expandable=found.expandable)
    again = explain_snapshot(exported)
    assert again.peak_allocated_bytes == whole.peak_allocated_bytes
    assert again.breakdown == whole.breakdown
    assert difference(whole, again) == []


def test_a_failed_request_is_told_apart_from_its_unwinding(
    snapshots: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(snapshots["oom"])]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "failed: a request of 256.00 MiB, with 1.69 GiB in use, 99.53 MiB reserved and unused" in out
    assert "a limit of the process stopped it (torch.cuda.set_per_process_memory_fraction)" in out
    found = explain_snapshot(snapshots["oom"])
    assert found.snapshot is not None
    assert found.snapshot.failed is not None
    assert not found.snapshot.is_whole
    assert found.breakdown.activations == pytest.approx(1.5 * GIB, rel=0.01), "they were not freed yet"


# -- generated histories

ADDRESS = 1 << 40
Events = list[dict[str, Any]]


def event(action: str, address: int, size: int, *calls: tuple[str, str]) -> dict[str, Any]:
    frames = [{"filename": file, "line": 7, "name": name} for file, name in calls]
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 0, "frames": frames}


def saved(path: Path, events: Events, *, segments: Any = (), **more: Any) -> Path:
    content = {"segments": list(segments), "device_traces": [events], "allocator_settings": {}} | more
    path.write_bytes(pickle.dumps(content))
    return path


FORWARD, STEP = ("model.py", "forward"), ("site-packages/torch/optim/sgd.py", "step")


def a_step(at: int) -> Events:
    """Activations of 3 MiB of which one is freed in the forward, a gradient, a moment and a temporary."""
    names = ["kept", "freed", "gradient", "moment", "scratch"]
    place = {name: ADDRESS + at + number * 64 * MIB for number, name in enumerate(names)}
    return [
        event("alloc", place["kept"], 2 * MIB, FORWARD),
        event("alloc", place["freed"], 1 * MIB, FORWARD),
        event("free_requested", place["freed"], 1 * MIB),
        event("alloc", place["gradient"], 4 * MIB),
        event("free_requested", place["kept"], 2 * MIB),
        event("alloc", place["moment"], 8 * MIB, STEP),
        event("alloc", place["scratch"], 16 * MIB, STEP),
        event("free_requested", place["scratch"], 16 * MIB),
        event("free_requested", place["gradient"], 4 * MIB, FORWARD),
    ]


def test_how_long_it_lives_decides_its_category(tmp_path: Path) -> None:
    begin = event("alloc", ADDRESS - MIB, MIB, ("modeling.py", "__init__"))
    found = explain_snapshot(saved(tmp_path / "a.pickle", [begin, *a_step(0), *a_step(1 << 30)]))
    # In the second step's update: the weight, the gradient, the moments of both updates and the scratch.
    assert found.breakdown.model_dump(exclude_defaults=True) == {
        "weights": MIB, "gradients": 4 * MIB, "optimizer": 2 * 8 * MIB, "temporary": 16 * MIB,
    }  # fmt: skip
    assert (found.moment.step, found.moment.phase) == ("steady", "optimizer")
    assert found.most.activations == 2 * MIB


def test_gradients_live_to_the_next_forward_where_an_update_allocates_nothing(tmp_path: Path) -> None:
    def step(at: int) -> Events:
        kept, gradient, used = (ADDRESS + at + number * 64 * MIB for number in range(3))
        return [
            event("alloc", kept, 2 * MIB, FORWARD),
            event("alloc", gradient, 4 * MIB),
            event("alloc", used, 8 * MIB),
            event("free_requested", used, 8 * MIB),
            event("free_requested", kept, 2 * MIB),
            event("alloc", ADDRESS - MIB - at, 512, FORWARD),
            event("free_requested", gradient, 4 * MIB),
        ]

    found = explain_snapshot(saved(tmp_path / "a.pickle", [*step(0), *step(1 << 30), *step(1 << 31)]))
    assert found.breakdown.gradients == 4 * MIB
    assert found.breakdown.activations >= 2 * MIB
    assert found.breakdown.temporary == 8 * MIB


def test_what_is_recomputed_belongs_to_the_backward() -> None:
    checkpoint = "site-packages/torch/utils/checkpoint.py"
    forward, recomputed = [Frame("checkpoint", checkpoint, 1)], [Frame("recompute_fn", checkpoint, 1)]
    block = Frame("forward", "model.py", 7)
    assert made_by([block, *forward]) == "activations"
    assert made_by([block, *recomputed]) == "backward"
    wrapper = "torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py"
    assert made_by([block, Frame("forward", wrapper, 1)]) == "activations"
    gathers = "site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
    assert made_by([Frame("foreach_all_gather", gathers, 1), block]) == "communication"


def test_what_was_there_before_counts(tmp_path: Path) -> None:
    blocks = [
        {
            "address": ADDRESS,
            "size": 4 * MIB,
            "requested_size": 4 * MIB,
            "state": "active_allocated",
            "frames": [],
        },
        {
            "address": ADDRESS + 4 * MIB,
            "size": 16 * MIB,
            "requested_size": 0,
            "state": "inactive",
            "frames": [],
        },
    ]
    segment = {
        "device": 0, "address": ADDRESS, "total_size": 20 * MIB, "stream": 0, "blocks": blocks,
    }  # fmt: skip
    events = [
        event("alloc", ADDRESS + 4 * MIB, MIB, FORWARD),
        event("free_requested", ADDRESS + 4 * MIB, MIB),
    ]
    found = explain_snapshot(saved(tmp_path / "a.pickle", events, segments=[segment]))
    assert found.snapshot is not None
    assert not found.snapshot.is_whole
    assert found.peak_allocated_bytes == 5 * MIB
    assert found.snapshot.peak_reserved_bytes == 20 * MIB
    assert found.breakdown.weights == 4 * MIB
    assert {one.path for one in found.holders} >= {"before the history began"}


@pytest.mark.parametrize(
    ("free", "cached", "line"),
    [
        (0, 2 * MIB, "missing: 6.00 MiB"),
        (
            7 * MIB,
            2 * MIB,
            "enough was there, in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins",
        ),
        (21 * MIB, 0, "a limit of the process stopped it"),
    ],
)
def test_what_a_failed_request_lacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free: int, cached: int, line: str
) -> None:
    held = 32 * MIB
    events = [
        event("segment_alloc", ADDRESS, held + cached),
        event("alloc", ADDRESS, held, FORWARD),
        event("oom", 0, 8 * MIB, FORWARD) | {"device_free": free},
    ]
    segment = {"device": 0, "address": ADDRESS, "total_size": held + cached, "stream": 0, "blocks": []}
    assert main(["explain", str(saved(tmp_path / "a.pickle", events, segments=[segment]))]) == 0
    assert line in " ".join(capsys.readouterr().out.split())


def test_what_was_set_is_no_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        event("segment_alloc", ADDRESS, 48 * MIB),
        event("alloc", ADDRESS, 32 * MIB, FORWARD),
        event("oom", 0, 12 * MIB, FORWARD) | {"device_free": 0},
    ]
    segment = {"device": 0, "address": ADDRESS, "total_size": 48 * MIB, "stream": 0, "blocks": []}
    settings = {"allocator_settings": {"expandable_segments": True}}
    assert main(["explain", str(saved(tmp_path / "a.pickle", events, segments=[segment], **settings))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "expandable_segments:True was set" in out
    assert "in pieces: torch.cuda.empty_cache() before it gives back whole segments" in out


def test_expandable_segments_join_what_was_freed_in_pieces(tmp_path: Path) -> None:
    pieces = [ADDRESS + number * 32 * MIB for number in range(8)]
    events = [event("alloc", at, 12 * MIB, FORWARD) for at in pieces]
    events += [event("free_requested", at, 12 * MIB) for at in pieces]
    events += [event("alloc", ADDRESS + (1 << 35), 96 * MIB, FORWARD)]
    takes = [event("segment_alloc", at, 20 * MIB) for at in pieces]
    segments = [
        {"device": 0, "address": at, "total_size": 20 * MIB, "stream": 0, "blocks": []} for at in pieces
    ]
    found = explain_snapshot(saved(tmp_path / "a.pickle", takes + events, segments=segments))
    assert found.snapshot is not None
    assert found.snapshot.peak_reserved_bytes == 160 * MIB
    assert found.snapshot.expandable_reserved_bytes == 5 * 20 * MIB, "96 MiB in pages of 20"


# -- what a file may not do


class Executed:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"device_traces": [], "segments": [Executed(target)]}))
    with pytest.raises(InputError, match=r"a\.pickle: no memory snapshot of PyTorch: it has an instruction"):
        read_snapshot(tmp_path / "a.pickle")
    assert not target.exists()


def test_a_list_within_itself_ends(tmp_path: Path) -> None:
    """A gigabyte of names of one list would be 10^14 events."""
    one = [event("alloc", ADDRESS, 512, FORWARD) for _ in range(50)]
    with pytest.raises(InputError, match="no lists of events|more often"):
        explain_snapshot(saved(tmp_path / "a.pickle", [], device_traces=[one, one, one]))
    freed_first = [event("segment_free", ADDRESS, 64 * MIB), *one]
    assert explain_snapshot(saved(tmp_path / "c.pickle", freed_first)).peak_allocated_bytes == 50 * 512
    blocks = [{"address": 1, "size": 512, "state": "inactive"}] * 400
    segment = {"device": 0, "address": 1, "total_size": 512, "stream": 0, "blocks": blocks}
    with pytest.raises(InputError, match="more often"):
        explain_snapshot(saved(tmp_path / "b.pickle", one, segments=[dict(segment) for _ in range(3000)]))


def nested(depth: int) -> bytes:
    """A pickle of tuples within each other, without what pickle.dumps adds."""
    return b")" + b"\x85" * depth


def frame_named(value: bytes) -> bytes:
    frame = b"}(\x8c\x04name" + value + b"\x8c\x08filename\x8c\x01f\x8c\x04lineK\x01u"
    event = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04sizeK\x01\x8c\x06frames](" + frame + b"eu"
    return b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces](](" + event + b"eeu."


def content(**changes: Any) -> bytes:
    return pickle.dumps({"segments": [], "device_traces": [[event("alloc", 1, 512) | changes]]})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"not a pickle at all",
        pickle.dumps({"a": 1}),
        pickle.dumps([1, 2]),
        pickle.dumps({"segments": [], "device_traces": [[1, 2]]}),
        pickle.dumps({"segments": [], "device_traces": 7}),
        pickle.dumps({"segments": [{}], "device_traces": []}),
        content(size=-1),
        content(size=1 << 70),
        content(size=1 << 62),
        content(size=((((1,),),),)),
        content(action=(1, 2)),
        frame_named(nested(1_000_000)),
        b"\x80\x04}" + nested(1_000_000) + b"K\x01s.",
        b"\x80\x04}(" + nested(1_000_000) + b"K\x01u.",
        content(size="large"),
        content(size=2.0),
        content(frames=7),
        content(frames=[7]),
        content(frames=[{"name": "f"}]),
        content()[:-20],
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"]." * 3,
        b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04((((((.",
        b"\x80\x04u.",
        b"\x80\x04h\x05.",
        b"\x80\x04]}e.",
    ],
)
def test_a_forged_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    path = tmp_path / "forged.pickle"
    path.write_bytes(data)
    assert main(["explain", str(path)]) == 65
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "forged.pickle" in error
    assert len(error) < 700


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("optimized", [False, True])
def test_plain_values_of_every_protocol(protocol: int, optimized: bool) -> None:
    shared = {"name": "f", "line": 3}
    value = {
        "numbers": [0, 255, 256, -1, 65536, 1 << 40, -(1 << 40), 1 << 62], "floats": [0.5, -1e300],
        "none": None, "flags": (True, False), "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "shared": [shared] * 5, "long": "x" * 300, "text": "é" * 3, "nested": [[[]]],
        "many": list(range(2000)),
    }  # fmt: skip
    data = pickle.dumps(value, protocol)
    assert loads(pickletools.optimize(data) if optimized else data) == value


def test_other_values_are_refused() -> None:
    for value in (object(), {1}, b"bytes", complex(1), Path("a")):
        with pytest.raises(NotPlainError):
            loads(pickle.dumps(value))


# -- messages

MESSAGES = {
    "with a limit": (
        "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which "
        "76.64 GiB is free. Including non-PyTorch memory, this process has 2.53 GiB memory in use. 1.86 GiB "
        "allowed; Of the allocated memory 1.69 GiB is allocated by PyTorch, and 99.53 MiB is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting",
        "missing: 81.92 MiB",
    ),
    "in pieces": (
        "Tried again. torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a "
        "total capacity of 23.69 GiB of which 512.00 MiB is free. Process 4711 has 3.00 GiB memory in use. "
        "Of the allocated memory 15.00 GiB is allocated by PyTorch, and 4.00 GiB is reserved by PyTorch but "
        "unallocated.",
        "another process holds 3.00 GiB of this GPU: end it, or choose another GPU enough was there, in",
    ),
    "of torch 1": (
        "RuntimeError: CUDA out of memory. Tried to allocate 200.00 MiB (GPU 0; 23.69 GiB total capacity; "
        "22.30 GiB already allocated; 12.94 MiB free; 22.31 GiB reserved in total by PyTorch) If reserved",
        "missing: 176.82 MiB who holds it: torch.cuda.memory._record_memory_history(), then explain the snap",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_an_error_message_is_explained(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, line = MESSAGES[name]
    log = tmp_path / "run.log"
    log.write_text("step 1 loss 3.5\n" * 100_000 + "CUDA out of memory is what we fear.\n" + text + "\n")
    assert main(["explain", str(log)]) == 0
    assert line in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_with_wrapped_lines_says_the_same(name: str, width: int) -> None:
    text, _ = MESSAGES[name]
    wrapped = textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False)
    assert wrapped.count("\n") > 1
    assert read_message(wrapped) == read_message(text)


def test_a_log_without_one_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    log.write_text("all is well\n")
    assert main(["explain", str(log)]) == 65
    assert "run.log: no OutOfMemoryError of PyTorch in it" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none.txt")]) == 65
