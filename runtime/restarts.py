"""How long a start may take, how soon and how often an actor is started again: one rule for the whole tree."""

import gc
from typing import Any

import actors

from .config import SupervisionSection

# What a restart can't mend: the model's files, or what the configuration says of them.
HOPELESS = ("ModelError", "SourceError", "TokenizerError", "TemplateError")


def hopeless(reason: actors.ExitReason) -> bool:
    return isinstance(reason, actors.Raised) and any(reason.error.matches(name) for name in HOPELESS)


def rules(supervision: SupervisionSection) -> dict[str, Any]:
    """Of each child that is an actor."""
    return {
        "start_timeout": supervision.start_timeout_s,
        "start_timeout_max": supervision.start_timeout_max_s,
        "stop_timeout": supervision.stop_timeout_s,
        # Streams wait for those who come back: no pause before the first restart that anybody would notice.
        "backoff": actors.Backoff(min=0.05, max=5.0),
        "give_up_on": hopeless,
    }


def limits(supervision: SupervisionSection) -> dict[str, Any]:
    """Of each supervisor."""
    return {"intensity": supervision.intensity, "period": supervision.period_s}


def sweep(ctx: actors.Context) -> None:
    """Free what an earlier life of the actor has left in this process, before the next one takes as much again.

    A life that ended is a web of cycles (its traceback, scopes, closures) around megabytes of vocabulary. The collector
    comes to objects of that age only when there are many of them, not when they are large.
    """
    if ctx.generation > 1:
        gc.collect()
        gc.collect()  # what has a finalizer lives through the first one
