"""The operator's process: events wake the endpoints' tasks, and the leader reconciles."""
