"""Schedulers: sequences, policies, continuous batching and the step loop. numpy only, no model needed."""

from .events import StepEvents
from .fake import FakeExecutor, toy_continuation
from .limits import Counters, StepLimits
from .loop import StepLoop
from .policies import FairShare, Fcfs, Priority, ShortestPrompt
from .scheduler import Scheduler
from .sequence import Sequence, SequenceState, Ticket

__all__ = [
    "Counters",
    "FairShare",
    "FakeExecutor",
    "Fcfs",
    "Priority",
    "Scheduler",
    "Sequence",
    "SequenceState",
    "ShortestPrompt",
    "StepEvents",
    "StepLimits",
    "StepLoop",
    "Ticket",
    "toy_continuation",
]
