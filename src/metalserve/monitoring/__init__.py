"""Watching a fleet: targets, rules and dashboards, as data and the functions that render them."""
