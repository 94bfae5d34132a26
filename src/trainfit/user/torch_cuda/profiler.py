"""PyTorch's profilers in user code: they keep their schedules, and profile nothing."""

from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler_util import EventList

from trainfit.user.torch_cuda.streams import no_ops

NOTE = "torch.profiler profiled nothing and wrote no trace: the code runs on no device"
STARTS = "prepare_trace start_trace stop_trace toggle_collection_dynamic"
EXPORTS = "export_chrome_trace export_stacks export_memory_timeline add_metadata add_metadata_json"
OTHERS = "preset_metadata_json set_custom_trace_id_callback"


def profiler_functions(notes: set[str]) -> list[tuple[Any, dict[str, Any]]]:
    """Return replacements of the profilers' methods."""

    make = profiler.profile.__init__

    def started(self: Any, *_: Any, **__: Any) -> None:
        notes.add(NOTE)

    def disabled(self: Any, *_: Any, **options: Any) -> None:
        notes.add(NOTE)
        make(self, use_cpu=True)
        self.enabled = False
        self._function_events = EventList([])

    context = {"__enter__": lambda self: self, "__exit__": lambda self, *_: None}
    events = {"key_averages": lambda self, *_, **__: EventList([]), "events": lambda self: EventList([])}
    return [
        (
            torch.profiler._KinetoProfile,
            {**no_ops(f"{EXPORTS} {OTHERS}"), **dict.fromkeys(STARTS.split(), started), **events},
        ),
        (
            profiler.profile,
            {"__init__": disabled, **no_ops("export_chrome_trace export_stacks"), **context, **events},
        ),
        (profiler.emit_nvtx, context),
    ]
