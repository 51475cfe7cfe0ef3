"""What a weight version costs, in this package's codecs and in others': measured on this machine, as a page.

    results = run(seed=0, say=print)
    print(page(results, seed=0))

Needs torch, to train the model whose weights are sent.
"""

from .report import CACHE, Bar, Results, judge, page, run

__all__ = ["CACHE", "Bar", "Results", "judge", "page", "run"]
