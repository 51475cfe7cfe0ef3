"""What any trainer backend must do, as tests that it runs against itself:

    pytest --pyargs astraflow.trainer.conformance --backend NAME

Imports nothing: pytest loads `conformance.plugin` at the start of every run wherever this distribution is installed.
"""
