"""What a call allocates on the CPU."""

from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocations(NamedTuple):
    """Bytes: the largest sum of live allocations, and the largest single one."""

    peak: int
    largest: int


def allocations(function) -> Allocations:
    """Run `function` and return what it allocated, by the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak, largest = max(peak, live), max(largest, event.nbytes())
    return Allocations(peak, largest)
