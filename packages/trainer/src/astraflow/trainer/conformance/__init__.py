"""What any trainer backend must do, as tests that it runs against itself:

pytest --pyargs astraflow.trainer.conformance --backend NAME
"""

from .toy import make_batch, make_model, make_sample, on_policy

__all__ = ["make_batch", "make_model", "make_sample", "on_policy"]
