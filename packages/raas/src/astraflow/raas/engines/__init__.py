"""The engines that come with raas, one module each; found through the entry points `astraflow.engines`."""
