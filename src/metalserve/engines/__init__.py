"""Engines as data: which flags a version has, and how a deployment becomes an engine's own configuration."""
