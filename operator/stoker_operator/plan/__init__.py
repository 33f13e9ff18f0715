"""The planner: decides, before any pod is scheduled, which hardware a spec runs on and how. No I/O."""
