"""A rollout over a fleet, as the controller thinks of it: its plan, what follows a refusal, and its report."""
