"""A trainer backend in JAX: found by name (`--trainer.backend jax`), nothing else knows it."""

from .backend import JaxTrainer

__all__ = ["JaxTrainer"]
