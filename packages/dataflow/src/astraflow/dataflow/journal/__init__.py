"""The durable memory of a dataflow: an SQLite file from which it goes on after any death."""

from .journal import Journal, NoJournal, open_journal, reopen_journal
from .records import (
    Attached,
    Bounded,
    Closed,
    Cut,
    Dropped,
    EvaluationBegun,
    EvaluationEnded,
    Forgotten,
    Kept,
    Leased,
    Opened,
    Published,
    Record,
    Registered,
    Settled,
    Stepped,
    Touched,
)
from .restore import OldEvaluation, OldTask, Restored
from .schema import JournalError, open_for_reading

__all__ = [
    "Attached",
    "Bounded",
    "Closed",
    "Cut",
    "Dropped",
    "EvaluationBegun",
    "EvaluationEnded",
    "Forgotten",
    "Journal",
    "JournalError",
    "Kept",
    "Leased",
    "NoJournal",
    "OldEvaluation",
    "OldTask",
    "Opened",
    "Published",
    "Record",
    "Registered",
    "Restored",
    "Settled",
    "Stepped",
    "Touched",
    "open_for_reading",
    "open_journal",
    "reopen_journal",
]
