"""Reading an answer out of text: the last number in it."""

from __future__ import annotations

import re
from decimal import Decimal

# A sign belongs to the number unless something it could be subtracted from stands before it.
NUMBER = re.compile(r"(?:(?<![\w.)])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)


def parse_last_number(text: str) -> Decimal | None:
    """The last decimal number in `text`, exactly; None if there is none.

    Signs, decimal points and thousands separators are read ("-1,234.50" is -1234.5); a full stop at the end is not part
    of it. `Decimal` compares equal to an int of the same value.
    """
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None
