"""Prompt sources beyond a list in memory: files and data sets, reasoning-gym, streams, and mixtures of several."""
