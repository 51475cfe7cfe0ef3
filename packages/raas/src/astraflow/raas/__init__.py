"""Rollout as a service: workers, engines and the workflow runtime."""
