"""Checkpoints (cuCheckpoint): take running, unmodified programs off their GPU and bring them back, there or on another.

This package holds the requests; an agent, a process of its own, carries them out
(:mod:`~backend.nvidia.checkpoint.agent`).
"""

from backend.core.hostroom import host_room
from backend.nvidia.checkpoint.client import CheckpointError, Done, Ready, move, recover, resume, state, suspend
from backend.nvidia.checkpoint.journal import Left, left, removed
from backend.nvidia.checkpoint.records import Action, State, Step

__all__ = (
    "Action",
    "CheckpointError",
    "Done",
    "Left",
    "Ready",
    "State",
    "Step",
    "host_room",
    "left",
    "move",
    "recover",
    "removed",
    "resume",
    "state",
    "suspend",
)
