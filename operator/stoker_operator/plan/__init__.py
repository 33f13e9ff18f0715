"""The planner: decides, before pods are created, how a model runs on the hardware of a spec."""
