"""AstraFlow's own data algorithms by kind and name."""

from __future__ import annotations

from .bounds import LengthBounds, RewardBounds
from .cool_down import CoolDown
from .correction import DropStale, KeepStale, StalenessCorrection
from .curriculum import Curriculum
from .filter import Filter, FunctionFilter, KeepAll
from .filter_solved import FilterSolved
from .greso import Greso
from .order import EarliestDeadline, FirstIn, FunctionOrder, LastIn, Order
from .overlong import OverlongPenalty
from .pick import Latest, Pick, Prioritised, Random
from .selector import AcceptAll, FunctionSelector, Selector
from .spec import Kind
from .stages import Stages
from .truncated import DropTruncated
from .zero_advantage import ZeroAdvantage

SELECTORS: Kind[Selector] = Kind(
    Selector,  # type: ignore[type-abstract]
    {
        "accept_all": AcceptAll,
        "filter_solved": FilterSolved,
        "greso": Greso,
        "curriculum": Curriculum,
        "stages": Stages,
        "cool_down": CoolDown,
    },
    FunctionSelector,
)

FILTERS: Kind[Filter] = Kind(
    Filter,  # type: ignore[type-abstract]
    {
        "keep_all": KeepAll,
        "zero_advantage": ZeroAdvantage,
        "reward_bounds": RewardBounds,
        "length_bounds": LengthBounds,
        "overlong_penalty": OverlongPenalty,
        "drop_truncated": DropTruncated,
    },
    FunctionFilter,
)

CORRECTIONS: Kind[StalenessCorrection] = Kind(
    StalenessCorrection,  # type: ignore[type-abstract]
    {"drop": DropStale, "keep": KeepStale},
)

ORDERS: Kind[Order] = Kind(
    Order,  # type: ignore[type-abstract]
    {"edf": EarliestDeadline, "fifo": FirstIn, "lifo": LastIn},
    FunctionOrder,
)

PICKS: Kind[Pick] = Kind(
    Pick,  # type: ignore[type-abstract]
    {"latest": Latest, "random": Random, "prioritised": Prioritised},
)
