"""Durable flows for Django: plain functions whose progress is a log in the project's own database."""

from __future__ import annotations

from loom_django.definitions import Child, Flow, Outcome, Step, Tool, flow, tool
from loom_django.engine.context import AsyncFlowContext, FlowContext, StepContext
from loom_django.errors import (
    ChildFailed,
    EffectInDoubt,
    ExecutionCancelledError,
    ExecutionClosedError,
    ExecutionConflictError,
    ExecutionFailedError,
    ExecutionNotFoundError,
    LoomError,
    ResultTimeoutError,
    ResumeRefusedError,
    StepFailed,
    VerdictRefusedError,
    WaitTimedOut,
)
from loom_django.kernel.backoff import RetryPolicy
from loom_django.kernel.codec import register_type
from loom_django.kernel.turns import AgentResult, ModelTurn, ToolCall
from loom_django.runtime import Handle, loom
from loom_django.scheduling import Schedule, schedule
from loom_django.statuses import ExecutionStatus

__version__ = "0.1.0"

__all__ = [
    "AgentResult",
    "AsyncFlowContext",
    "Child",
    "ChildFailed",
    "EffectInDoubt",
    "ExecutionCancelledError",
    "ExecutionClosedError",
    "ExecutionConflictError",
    "ExecutionFailedError",
    "ExecutionNotFoundError",
    "ExecutionStatus",
    "Flow",
    "FlowContext",
    "Handle",
    "LoomError",
    "ModelTurn",
    "Outcome",
    "ResultTimeoutError",
    "ResumeRefusedError",
    "RetryPolicy",
    "Schedule",
    "Step",
    "StepContext",
    "StepFailed",
    "Tool",
    "ToolCall",
    "VerdictRefusedError",
    "WaitTimedOut",
    "flow",
    "loom",
    "register_type",
    "schedule",
    "tool",
]
