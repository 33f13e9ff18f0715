"""The operator's process: events wake endpoints' tasks, and the leader reconciles."""
