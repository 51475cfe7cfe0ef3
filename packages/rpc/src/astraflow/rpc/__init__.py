"""Typed services over msgspec: a Protocol served and called in process, over a Unix socket or TCP."""
